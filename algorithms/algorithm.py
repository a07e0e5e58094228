"""What all algorithms share: a module that is used like `DistributedDataParallel`."""

from __future__ import annotations

import abc
import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypedDict, TypeVar

import torch

from bagua_kernels import comm
from bagua_kernels.algorithms.engine.member import EngineCounters
from bagua_kernels.algorithms.stats import Stats
from bagua_kernels.algorithms.wrapping.buffers import Buffers, patterns_of
from bagua_kernels.algorithms.wrapping.claims import Claim, taken
from bagua_kernels.algorithms.wrapping.ddp import ArgumentError, exchanging, is_inside_ddp, refusal
from bagua_kernels.algorithms.wrapping.draft import Draft, drafted
from bagua_kernels.algorithms.wrapping.equal import make_equal, share_state, share_state_nearly
from bagua_kernels.algorithms.wrapping.frozen import share_frozen
from bagua_kernels.algorithms.wrapping.optimizer_state import tensors_of
from bagua_kernels.algorithms.wrapping.recorded import Recorded, annotations_of, own_names, recorded
from bagua_kernels.algorithms.wrapping.replicas import check_replicas
from bagua_kernels.algorithms.wrapping.supply import Supply
from bagua_kernels.algorithms.wrapping.tiers import TierOptions
from bagua_kernels.algorithms.wrapping.weights import check_weights
from bagua_kernels.comm import Communicator, LocalCommunicator, Membership, Nodes, rendezvous
from bagua_kernels.comm.communicator import gather_json
from bagua_kernels.compression import codec
from bagua_kernels.errors import CommunicationError
from bagua_kernels.options import check_options
from bagua_kernels.suggestions import did_you_mean

T = TypeVar("T")

