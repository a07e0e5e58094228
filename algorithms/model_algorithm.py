"""Algorithms that exchange parameters instead of gradients."""

from __future__ import annotations

import abc
import contextlib
import copy
import warnings
import weakref
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypedDict

import torch

from bagua_kernels.algorithms.algorithm import Algorithm, check_keys
from bagua_kernels.algorithms.rounds.flat_parameters import FlatParameters
from bagua_kernels.algorithms.rounds.means import distance_from_mean, put_means, restored
from bagua_kernels.algorithms.rounds.points import Points, misfit
from bagua_kernels.algorithms.rounds.states import averaged_states, load_states, module_state, put_module_state
from bagua_kernels.algorithms.rounds.writes import Writes
from bagua_kernels.algorithms.stats import Stats
from bagua_kernels.algorithms.wrapping.equal import share_state
from bagua_kernels.algorithms.wrapping.optimizer_state import put_state
from bagua_kernels.algorithms.wrapping.sending import Sending
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, Mailbox, ReduceOp, open_mailbox
from bagua_kernels.errors import culprits_of, follow_up

BUCKET_BYTES = 10 << 20
# Calls of all ranks that leave parameters as they are.
READS = frozenset({"averaged()", "consensus()"})
_STATE = {"steps", "parameters", "buffers", "optimizer", "vectors", "numbers"}


class ModelOptions(TypedDict, total=False):
    """Keyword arguments of `ModelAlgorithm`."""

    communicator: Communicator | None
    bucket_bytes: int
    average_states: bool
    scaler: torch.amp.GradScaler | None


