"""Algorithms that exchange parameters instead of gradients."""

from __future__ import annotations

import abc
import contextlib
import copy
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypedDict

import torch

from bagua_kernels.algorithms.algorithm import Algorithm, check_keys
from bagua_kernels.algorithms.rounds.flat_parameters import FlatParameters
from bagua_kernels.algorithms.rounds.means import distance_from_mean, put_means, restored
from bagua_kernels.algorithms.rounds.points import Points, misfit
from bagua_kernels.algorithms.rounds.states import averaged_states, load_states, module_state, put_module_state
from bagua_kernels.algorithms.stats import Stats
from bagua_kernels.algorithms.wrapping.optimizer_state import put_state
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, Mailbox, ReduceOp, open_mailbox
from bagua_kernels.errors import follow_up

BUCKET_BYTES = 10 << 20
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
    training: the statistics of a batch norm belong to a rank's own parameters. `synchronize` averages them.

    A subclass has `at_forward`, `at_step_begin` and `at_step_end`, which are called on the training thread.

    Attributes:
        average_states: True if `synchronize` averages the optimizer's states, too.
    """

    # Ranks that mix with neighbours have no common mean of gradients that weights could change.
    weighable = False

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
            scaler: a `GradScaler` that may leave out this optimizer's step on one rank alone. The round of that step is then
                counted at the next forward pass. Optimizers of this package need no scaler here.

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
        self._failure: BaseException | None = None
        self._mailbox: Mailbox | None = None
        self._points: Points | None = None
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
        self._mailbox = open_mailbox(self._communicator)
        self.open(self._mailbox)
        self.restart()
        self._points = Points(module, self._optimizer, self, self._scaler)
        self._setup_bytes = self._bytes_sent

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
        """Gives all ranks the exact mean of parameters and of buffers of floating point; collective.

        Optimizer states stay local, unless `average_states` is True.
        """
        if self._in_place("synchronize()"):
            put_means(self.module, self.flat, self.mean_source, self.mean_of_ranks)
            if self.average_states:
                put_state(self._optimizer, averaged_states(self._optimizer.state_dict(), self._communicator))
            self.restart()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The module has the mean parameters within the block, and this rank's own afterwards; collective at its beginning.

        Buffers of floating point are averaged, too. Within the block, evaluate in `eval` mode or under `torch.no_grad()`.
        """
        several = self._in_place("averaged()")
        with restored(self.module, self.flat):
            if several:
                put_means(self.module, self.flat, self.mean_source, self.mean_of_ranks)
            yield

    @torch.no_grad()
    def consensus(self) -> float:
        """Returns the root mean square distance of the ranks' parameters from their mean; collective.

        That is sqrt(sum_i |x_i - xbar|^2 / P) over the P ranks, in float64.
        """
        return distance_from_mean(self.flat, self._communicator) if self._in_place("consensus()") else 0.0

    def _in_place(self, call: str) -> bool:
        """Puts what is under way in place; returns False for one rank alone.

        Raises:
            RuntimeError: it was closed.
        """
        if self._closed:
            raise RuntimeError(f"this {type(self).__name__} was closed: call {call} before")
        self.wait()
        return self._points is not None

    def switch_to(self, algorithm: type[Algorithm], **arguments: Any) -> Algorithm:
        """As `Algorithm.switch_to`, after `synchronize`; the optimizer's state becomes rank 0's."""
        self.synchronize()
        if self._points is not None:
            # With gradients that are equal on all ranks, other states would let replicas drift apart.
            put_state(self._optimizer, self._communicator.broadcast_object(self._optimizer.state_dict()))
            self._points.close()
        try:
            return super().switch_to(algorithm, **arguments)
        except Exception:
            if self._mailbox is not None and not self._closed:
                # The other one may have taken them before it was refused.
                self.flat.take_back()
                self._points = Points(self.module, self._optimizer, self, self._scaler)
            raise

    def _hand_over(self) -> None:
        """See `Algorithm._hand_over`; nothing is under way, and the parameters lie in the other one's memory."""
        Algorithm.close(self)

    def close(self) -> None:
        """See `Algorithm.close`; what is under way is put in place before."""
        if not self._closed and self._failure is None:
            self.wait()
        super().close()

    def _stop(self) -> None:
        """See `Algorithm._stop`."""
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
        self.mailbox.leave(f"an exchange failed: {error}")

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
        self._in_place("algorithm_state_dict()")
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
