"""What all algorithms share: a module that is used like `DistributedDataParallel`."""

from __future__ import annotations

import abc
import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, TypedDict

import torch

from bagua_kernels import comm
from bagua_kernels.algorithms.engine.member import EngineCounters
from bagua_kernels.algorithms.stats import Stats
from bagua_kernels.algorithms.wrapping.buffers import Buffers, patterns_of
from bagua_kernels.algorithms.wrapping.claims import Claim, taken
from bagua_kernels.algorithms.wrapping.ddp import ArgumentError, exchanging, is_inside_ddp, refusal
from bagua_kernels.algorithms.wrapping.equal import make_equal, share_state
from bagua_kernels.algorithms.wrapping.recorded import Recorded, annotations_of, recorded
from bagua_kernels.algorithms.wrapping.replicas import check_replicas
from bagua_kernels.algorithms.wrapping.tiers import TierOptions
from bagua_kernels.algorithms.wrapping.weights import check_weights
from bagua_kernels.comm import Communicator, Nodes
from bagua_kernels.compression import codec
from bagua_kernels.errors import CommunicationError
from bagua_kernels.options import check_options
from bagua_kernels.suggestions import did_you_mean

TRAINING = "training"  # a communicator's `call`, but for methods with another name
_FAREWELL = 10.0  # seconds that a constructor which failed waits for the other ranks to fail too
# What every module has; the rest of an algorithm's attributes are not its copies'.
_OF_MODULES = frozenset(torch.nn.Module().__dict__)


class Options(TypedDict, total=False):
    """Keyword arguments of `Algorithm`."""

    communicator: Communicator | None
    hierarchical: bool | None
    nodes: Nodes | Iterable[Iterable[int]] | None
    broadcast_buffers: bool
    average_buffers: bool | str | Sequence[str]