TRAINING = "training"  # a communicator's `call`, but for methods with another name
_AT_ONCE = 64 << 10  # bytes of a model that is sent while others wait, whatever a new member has
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
    verify_every: int | None
    on_failure: str


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

    At construction, rank 0's parameters and buffers are given to all ranks. Frozen parameters are compared by digests of their
    bytes, and only those that differ are sent. On one rank everything is left to the module, bit for bit.

    The class and the arguments of all its constructors, a subclass's own too, are compared between ranks.

    Attributes:
        name: what `from_spec` knows the algorithm by.
        registered: all algorithms that `from_spec` knows, by name.
        may_differ: names of this class's own constructor arguments that need not be equal on all ranks. Those of its bases
            count too.
        synonyms: names of other libraries for arguments, with this class's names of the same. Those of its bases count too.
        communicator: its own, of the ranks that train together.
        frozen: the parameters that were frozen when the module was wrapped, with their names.
        refuses_tiers: why the ranks of a node cannot average first; empty if they can.
        needs_even_nodes: True if ranks of a node average first only where all nodes have as many.
        takes_drafts: True if a new member may begin with parameters that are near those of the others.
        supplies: True if a new member gets the rest of a draft of the model while it trains along, see `Supply`.
        refuses_verification: why ranks cannot be compared, which then have nothing in common; empty if they can.
        acts_alone: True if it changes the training of one rank alone, too.
        heals_on_streams: True if it can heal where `Work.wait` blocks no caller, as over NCCL. It then learns of a failure before
            it uses what it has received.
        broadcast_buffers: True if a forward pass in training begins with rank 0's buffers, or their means.
        average_buffers: patterns of the names of those whose means it begins with; True for running statistics.
        verify_every: steps from one comparison of ranks to the next; None for none.
        members: of the job, among whom training heals when ranks are lost; None if it does not.
    """

    name: ClassVar[str]
    registered: ClassVar[dict[str, type[Algorithm]]] = {}
    may_differ: ClassVar[frozenset[str]] = frozenset({"module", "communicator"})
    synonyms: ClassVar[Mapping[str, str]] = MappingProxyType({})
    refuses_tiers = refuses_verification = ""
    needs_even_nodes = False
    takes_drafts = supplies = heals_on_streams = False
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
        verify_every: int | None = None,
        on_failure: str = "raise",
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
            verify_every: steps from one comparison of what all ranks have alike to the next; None for none. Parameters are
                compared, and with local steps outer parameters. Where ranks differ, all raise a `ReplicaError`.
            on_failure: "raise", or "heal": when ranks are lost, those that are left go on without an error. That needs
                `comm.init(elastic=True)`.

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
        self.verify_every = self._checked_every(verify_every)
        self._steps_alone = 0
        self._pair: Communicator | None = None
        self._supply: Supply | None = None
        self._lapsed: CommunicationError | None = None  # because of which members that are behind get nothing more
        self._is_behind = self._gives_nearly = self._completing = False
        self._agreed_passes = self._calls = self._agreed_calls = 0
        self.frozen: list[tuple[str, torch.nn.Parameter]] = []
        self._world = _world(module) if communicator is None else communicator
        self.members = self._members_of(self._world, on_failure, hierarchical)
        if self.members is not None:
            hierarchical = False
        self.hierarchical = hierarchical
        tiers = self._averages_nodes(self._world.device) if hierarchical is None else hierarchical
        # Raises before a rank waits for another.
        self._tier_options = TierOptions(tiers, nodes, self.refuses_tiers, self.needs_even_nodes)
        self.communicator = self._opened()
        self.communicator.call = f"the constructor of {type(self).__name__}"
        self._setup_bytes = 0
        options: Recorded = self.__dict__.pop("_options")
        try:
            if self.members is not None:
                self.members.arrive(lambda world: self._begin_among(world, module, optimizer, options), self)
            elif self.communicator.size > 1 or self.acts_alone:
                self._begin(module, optimizer, options)
            elif problem := exchanging(module, Algorithm):
                raise ValueError(problem)
            else:
                self._start_alone(module, optimizer)
            self.communicator.call = TRAINING
            if self.members is not None:
                self.members.add(self)
        except BaseException as error:
            try:
                self._give_up(error)
            except Exception as second:
                error.add_note(f"What it had opened could not be closed: {type(second).__name__}: {second}")
            raise

    def _checked_every(self, every: int | None) -> int | None:
        """Returns how often ranks are compared.

        Raises:
            ValueError: that is no number of steps, or these ranks have nothing in common.
        """
        if every is not None and self.refuses_verification:
            raise ValueError(f"{self.refuses_verification}: leave out verify_every={every}, and see consensus()")
        if every is not None and every < 1:
            raise ValueError(f"verify_every must be at least 1 step, or None, got {every}")
        return every

    def _members_of(self, world: Communicator, on_failure: str, hierarchical: bool | None) -> Membership | None:
        """Returns the members of a job among which training heals; None if it does not.

        Raises:
            ValueError: `on_failure` is another word, or this algorithm or job cannot heal.
        """
        if on_failure not in ("raise", "heal"):
            raise ValueError(f"expected on_failure 'raise' or 'heal', got {on_failure!r}")
        if on_failure == "raise":
            return None
        title = type(self).__name__
        if refusal := self._refuses_healing():
            raise ValueError(f"{title} cannot heal as it was made: {refusal}")
        if hierarchical:
            raise ValueError(f"{title} averages in one tier where ranks may be lost: leave out hierarchical=True")
        if not isinstance(world.members, Membership):
            raise ValueError(
                "on_failure='heal' needs a job that knows its members: call comm.init(elastic=True) before, and leave out "
                "communicator="
            )
        if not (world.blocks or self.heals_on_streams):
            raise ValueError(
                f"{title} heals over sockets alone, got a {type(world).__name__}: pass device='cpu' to comm.init, take an "
                "algorithm on gradients, or leave out on_failure"
            )
        return world.members

    def _opened(self) -> Communicator:
        """Returns a duplicate of the communicator of all ranks; of those that are left, if some are lost and training heals."""
        if self.members is None:
            return self._world.duplicate()
        made = self.members.arrive(lambda world: world.duplicate())
        self._world = self.members.communicator
        return made

    def _begin(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None, options: Recorded) -> None:
        """Compares ranks, makes replicas equal, and begins to exchange."""
        if self.communicator.rank == 0:
            self._warn(optimizer)
        self._agree(module, optimizer, options)
        self._start(module, optimizer)

    def _begin_among(
        self,
        world: Communicator,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        options: Recorded,
    ) -> None:
        """Begins with the members that are left; as a new one, where others have come through this constructor; collective."""
        assert self.members is not None
        if world is not self._world:
            self._follow(world)
        if self.members.is_arriving:
            self._prepare(module)
            self._take_replica(world, module, optimizer)
        elif world.size > 1 or self.acts_alone:
            self._begin(module, optimizer, options)
        else:
            # Others may join this rank.
            self._agree(module, optimizer, options)
            self._start_alone(module, optimizer)

    def _follow(self, world: Communicator) -> None:
        """Gives up the communicators of members of which some are lost, and all that was begun among these."""
        for each in self._communicators():
            each.abort("a rank was lost while this one began")
        self._stop()
        if self._claim is not None:
            self._claim.release()
            self._claim = None
        self._world, self.communicator = world, world.duplicate()

    def _refuses_healing(self) -> str:
        """Returns why training cannot go on when a rank is lost; empty if it can."""
        return f"{type(self).__name__} goes on with no other ranks; leave out on_failure"

    def _mended(self, call: Callable[[], T]) -> T:
        """Returns what a collective call returns; where a rank is lost, and training heals, of those that are left."""
        if self.members is None or self._completing:
            return call()
        while True:
            try:
                found = call()
                self.communicator.drain()
                return found
            except CommunicationError as error:
                self.members.change(error)

    def _let_in(self) -> None:
        """Lets a process join that wants to, between two rounds; or one be supplied by another that is left."""
        if self.members is None:
            return
        if self._lapsed is not None:
            self.members.change(self._lapsed)
        elif self.members.is_wanted:
            self.members.change(CommunicationError("a process joins"))

    def _completed(
        self, call: Callable[[], T], aside: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    ) -> T:
        """Returns what a collective call returns, which all ranks complete or all repeat where training heals.

        It ends with a barrier: a rank that comes through it knows that the call has ended on all. Calls within the call belong to
        it, and are repeated with it.

        Args:
            call: what all ranks do.
            aside: returns a block in which ranks change after the call: it puts aside what the call has put in place.
        """
        if self.members is None or self._completing or self._closed:
            return call()
        with self.members.admitting_none():
            return self._completed_among(self.members, call, aside)

    def _completed_among(
        self, members: Membership, call: Callable[[], T], aside: Callable[[], AbstractContextManager[None]]
    ) -> T:
        while True:
            found = self._mended(lambda: self._as_one(call))
            try:
                self.communicator.barrier_on_host()
            except CommunicationError as error:
                with aside():
                    members.change(error)
                if self._agreed_calls <= self._calls:
                    continue
            self._calls += 1
            return found

    def _as_one(self, call: Callable[[], T]) -> T:
        self._completing = True
        try:
            return call()
        finally:
            self._completing = False

    def report(self) -> Any:
        """See `Follower.report`: collective calls that have ended, and what the kind of algorithm reports."""
        return [self._calls, self._report()]

    def _report(self) -> Any:
        """Returns what other ranks are to know of this one when an epoch ends, made of what JSON has."""
        return self._counters().steps

    @property
    def passes(self) -> int:
        """Backward passes, or steps, that have ended on this rank; in a change of members, on all of them."""
        return max(self._counters().steps, self._agreed_passes)

    def interrupt(self, reason: str) -> None:
        """See `Follower.interrupt`."""
        for each in self._communicators():
            each.abort(reason)

    def draft(self) -> tuple[Any, Sequence[torch.Tensor]]:
        """See `comm.membership.draft.Drafted`."""
        return drafted(self.module, self.optimizer)

    @property
    def is_behind(self) -> bool:
        """True at a new member that trains along, and has not yet exactly what the others have."""
        return self._is_behind

    def _boundary(self) -> int:
        """Returns the number of passes that have ended on all members when an epoch begins; of rounds where these matter."""
        return self.passes

    def _begin_to_supply(self, communicator: Communicator, boundary: int) -> None:
        """Lets one member give those that are behind what they lack, from the next boundary on; collective.

        Args:
            communicator: of all members.
            boundary: the number of the present one.
        """
        assert self.members is not None
        self._supply = self._lapsed = None
        if (among := self.members.giving_on(communicator)) is None:
            return
        line, source = among
        with line:
            behind = [rank for rank, each in enumerate(gather_json(line, self._is_behind)) if each]
            chosen = sorted({source, *behind})
            if behind and line.rank in chosen and (found := line.split(chosen)) is not None:
                self._supply = Supply(found, chosen.index(source), self._tensors_alike, boundary)

    def _tensors_alike(self) -> list[list[torch.Tensor]]:
        """What steps change alike on all ranks, in groups: each trainable parameter, and what the optimizer keeps for it."""
        kept: dict[torch.Tensor, list[torch.Tensor]] = {}
        for (parameter, _), tensor in ({} if self.optimizer is None else tensors_of(self.optimizer)).items():
            kept.setdefault(parameter, []).append(tensor)
        return [[p.data, *kept.get(p, [])] for p in self.module.parameters() if p.requires_grad]

    def _supply_after(self, passes: int) -> None:
        """Lets those that are behind come nearer, once a pass has ended; collective.

        Args:
            passes: that have ended on this rank.
        """
        try:
            self._advance_supply(passes)
        except CommunicationError as error:
            # The step of this pass is still to be taken. A new member would get parameters without it.
            assert self._supply is not None
            self._supply.among.abort(f"a member is lost that gives or takes: {error}")
            self._supply, self._lapsed = None, error

    def _is_supplying(self) -> bool:
        """Returns True while there is a `Supply`, in which this member gives or takes."""
        return self._supply is not None

    def _advance_supply(self, boundary: int) -> None:
        """Lets those that are behind come nearer at a boundary; collective."""
        if (supply := self._supply) is None:
            return
        supply.advance(boundary)
        if supply.is_done:
            # What it has sent counts.
            self._setup_bytes -= supply.among.bytes_sent
            self._supply, self._is_behind = None, False

    def _prepare(self, module: torch.nn.Module) -> None:
        """Takes a module whose parameters another member will give.

        Raises:
            ValueError: it does not fit this algorithm, or another one has it.
        """
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if problem := exchanging(module, Algorithm) or taken(trained) or self._misfit(trained):
            raise ValueError(problem)
        self.frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
        self._claim = Claim(self, trained)
        self._buffers_of_ranks = Buffers(module)

    def _take_replica(
        self, world: Communicator, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> None:
        """Gets from another member all that this new one needs; collective over all members, as their `enter`."""
        assert self.members is not None
        try:
            with self.members.giving(world) as self._pair:
                self._give_replica()
                self._start(module, optimizer)
            self._begin_to_supply(world, self._boundary())
        finally:
            self._pair = None

    def _give_replica(self) -> None:
        """Gives new members the parameters, the buffers and the optimizer's state of the first one, which has rank 0 here.

        Raises:
            ValueError: at a new member, its model or its options are others.
        """
        if (pair := self._pair) is None:
            return
        trained = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        shapes = [[name, str(each.dtype), list(each.shape)] for name, each in [*trained, *self.module.named_buffers()]]
        own = [type(self).__name__, shapes, self.optimizer is not None]
        everyone = gather_json(pair, {"own": own, "begins_near": not self._is_new or self._begins_near()})
        if own != everyone[0]["own"]:
            raise ValueError(
                f"the members that run have {everyone[0]['own']}, and this new one {own}: make the same model, optimizer and "
                "algorithm"
            )
        calls = pair.broadcast_object(max(self._calls, self._agreed_calls))
        if self._is_new:
            self._calls = calls
        share_frozen(self.frozen, pair)
        self._gives_nearly = all(each["begins_near"] for each in everyone)
        if self._gives_nearly:
            make_equal(list(self.module.buffers()), pair)
            if self.optimizer is not None:
                share_state_nearly(self.optimizer, pair)
            self._is_behind = self._is_new and self.supplies
            return
        make_equal([p for _, p in trained] + list(self.module.buffers()), pair)
        if self.optimizer is not None:
            share_state(self.optimizer, pair)

    def _begins_near(self) -> bool:
        """Returns True at a new member whose model is near that of the others, and too large to be sent while they wait."""
        draft = None if self.members is None else self.members.draft
        is_own = isinstance(draft, Draft) and draft.is_filled and draft.module is self.module
        if not self.takes_drafts or not is_own:
            return False
        return sum(p.nbytes for p in self.module.parameters() if p.requires_grad) > _AT_ONCE

    def _give(self, value: Any) -> Any:
        """Returns, at new members, what the first one gives; elsewhere the value itself."""
        return value if self._pair is None else self._pair.broadcast_object(value)

    @property
    def _is_new(self) -> bool:
        """True at a new member while it is given what it needs."""
        return self._pair is not None and self._pair.rank > 0

    def enter(self, communicator: Communicator, reports: Mapping[int, Any]) -> None:
        """See `Follower.enter`."""
        before = self._communicators()
        for each in before:
            each.abort("its epoch has ended")
        # What they have sent counts.
        self._setup_bytes -= sum(each.bytes_sent for each in before)
        if communicator.size > 1:
            self.communicator = communicator.duplicate()
        else:
            self.communicator = LocalCommunicator.alone(communicator.timeout, communicator.device)
        self.communicator.call = TRAINING
        self._world = communicator
        self._agreed_calls = max(calls for calls, _ in reports.values())
        newcomers = [rank for rank in range(communicator.size) if rank not in reports]
        old = communicator.split(sorted(reports)) if newcomers else self.communicator
        assert old is not None
        assert self.members is not None
        try:
            with self.members.giving(communicator) as self._pair:
                self._go_on({rank: each for rank, (_, each) in reports.items()}, old)
            self._begin_to_supply(communicator, self._boundary())
        finally:
            self._pair = None
            # Where this failed, the others must not wait for this rank.
            if newcomers:
                old.abort("its ranks have agreed, or one of them is lost")

    def _go_on(self, reports: Mapping[int, Any], old: Communicator) -> None:
        """Goes on among the members of an epoch, with `self.communicator`; collective.

        Args:
            reports: of those that were members before, by rank.
            old: a communicator of these; `self.communicator` if nobody is new.
        """
        self._give_replica()

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
        share_frozen(self.frozen, self.communicator)
        make_equal([*trained.values(), *module.buffers()], self.communicator)
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
            if not isinstance(error, Exception) or (self.members and isinstance(error, CommunicationError)):
                # The user wants this to end, or a rank is lost, and the others wait.
                each.abort(f"{type(self).__name__} could not be made: {type(error).__name__}")
            try:
                each.close(_FAREWELL)
            except CommunicationError:  # the others have not failed
                each.abort(f"{type(self).__name__} could not be made: {error}")

    def _communicators(self) -> list[Communicator]:
        """All that are open, each once."""
        return [self.communicator, *([] if self._supply is None else [self._supply.among])]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module.

        Raises:
            RuntimeError: a `DistributedDataParallel` around it is active; or it was closed, and this is a pass of training.
        """
        self._check_call()
        if self.training and torch.is_grad_enabled():
            rendezvous.reach(lambda: self.passes)
            if self.members is not None and self.members.notice.reason:
                self._depart(self.members)
        self._before_forward()
        return self.module(*args, **kwargs)

    def _depart(self, members: Membership) -> None:
        """Leaves the job, as was asked for, if this rank is between two rounds or has no time left; then the process ends.

        Raises:
            SystemExit: with the status 0, so that no launcher takes this for a failure.
        """
        if self._is_between_rounds() or members.notice.is_urgent:
            self.wait()
            members.leave(members.notice.reason)
            raise SystemExit(0)

    def _is_between_rounds(self) -> bool:
        """Returns True before a forward pass whose step follows a round, so that others have all that this rank has found."""
        return True

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
        if self.members is not None and not self._closed:
            self._completed(self._finish)
        self._closed = True
        if self._claim is not None:
            self._claim.release()
        if self.members is not None:
            self.members.remove(self)
        communicators = self._communicators()
        self._stop()
        for each in communicators:
            try:
                each.close()
            except CommunicationError as error:
                if self.members is None:
                    raise
                # A rank is lost, or has ended, after all had come here.
                each.abort(f"it was closed: {error}")

    def _finish(self) -> None:
        """Does what other ranks expect of this one until all have come to `close`; collective."""

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
        if self.members is not None:
            raise ValueError(
                "weigh() and join() compare all ranks, one of which may be lost: give all ranks as many samples, as a sampler "
                "does that follows the model, or leave out on_failure='heal'"
            )
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
        found = Stats(counters.steps, self._bytes_sent - self._setup_bytes, *waits, self.residual_norm(), {})
        if (members := self.members) is None:
            return found
        return replace(found, epochs=members.epoch, losses=members.losses, healing_seconds=members.healing_seconds)

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
            return kind(module, optimizer, **{**options, **own_names(kind, arguments)})

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
                options = own_names(known[name], options)
                check_options(annotations_of(known[name]), known[name].__name__, options)
            except TypeError as error:
                raise ValueError(f"the options of {spec!r} do not fit: {error}") from error
            return known[name], options
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