class ModelAlgorithm(Algorithm):
    """Base of the algorithms that exchange parameters; each rank has its own parameters between exchanges.

    Trainable parameters become views of flat buckets. Gradients, the optimizer's step and its state stay local. So do buffers in
    training: the statistics of a batch norm belong to a rank's own parameters. `synchronize` averages them, and gives all ranks
    rank 0's other buffers.

    A subclass has `at_forward`, `at_step_begin` and `at_step_end`, which are called on the training thread.

    What others write into parameters between a step and the backward pass of the next one, such as `load_state_dict`, is taken
    as it is: see `take_written`. Values that are back by the end of that pass are no write.

    Attributes:
        average_states: True if `synchronize` averages the optimizer's states, too.
    """

    # Ranks that mix with neighbours have no common mean of gradients that weights could change.
    weighable = False
    # An overflow of one rank changes the scale there alone.
    may_differ = frozenset({"scaler"})

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        communicator: Communicator | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        average_states: bool = False,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `Algorithm`. Move it before, and `fuse_optimizer` is not used with it: parameters move into buckets.
            optimizer: whose steps change the parameters; its state is set to rank 0's.
            communicator: as for `Algorithm`.
            bucket_bytes: parameters are exchanged in buckets of about this size.
            average_states: True if `synchronize` averages the optimizer's states, too.
            scaler: a `GradScaler` that may leave out this optimizer's step on one rank alone. Its `step` then counts that step.
                Its states may differ between ranks. Optimizers of this package need no scaler here.

        Raises:
            TypeError: there is no optimizer, or as for `Algorithm`.
            ValueError: `bucket_bytes` is below 1, two parameters share memory, or as for `Algorithm`.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"{type(self).__name__} acts before and after the steps of an optimizer, got {optimizer!r}: make the optimizer "
                "first, and pass it as the second argument"
            )
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes=}")
        self.average_states = average_states
        self._bucket_bytes, self._scaler = bucket_bytes, scaler
        self._optimizer = optimizer
        self._steps = 0
        self._own = False  # parameters are this rank's own, since a step
        self._warned_of_own = False
        self._alone: Any = None
        self._failure: BaseException | None = None
        self._mailbox: Mailbox | None = None
        self._points: Points | None = None
        self._writes: Writes | None = None
        self._at_point = False  # in a call by a hook, not by the caller's code
        self._in_step = False  # from the first forward pass of training to the end of the step
        self._written = False  # parameters were written when that pass began
        self._strays = 0  # passes since the last step before which parameters had changed
        self.flat = FlatParameters({})
        super().__init__(module, optimizer, communicator=communicator, broadcast_buffers=False)

    def _misfit(self, trained: Mapping[str, torch.nn.Parameter]) -> str:
        """See `Algorithm._misfit`."""
        return misfit(self._optimizer, trained)

    def _start(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """See `Algorithm._start`."""
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        kinds = {name: self.kind(name, parameter) for name, parameter in trained.items()}
        self.flat = FlatParameters(trained, bucket_bytes=self._bucket_bytes, align=self.alignment_of, kinds=kinds)
        self._mailbox = open_mailbox(self._communicator, lasting=False)
        self.open(self._mailbox)
        self.restart()
        self._writes = Writes(self.flat)
        self._points = Points(module, self._optimizer, self, self._scaler)
        self._setup_bytes = self._bytes_sent

    def _start_alone(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """See `Algorithm._start_alone`."""
        found = weakref.ref(self)

        def count(*_: Any) -> None:
            if (algorithm := found()) is not None:
                algorithm._steps += 1

        # The optimizer may outlive this wrapper.
        self._alone = self._optimizer.register_step_post_hook(count)
        weakref.finalize(self, self._alone.remove)

    @property
    def mailbox(self) -> Mailbox:
        """What carries the exchanges."""
        assert self._mailbox is not None
        return self._mailbox

    def kind(self, name: str, parameter: torch.Tensor) -> Hashable:
        """Returns what the parameters of a bucket have in common beside their dtype."""

    def alignment_of(self, kind: Any) -> int:
        """Returns the elements to whose multiples parameters of a kind are aligned in a bucket."""
        return 1

    def open(self, mailbox: Mailbox) -> None:
        """Makes what exchanges need; called once on several ranks, with parameters in `flat`; collective."""

    def restart(self) -> None:
        """Sets vectors beside the parameters to what they are where all ranks have the same parameters."""

    def on_forward(self, training: bool) -> None:
        """Called before each forward pass of the module; calls `at_forward` where parameters may be exchanged."""
        writes = self._writes
        if writes is None or not training:
            if writes is None or not self._is_for_evaluation():
                self.at_forward(training)
            return
        if not self._in_step:
            written = self._has_written()
            if written and self.is_part_of_step():
                writes.mark()
                written = False
            self._in_step, self._written, self._strays = True, written, 0
        else:
            self.flat.check(quickly=True)
            if writes.changed():
                self._look_for_strays()
        # Parameters that were written may be put back before the step. Nothing changes them until then.
        if not self._written:
            with self._called():
                self.at_forward(training)

    def _is_for_evaluation(self) -> bool:
        """Returns True if parameters were written, or moved, and may be put back after an evaluation: nothing may change them."""
        assert self._writes is not None
        return self._written if self._in_step else self.flat.is_moved or self._writes.found()

    @contextlib.contextmanager
    def _called(self) -> Iterator[None]:
        self._at_point = True
        try:
            yield
        finally:
            self._at_point = False

    def _look_for_strays(self) -> None:
        """Raises if parameters change from pass to pass, and not by steps of the given optimizer."""
        self._strays += 1
        if self._strays > 1:
            raise RuntimeError(
                f"parameters change between backward passes without a step of the {type(self._optimizer).__name__} that was "
                f"given to {type(self).__name__}, so that nothing is exchanged: give it the optimizer that takes the steps, and "
                "call its step()"
            )

    def on_step_begin(self) -> None:
        """Called when the gradients are complete; calls `at_step_begin`."""
        writes = self._writes
        with self._called():
            if writes is not None:
                if not self._in_step:
                    # A loop that calls parts of the module, or skips a step.
                    self._in_step, self._written = True, self._has_written() and not self.is_part_of_step()
                    self.at_uncalled_step()
                if self._written:
                    self._accept_written()
            self.at_step_begin()
        if writes is not None:
            writes.begin_step()

    def at_uncalled_step(self) -> None:
        """Called at the begin of a step before which there was no forward pass of the module."""

    def on_step_end(self) -> None:
        """Called after the optimizer's step; calls `at_step_end`."""
        # Where a parameter has new memory, the step has changed that.
        self.flat.check(quickly=True)
        with self._called():
            self.at_step_end()
        self._in_step = self._written = False
        self._own = True
        if self._writes is not None:
            self._writes.mark()

    def _has_written(self) -> bool:
        """Returns True if others have written parameters since the last step or exchange."""
        assert self._writes is not None
        self.flat.check(quickly=True)
        return self._writes.found()

    def _accept_written(self) -> None:
        """Lets what is kept beside parameters follow what was written, unless it was put back, or is part of the step."""
        assert self._writes is not None
        self._written = False
        if self._has_written():
            with self._failing(), torch.no_grad():
                self.take_written(self.flat.copies())
        self._writes.mark()

    def is_part_of_step(self) -> bool:
        """Returns True if what was written after a step counts as a part of it."""
        assert self._writes is not None
        return self._writes.belongs_to_step()

    def has_to_keep(self) -> bool:
        """Returns True if parameters have values from outside that no step has taken yet."""
        if self._writes is None:
            return False
        # A pass whose step was left out may have begun meanwhile.
        if self._in_step:
            return self._written and self._has_written()
        return self._has_written() and not self.is_part_of_step()

    def take_written(self, values: list[torch.Tensor]) -> None:
        """Goes on from parameters that were written; called between a backward pass and the optimizer's step.

        Args:
            values: a copy of each bucket, which is to be what the step begins with.
        """
        self.wait()
        self._put(values)

    def _put(self, values: list[torch.Tensor]) -> None:
        for bucket, each in zip(self.flat.buckets, values, strict=True):
            bucket.flat.copy_(each)

    def mark(self) -> None:
        """To be called when this algorithm has written parameters.

        In the middle of a step, where the caller wanted it, autograd is informed. A backward pass then raises whose forward pass
        had other parameters.
        """
        if self._writes is not None:
            self._writes.mark()
            if self._in_step and not self._at_point:
                torch.autograd.graph.increment_version(list(self.flat.parameters.values()))

    @abc.abstractmethod
    def at_forward(self, training: bool) -> None:
        """Called before each forward pass of the module; `training` is True in training mode if gradients are recorded."""

    @abc.abstractmethod
    def at_step_begin(self) -> None:
        """Called when the gradients are complete, before the optimizer's step changes parameters."""

    @abc.abstractmethod
    def at_step_end(self) -> None:
        """Called after the optimizer's step."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Waits for the exchanges under way, and puts their results in place."""

    def mean_source(self, bucket: Bucket) -> torch.Tensor:
        """Returns the vector whose mean over all ranks is that of the bucket's parameters."""
        return bucket.flat

    def mean_of_ranks(self, vector: torch.Tensor) -> None:
        """Replaces a vector of floating point by its mean over all ranks; collective."""
        self._communicator.all_reduce(vector, ReduceOp.AVG).wait()

    def give_first(self, data: torch.Tensor) -> None:
        """Replaces bytes by those of the first rank; collective."""
        self._communicator.broadcast(data, 0).wait()

    def disagreement(self) -> float:
        """Returns the root mean square difference between a parameter here and at a neighbour, when they last met."""
        return 0.0

    @property
    def decay(self) -> float | None:
        """The factor by which a period of the topology shrinks differences at worst; None without a topology."""
        return None

    def stats(self) -> Stats:
        """See `Algorithm.stats`."""
        return replace(super().stats(), disagreement=self.disagreement(), decay=self.decay)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Gives all ranks the exact mean of parameters and running statistics, and rank 0's other buffers; collective.

        Running statistics are buffers of floating point named `running_mean` or `running_var`, as in batch norm. Optimizer
        states stay local, unless `average_states` is True.
        """
        if self._in_place("synchronize()"):
            self._put_means("synchronize()")
            if self.average_states:
                with self._communicator.within("synchronize()"):
                    put_state(self._optimizer, averaged_states(self._optimizer.state_dict(), self._communicator))
            self.restart()
            self._written = self._own = False
            self.mark()

    @property
    def has_own(self) -> bool:
        """True if parameters here may differ from those of other ranks, since a step."""
        return self._own

    def on_state_dict(self) -> None:
        """Called when a state of the module is made; warns once if its parameters are this rank's own."""
        if self._communicator.size > 1 and self.has_own and not self._warned_of_own:
            self._warned_of_own = True
            warnings.warn(
                f"this state_dict() has rank {self._communicator.rank}'s own parameters, which differ between ranks since the "
                f"last exchange of {type(self).__name__}: call synchronize() on all ranks before, or make it within averaged(). "
                "To resume, each rank saves its own, and its algorithm_state_dict()",
                RuntimeWarning,
                stacklevel=5,
            )

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The module has the mean parameters within the block, and this rank's own afterwards; collective at its beginning.

        Its buffers are those that `synchronize` would leave. In the block, evaluate in `eval` mode or under `torch.no_grad()`.
        """
        several, own = self._in_place("averaged()"), self._own
        with restored(self.module, self.flat):
            if several:
                self._put_means("averaged()")
            self._own = False
            try:
                yield
            finally:
                self._own = own

    @torch.no_grad()
    def consensus(self) -> float:
        """Returns the root mean square distance of the ranks' parameters from their mean; collective.

        That is sqrt(sum_i |x_i - xbar|^2 / P) over the P ranks, in float64.
        """
        several = self._in_place("consensus()")
        with self._communicator.within("consensus()"):
            return distance_from_mean(self.flat, self._communicator) if several else 0.0

    def _put_means(self, call: str) -> None:
        """Puts the means of ranks into parameters and buffers, for a call of all ranks."""
        # Around a ring each rank sends, and gets, all of it but a share, twice.
        times = 4 * (self._communicator.size - 1) / self._communicator.size
        nbytes = times * sum(4 * each.flat.numel() for each in self.flat.buckets)
        with self._communicator.within(call), Sending("the mean model", nbytes, self._communicator):
            put_means(self.module, self.flat, self.mean_source, self.mean_of_ranks, self.give_first)

    def _in_place(self, call: str) -> bool:
        """Puts what is under way in place; returns False for one rank alone.

        Raises:
            RuntimeError: it was closed.
        """
        if self._closed:
            raise RuntimeError(f"this {type(self).__name__} was closed: call {call} before")
        self._end_exchanges(call)
        # The callers read and write buckets.
        self.flat.check()
        return self._points is not None

    def _end_exchanges(self, call: str) -> None:
        """Ends what is under way, for a call of all ranks."""
        self.wait()

    def switch_to(self, algorithm: type[Algorithm], **arguments: Any) -> Algorithm:
        """As `Algorithm.switch_to`, after `synchronize`; the states of the optimizer and of `scaler` become rank 0's."""
        self.synchronize()
        if self._points is not None:
            # With gradients that are equal on all ranks, other states would let replicas drift apart.
            with self._communicator.within("switch_to()"):
                share_state(self._optimizer, self._communicator)
                self._share_scale()
            self._points.close()
        try:
            return super().switch_to(algorithm, **arguments)
        except Exception:
            if self._mailbox is not None and not self._closed:
                # The other one may have taken them before it was refused.
                self.flat.take_back()
                self.mark()
                self._points = Points(self.module, self._optimizer, self, self._scaler)
            raise

    def _share_scale(self) -> None:
        """Gives all ranks the scale of rank 0's losses: gradients of other scales have no mean."""
        if self._scaler is not None:
            state = self._communicator.broadcast_object(self._scaler.state_dict())
            if state:
                self._scaler.load_state_dict(state)

    def _hand_over(self) -> None:
        """See `Algorithm._hand_over`; nothing is under way, and the parameters may lie in the other one's memory."""
        Algorithm.close(self)
        self.flat.move_out(for_ever=True)

    def close(self) -> None:
        """See `Algorithm.close`; what is under way is put in place before."""
        if not self._closed and self._failure is None:
            self.wait()
        super().close()
        self.flat.move_out(for_ever=True)

    def unflatten(self) -> None:
        """See `Algorithm.unflatten`."""
        self.flat.move_out()

    def _stop(self) -> None:
        """See `Algorithm._stop`."""
        if self._alone is not None:
            self._alone.remove()
        if self._points is not None:
            self._points.close()
        if self._mailbox is not None:
            self._mailbox.leave(f"{type(self).__name__} was closed")
        if self._failure is not None:
            # Other ranks may not come to a farewell.
            for each in self._communicators():
                each.abort(f"an exchange failed: {self._failure}")

    def _fail(self, error: BaseException) -> None:
        """Ends all exchanges: other ranks that wait for this one raise."""
        self._failure = error
        self.mailbox.leave(f"an exchange failed: {error}", culprits_of(error))

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Ends all exchanges if the block raises."""
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _check_failure(self) -> None:
        if self._failure is not None:
            text = f"this {type(self).__name__} cannot go on since an exchange failed: {self._failure}"
            raise follow_up(self._failure, text) from self._failure

    def _take_steps(self, steps: int) -> None:
        super()._take_steps(steps)
        self._steps = steps

    @property
    def _bytes_sent(self) -> int:
        return super()._bytes_sent + (0 if self._mailbox is None else self._mailbox.bytes_sent)

    def numbers(self) -> dict[str, float]:
        """Returns the numbers that checkpoints contain beside vectors."""
        return {}

    def load_numbers(self, numbers: Mapping[str, float]) -> None:
        """Restores what `numbers` returned."""

    def vectors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Returns the vectors that checkpoints contain: by key, one flat tensor per parameter's name; collective."""
        return self.flat.state()

    def load_vectors(self, states: list[Mapping[str, Any]]) -> None:
        """Restores vectors of this rank, or of all earlier ranks if their number has changed: then they begin anew."""
        if len(states) == 1:
            self.flat.load(states[0]["vectors"])

    def algorithm_state_dict(self) -> dict[str, Any]:
        """See `Algorithm.algorithm_state_dict`; exchanges under way are put in place first.

        Returns:
            `steps`. This rank's `parameters` and `buffers` by name, and the state of its `optimizer`. In `vectors`, for each key
            a tensor for each parameter's name. In `numbers`, further numbers. Each rank needs its own again.
        """
        if self._in_place("algorithm_state_dict()") and not self._in_step and self._has_written():
            self._written = not self.is_part_of_step()
        if self._written and not self._in_step:
            self._accept_written()
        return {
            "steps": self.stats().steps,
            **module_state(self.module),
            "optimizer": copy.deepcopy(self._optimizer.state_dict()),
            "vectors": self.vectors(),
            "numbers": self.numbers(),
        }

    def load_algorithm_state_dict(self, state: Any) -> None:
        """See `Algorithm.load_algorithm_state_dict`; another number of ranks begins with the means of the earlier ones."""
        states = [state] if isinstance(state, Mapping) else list(state)
        check_keys(type(self).__name__, states, _STATE)
        self._load(states)

    @torch.no_grad()
    def _load(self, states: list[Mapping[str, Any]]) -> None:
        """See `Algorithm._load`."""
        several = self._in_place("load_algorithm_state_dict()")
        put_module_state(self.module, states)
        put_state(self._optimizer, load_states([one["optimizer"] for one in states]))
        self._take_steps(int(states[0]["steps"]))
        if several:
            self.restart()
            self.load_vectors(states)
            if len(states) == 1:
                self.load_numbers(states[0]["numbers"])
            self._written = False
            # The means of several states are the same on all ranks.
            self._own = len(states) == 1
            self.mark()