class WrappedModule(torch.nn.Module):
    """A module and what a training loop may call beside it. By itself it exchanges nothing: gradients stay this rank's.

    Copies, by `copy.deepcopy` or pickle, are `LocalCopy`s.

    Attributes:
        module: the wrapped module.
        optimizer: that which it was given or made; None without one.
        weighable: True if ranks may have weights, which `join` uses.
    """

    weighable = True
    module: torch.nn.Module
    optimizer: torch.optim.Optimizer | None = None
    _syncs = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        return self.module(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """What copies and pickles are made of: the module, and what every module has, such as hooks."""
        state = {name: value for name, value in self.__dict__.items() if name in _OF_MODULES}
        return LocalCopy, (), state

    def _replicate_for_data_parallel(self) -> WrappedModule:
        raise RuntimeError(
            f"{type(self).__name__} exchanges the gradients of one replica a process: leave out torch.nn.DataParallel, and "
            "start a process for each GPU, such as with torchrun"
        )

    @property
    def require_backward_grad_sync(self) -> bool:
        """False while backward passes accumulate gradients locally, as within `no_sync`; may be set.

        A pass follows the value that it begins with. Loops that accumulate set it to True for the last micro-batch of a step.
        Algorithms that exchange parameters accept it; their backward passes send nothing in any case.
        """
        return self._syncs

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._set_sync(bool(value))

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Sets `require_backward_grad_sync`, by the name that FSDP2 has for it.

        Args:
            requires_gradient_sync: False to accumulate gradients locally.
            recurse: True, since all gradients of a module are exchanged or none.

        Raises:
            ValueError: `recurse` is False.
        """
        if not recurse:
            raise ValueError(f"all gradients are exchanged or none, got {recurse=}, expected True: leave it out")
        self.require_backward_grad_sync = requires_gradient_sync

    def _set_sync(self, value: bool) -> None:
        """Stores whether backward passes exchange gradients."""
        self._syncs = value

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this block, backward passes accumulate gradients locally; the next one outside exchanges the sum."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def weigh(self, weight: float) -> None:
        """Gives this rank's next gradients a weight, such as its number of samples; collective, before the forward pass.

        The next mean becomes a weighted one: `sum(w_r g_r) / sum(w_r)` over ranks r. Call `zero_grad` before: gradients that
        are still there would be weighted again.

        Raises:
            ValueError: on all ranks, if a weight is negative or not finite or all are zero; or the algorithm knows no weights.
        """
        self._check_weighable()
        check_weights([weight])

    @contextlib.contextmanager
    def join(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """Lets ranks have different numbers of batches: within this block, those that are through take part with weight 0.

        Every forward pass in it announces to the others that this rank still trains. At the end of the block a rank takes part
        in the exchanges of the others until none is left. Then it takes over the parameters and buffers of the last rank.
        Means are over the ranks that still train. Every exchanging backward pass needs one forward pass in training mode.

        Args:
            optimizer: if given, on all ranks, it takes over the state of that rank's too.

        Raises:
            ValueError: the algorithm knows no weights.
        """
        self._check_weighable()
        yield

    def _check_weighable(self) -> None:
        if not self.weighable:
            raise ValueError(
                f"{type(self).__name__} as it was made knows no weights, and so neither weigh() nor join()"
            )

    def synchronize(self) -> None:
        """Makes parameters equal on all ranks; collective. Algorithms that average gradients keep them equal: nothing happens."""

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The module has the mean parameters of all ranks within the block; where all have the same, nothing happens."""
        yield

    def wait(self) -> None:
        """Puts in place what is exchanged beside training. Where backward waits for its exchanges, nothing happens."""

    def consensus(self) -> float:
        """Returns the root mean square distance of the ranks' parameters from their mean; 0 where they are equal."""
        return 0.0

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales the averaged gradients so that their norm over all parameters is at most `max_norm`; call it after backward.

        Averaged gradients have the same bits on all ranks, so no message is needed.

        Returns:
            The norm before.

        Raises:
            RuntimeError: with `apply_in_backward` the gradients have been used by now.
        """
        return torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)


class LocalCopy(WrappedModule):
    """A copy of a wrapped module, which exchanges nothing: it has no communicator, and gradients stay this rank's.

    That is what `copy.deepcopy` and pickle make, for running means of parameters, teachers, and files. It has the names of the
    state that it is a copy of, and may be trained by itself, or its `module` be wrapped anew.
    """


class Algorithm(WrappedModule, abc.ABC):
    """Base of all algorithms: replicas that are made equal, options that ranks agree on, buffers, state, statistics.

    At construction, rank 0's parameters (frozen ones too) and buffers are given to all ranks. On one rank everything is left
    to the module, bit for bit.

    The class and the arguments of all its constructors, a subclass's own too, are compared between ranks.

    Attributes:
        name: what `from_spec` knows the algorithm by.
        registered: all algorithms that `from_spec` knows, by name.
        may_differ: names of this class's own constructor arguments that need not be equal on all ranks. Those of its bases
            count too.
        communicator: its own, of the ranks that train together.
        frozen: the parameters that were frozen when the module was wrapped, with their names.
        refuses_tiers: why the ranks of a node cannot average first; empty if they can.
        needs_even_nodes: True if ranks of a node average first only where all nodes have as many.
        acts_alone: True if it changes the training of one rank alone, too.
        broadcast_buffers: True if a forward pass in training begins with rank 0's buffers, or their means.
        average_buffers: patterns of the names of those whose means it begins with; True for running statistics.
    """

    name: ClassVar[str]
    registered: ClassVar[dict[str, type[Algorithm]]] = {}
    may_differ: ClassVar[frozenset[str]] = frozenset({"module", "communicator"})
    refuses_tiers = ""
    needs_even_nodes = False
    acts_alone = False
    _claim: Claim | None = None
    _closed = False

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "__init__" in cls.__dict__:
            cls.__init__ = recorded(cls.__init__)  # type: ignore[method-assign]

    @recorded
    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        communicator: Communicator | None = None,
        hierarchical: bool | None = None,
        nodes: Nodes | Iterable[Iterable[int]] | None = None,
        broadcast_buffers: bool = True,
        average_buffers: bool | str | Sequence[str] = False,
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: on the communicator's device, with equal parameters' names, shapes and dtypes on all ranks.
            optimizer: if given, its state is set to rank 0's. Its groups, and tensors among their options, stay the objects that
                they are, so that schedules made before go on.
            communicator: the ranks that train together; those of `comm.init()` if None, which is called if it has not been. The
                algorithm talks on a duplicate of its own, so its messages never meet the caller's.
            hierarchical: True to average inside nodes in full precision first, and then between them; False for never; None
                where nodes have several ranks. On one node all ranks exchange alike.
            nodes: which ranks share a node, such as `[[0, 1], [2, 3]]`; found by the hosts if None.
            broadcast_buffers: True to begin each forward pass in training mode with rank 0's buffers on all ranks.
            average_buffers: a pattern of names, as of `fnmatch`, or several. A forward pass begins with the means over all ranks
                of buffers of floating point that match, and with rank 0's others. True: `*running_mean` and `*running_var`.

        Raises:
            TypeError: a trainable parameter is complex, `optimizer` has no `load_state_dict`, or `average_buffers` is neither a
                bool nor patterns.
            ValueError: the modules or any options differ between ranks. A parameter is on another device than the
                communicator. Another algorithm or `DistributedDataParallel` exchanges gradients of the module already.
        """
        super().__init__()
        if optimizer is not None and not hasattr(optimizer, "load_state_dict"):
            raise TypeError(
                f"the second argument is an optimizer, or None, got {optimizer!r}: leave out device_ids; move the module to its "
                "device first"
            )
        self.module = module
        self.optimizer = optimizer
        self._averaged_buffers = patterns_of(average_buffers)
        self.broadcast_buffers = broadcast_buffers or bool(self._averaged_buffers)
        self.average_buffers = average_buffers
        self._steps_alone = 0
        self.frozen: list[tuple[str, torch.nn.Parameter]] = []
        self._world = _world(module) if communicator is None else communicator
        self.hierarchical = hierarchical
        tiers = self._averages_nodes(self._world.device) if hierarchical is None else hierarchical
        # Raises before a rank waits for another.
        self._tier_options = TierOptions(tiers, nodes, self.refuses_tiers, self.needs_even_nodes)
        self.communicator = self._world.duplicate()
        self.communicator.call = f"the constructor of {type(self).__name__}"
        self._setup_bytes = 0
        options: Recorded = self.__dict__.pop("_options")
        try:
            if self.communicator.size > 1 or self.acts_alone:
                if self.communicator.rank == 0:
                    self._warn(optimizer)
                self._agree(module, optimizer, options)
                self._start(module, optimizer)
            elif problem := exchanging(module, Algorithm):
                raise ValueError(problem)
            else:
                self._start_alone(module, optimizer)
            self.communicator.call = TRAINING
        except BaseException as error:
            try:
                self._give_up(error)
            except Exception as second:
                error.add_note(f"What it had opened could not be closed: {type(second).__name__}: {second}")
            raise

    def _warn(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Warns, on one rank, of what does not go together."""

    def _misfit(self, trained: Mapping[str, torch.nn.Parameter]) -> str:
        """Returns why trainable parameters do not fit this algorithm; empty if they do."""
        return ""

    def tiered(self, communicator: Communicator) -> Communicator:
        """Returns what exchanges are made by: a communicator in two tiers that has taken over the given one, or that; collective.

        Args:
            communicator: of all ranks.
        """
        return self._tier_options.tiered(communicator)

    def _averages_nodes(self, device: torch.device) -> bool | None:
        """Returns `hierarchical` where it is not given: None for two tiers where several nodes have several ranks."""
        return None

    def _agree(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None, options: Recorded) -> None:
        """Compares this rank with the others, and makes replicas equal."""
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        problem = exchanging(module, Algorithm) or taken(trained) or self._misfit(trained)
        check_replicas(module, self.communicator, type(self), options, _may_differ(type(self)), problem)
        self.frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
        self.communicator = self.tiered(self.communicator)
        make_equal([*module.parameters(), *module.buffers()], self.communicator)
        if optimizer is not None:
            share_state(optimizer, self.communicator)
        self._setup_bytes = self._bytes_sent
        self._claim = Claim(self, trained)
        self._buffers_of_ranks = Buffers(module)

    @abc.abstractmethod
    def _start(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Begins to exchange, on several ranks."""

    def _start_alone(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Begins to count steps, on one rank alone."""

    def _stop(self) -> None:
        """Ends what `_start` or `_start_alone` began; calling it again does nothing."""

    def _give_up(self, error: BaseException) -> None:
        """Leaves nothing open after a constructor that failed."""
        if self._claim is not None:
            self._claim.release()
        communicators = self._communicators()
        self._stop()
        for each in communicators:
            if not isinstance(error, Exception):
                # The user wants this to end, and the others wait.
                each.abort(f"{type(self).__name__} could not be made: {type(error).__name__}")
            try:
                each.close(_FAREWELL)
            except CommunicationError:  # the others have not failed
                each.abort(f"{type(self).__name__} could not be made: {error}")

    def _communicators(self) -> list[Communicator]:
        """All that are open, each once."""
        return [self.communicator]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module.

        Raises:
            RuntimeError: a `DistributedDataParallel` around it is active; or it was closed, and this is a pass of training.
        """
        self._check_call()
        self._before_forward()
        return self.module(*args, **kwargs)

    def _before_forward(self) -> None:
        """What has to happen on all ranks before a forward pass."""

    def _synchronize_buffers(self, source: int = 0, average: bool = True) -> None:
        """Gives all ranks the buffers of rank `source`, or where that is asked for their means."""
        if self._averaged_buffers and average:
            self._buffers_of_ranks.average(self.communicator, self._averaged_buffers)
        elif self.broadcast_buffers:
            self._buffers_of_ranks.synchronize(self.communicator, source)

    def switch_to(self, algorithm: type[Algorithm], **arguments: Any) -> Algorithm:
        """Ends this algorithm and goes on with another on the same module and ranks; collective.

        What this one remembers (residuals) is dropped; its count of steps is kept, so that random numbers do not repeat.

        Args:
            algorithm: the class.
            **arguments: of its constructor; the communicator is this one's.

        Returns:
            The new wrapper; this one cannot be used any more.
        """
        steps = self.stats().steps
        if self._claim is not None:
            self._claim.release()
        try:
            with self._world.within("switch_to()"):
                other = algorithm(self.module, communicator=self._world, **arguments)
        except Exception:
            if self._claim is not None:
                self._claim.renew()
            raise
        self._hand_over()
        other.train(self.training)
        other._take_steps(steps)
        return other

    def settled(self) -> Algorithm:
        """What training goes on with: this wrapper; see `AutoTune.settled`, after which a loop calls it in vain."""
        return self

    def _hand_over(self) -> None:
        """Ends this algorithm when another one has the module."""
        self.close()

    def _take_steps(self, steps: int) -> None:
        """Goes on with a number of steps."""
        self._steps_alone = steps

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Closes it. After an exception it ends at once, for other ranks may not come to the end of their blocks."""
        if error is None:
            self.close()
        elif not self._closed:
            self._closed = True
            if self._claim is not None:
                self._claim.release()
            # First, for threads may be waiting for other ranks.
            for each in self._communicators():
                each.abort(f"a rank's block ended in an exception: {error}")
            self._stop()

    def unflatten(self) -> None:
        """Moves parameters that this algorithm has put into larger memory to memory of their own; not collective.

        What writes or shares storages then finds ordinary parameters. The next exchange moves them back. Only algorithms on
        parameters move any.
        """

    def close(self) -> None:
        """Stops exchanging and frees the connections; collective over all ranks.

        The module goes on as it is, by itself. This wrapper evaluates; a forward pass for training raises, since its gradients
        would be this rank's only.
        """
        self._closed = True
        if self._claim is not None:
            self._claim.release()
        communicators = self._communicators()
        self._stop()
        for each in communicators:
            each.close()

    def _check_call(self) -> None:
        """Raises if a forward pass would be in vain, or do harm."""
        if self._closed and self.training and torch.is_grad_enabled():
            raise RuntimeError(
                f"this {type(self).__name__} was closed and exchanges nothing any more: call its .module, wrap that anew, or "
                "evaluate with eval() or under torch.no_grad()"
            )
        if is_inside_ddp(self):
            raise RuntimeError(refusal(type(self)))

    def _check_weighable(self) -> None:
        self._check_call()
        super()._check_weighable()

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """Refuses `DistributedDataParallel`, whose constructor reads this attribute of its module."""
        raise RuntimeError(refusal(type(self)))

    @property
    def _is_fsdp_managed_module(self) -> bool:
        """False; FSDP sets this attribute on every module around which it is put, and is refused."""
        return False

    @_is_fsdp_managed_module.setter
    def _is_fsdp_managed_module(self, _: bool) -> None:
        raise RuntimeError(refusal(type(self), "FSDP"))

    def stats(self) -> Stats:
        """What the algorithm has done so far on this rank."""
        counters = self._counters()
        waits = counters.wait_seconds, counters.exchange_seconds
        return Stats(counters.steps, self._bytes_sent - self._setup_bytes, *waits, self.residual_norm(), {})

    @property
    def _bytes_sent(self) -> int:
        """Bytes that this rank has put on the wire since it was made."""
        return sum(each.bytes_sent for each in self._communicators())

    def _counters(self) -> EngineCounters:
        return EngineCounters(self._steps_alone)

    def residual_norm(self) -> float:
        """Returns the Euclidean norm of this rank's residuals; 0 without error feedback."""
        return 0.0

    @abc.abstractmethod
    def algorithm_state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs beside the module's and the optimizer's state, to go on bit for bit; collective."""

    def _state_to_save(self) -> dict[str, Any]:
        """Returns what `algorithm_state_dict` does, in memory that the next step may change: it is to be written at once."""
        return self.algorithm_state_dict()

    def load_algorithm_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Restores what `algorithm_state_dict` returned; collective.

        Args:
            state: this rank's; or, if the number of ranks has changed, those of all earlier ranks. Each rank then begins with
                the mean of their residuals, so that nothing that is still to be sent gets lost.

        Raises:
            ValueError: a state has other keys, or a vector another shape.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        if self.communicator.size > 1 or self.acts_alone:
            self._load(states)
            return
        self._take_steps(int(states[0]["steps"]))
        if any(named for one in states for named in one.get("vectors", {}).values()):
            warnings.warn(
                "one rank alone exchanges nothing, so that what the ranks of the saved state remembered is dropped",
                RuntimeWarning,
                stacklevel=2,
            )

    @abc.abstractmethod
    def _load(self, states: list[Mapping[str, Any]]) -> None:
        """Restores states on several ranks."""

    @classmethod
    def from_spec(
        cls, spec: str, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, **arguments: Any
    ) -> Algorithm:
        """As the function `from_spec`, for this class and its subclasses only."""
        kind, options = cls.named(spec)
        if not issubclass(kind, cls):
            raise ValueError(f"{spec!r} is a {kind.__name__}, expected a {cls.__name__}")
        with fitting(spec):
            return kind(module, optimizer, **{**options, **arguments})

    @staticmethod
    def named(spec: str) -> tuple[type[Algorithm], dict[str, Any]]:
        """Returns the class that a text names, and the arguments in it: an algorithm, or `CompressedAllReduce` with a codec.

        Raises:
            TypeError: it is no text.
            ValueError: it names neither, or one of its values is of another kind than the argument.
        """
        name, options = codec.parse_spec(spec)
        known = Algorithm.registered
        if name in known:
            try:
                check_options(annotations_of(known[name]), known[name].__name__, options)
            except TypeError as error:
                raise ValueError(f"the options of {spec!r} do not fit: {error}") from error
            return known[name], dict(options)
        if name in codec.names():
            return known["compressed"], {"codec": codec.from_spec(spec)}
        classes = {kind.__name__: each for each, kind in known.items()}
        raise ValueError(
            f"there is no algorithm {name!r}, and no codec{did_you_mean(name, [*known, *codec.names()], classes) or ';'} known "
            f"are {', '.join(sorted(known))}, and the codecs {', '.join(each for each in codec.names() if each not in known)}"
        )


@contextlib.contextmanager
def fitting(spec: str) -> Iterator[None]:
    """Makes an error of arguments that a class does not have one of the text in which they stand.

    Raises:
        ValueError: the block raised such an error.
    """
    try:
        yield
    except ArgumentError as error:
        raise ValueError(f"the options of {spec!r} do not fit: {error}") from error


def _world(module: torch.nn.Module) -> Communicator:
    """The ranks of this job, which it joins if nobody has: with the device of the module's first parameter."""
    if comm.is_initialized():
        return comm.world()
    first = next(module.parameters(), None)
    return comm.init(device=None if first is None else first.device)


def check_keys(name: str, states: Sequence[Mapping[str, Any]], expected: set[str]) -> None:
    """Raises unless the states of an algorithm have the keys that they are expected to have.

    Raises:
        ValueError: one has others.
    """
    for one in states:
        if set(one) != expected:
            raise ValueError(f"expected the state of {name} with the keys {sorted(expected)}, got {sorted(one)}")


def _may_differ(kind: type) -> frozenset[str]:
    return frozenset().union(*(vars(each).get("may_differ", ()) for each in kind.__mro__))
