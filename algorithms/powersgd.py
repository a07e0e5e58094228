"""PowerSGD: gradients travel as two thin factors."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from bagua_kernels import compression
from bagua_kernels.algorithms.algorithm import BUCKET_BYTES, Algorithm
from bagua_kernels.algorithms.engine.units import Units
from bagua_kernels.algorithms.engine.vectors import Named
from bagua_kernels.algorithms.policy.only_if_faster import Trial
from bagua_kernels.algorithms.policy.schedule import EXACT_DTYPES
from bagua_kernels.algorithms.registry import register
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import ReduceOp
from bagua_kernels.launchers.multitensor import TensorUpdate

# Messages are a hundredth of the gradients, so that what a bucket costs is its two rounds of them, not the wire. Nothing hides
# the last one: it is to be the smaller of two, unless gradients are many.
_FIRST_SHARE = 0.7
_LARGE_BUCKET_BYTES = 32 << 20
_State = compression.LowRank | compression.AlternatingLowRank


@register
class PowerSGD(Algorithm):
    """Low-rank gradient compression with error feedback (Vogels, Karimireddy and Jaggi, NeurIPS 2019, algorithms 1 and 2).

    For each bucket of gradients, in the order in which backward completes them:

    1. In the first `start_step` steps, average it as it is: early gradients are not of low rank.
    2. Add each matrix's residual: M. Multiply by its right factor, P = M Q, and average P over the ranks, and in the same
       message all tensors that are not compressed.
    3. Make P's columns orthonormal. Q = M^T P; average Q.
    4. The gradient is P Q^T, the same on all ranks; the residual is this rank's M less that. With `apply_in_backward` on a CPU
       it updates the parameters in the pass that multiplies.

    Buckets follow one another, so that backward overlaps with all but the last; in each, two messages. With `alternate` steps 2
    and 3 take turns, as in the library of the paper's authors (github.com/epfml/powersgd): a step makes P of the last Q, made
    orthonormal, or Q of the last P, in one message.
    """

    name = "powersgd"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        rank: int = 1,
        start_step: int = 0,
        min_compression: float = 2.0,
        warm_start: bool = True,
        alternate: bool = False,
        seed: int = 0,
        scaler: torch.amp.GradScaler | None = None,
        only_if_faster: bool = False,
        bucket_bytes: int | None = None,
        **arguments: Any,
    ) -> None:
        """Wraps a module; collective over all ranks. All arguments are equal on all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: as for `Algorithm`.
            rank: columns of a factor; 1 to 4.
            start_step: steps without compression at the beginning.
            min_compression: a matrix is compressed if its factors are so many times smaller than itself.
            warm_start: begin each step with the right factors of the last.
            alternate: make one factor in each step, in turn.
            seed: of the first right factors.
            scaler: as for `CompressedAllReduce`.
            only_if_faster: as for `CompressedAllReduce`.
            bucket_bytes: as for `Algorithm`; by default seven tenths of the gradients, at most 32 MiB; or
                with `only_if_faster`, which may give compression up, 10 MiB.
            **arguments: as for `Algorithm`.

        Raises:
            ValueError: a number is out of its range, or as for `Algorithm`.
        """
        if start_step < 0:
            raise ValueError(f"start_step must be 0 or more, got {start_step}")
        self.config = compression.PowerSGD(rank, seed, min_compression, warm_start, alternate)
        self.start_step = start_step
        self._units = Units(scaler, bool(arguments.get("apply_in_backward")))
        self._states: dict[int, _State] = {}
        self._trial = Trial() if only_if_faster else None
        if bucket_bytes is None:
            total = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
            first = max(math.ceil(_FIRST_SHARE * total), 1)
            bucket_bytes = BUCKET_BYTES if only_if_faster else min(first, _LARGE_BUCKET_BYTES)
        super().__init__(module, optimizer, bucket_bytes=bucket_bytes, **arguments)

    def place(self, name: str, parameter: torch.nn.Parameter) -> tuple[Hashable, bool]:
        """See `Algorithm.place`: what has fewer than two dimensions is not compressed, nor float64."""
        return None, parameter.dim() < 2 or not parameter.numel() or parameter.dtype in EXACT_DTYPES

    @property
    def holds_back(self) -> str:
        """See `Algorithm.holds_back`."""
        return f"factors of rank {self.config.rank}"

    @property
    def small_first(self) -> bool:
        """See `Algorithm.small_first`."""
        return self._trial is not None

    @property
    def lends(self) -> bool:
        """See `Algorithm.lends`; a subclass may expect gradients in the bucket."""
        return type(self).exchange is PowerSGD.exchange

    def exchange(self, bucket: Bucket, step: int) -> None:
        """See `Algorithm.exchange`."""
        change = self._units.change(bucket.index)
        if change != 1.0:
            self._state(bucket).scale(change)
        if not self.compresses(bucket, step):
            bucket.collect()
            self._hand_over(bucket)
            self.lane(bucket).all_reduce(bucket.whole, ReduceOp.AVG).wait()
            return
        state = self._state(bucket)
        frozen = self.frozen(bucket)
        with state.withheld(frozen) if frozen else contextlib.nullcontext():
            self._exchange_factors(bucket, state)

    def _exchange_factors(self, bucket: Bucket, state: _State) -> None:
        bucket.collect(state.dense)
        # What has one dimension lies side by side with the flags.
        dense = [*(bucket.views[slot] for slot in state.dense if bucket.compressed(slot)), bucket.exact]
        sources = bucket.sources()
        factor = state.left(sources) if isinstance(state, compression.LowRank) else state.factor(sources)
        together = torch.cat([factor, *(view.reshape(-1).to(factor.dtype) for view in dense)])
        self.lane(bucket).all_reduce(together, ReduceOp.AVG).wait()
        factor, *means = together.split([factor.numel(), *(view.numel() for view in dense)])
        if isinstance(state, compression.LowRank):
            factor = state.right(factor)
            self.lane(bucket).all_reduce(factor, ReduceOp.AVG).wait()
        with self._updates(bucket, state) as updates:
            if updates is None:
                state.finish(factor, bucket.views)
            else:
                state.finish_with_updates(factor, updates)
        for view, mean in zip(dense, means, strict=True):
            view.copy_(mean.view(view.shape))

    def _updates(self, bucket: Bucket, state: _State) -> AbstractContextManager[dict[int, TensorUpdate] | None]:
        """What the matrices of a bucket update instead of being written to it."""
        # A subclass may look at the bucket afterwards.
        if self._steps is None or not state.updates or type(self).exchange is not PowerSGD.exchange:
            return contextlib.nullcontext()
        return self._steps.updates_of(bucket, [slot for slot in range(len(bucket.views)) if slot not in state.dense])

    def compresses(self, bucket: Bucket, step: int) -> bool:
        """See `Algorithm.compresses`."""
        if step < self.start_step or (self._trial is not None and not self._trial.compresses(step)):
            return False
        return len(self._state(bucket).dense) < len(bucket.views)

    def _hand_over(self, bucket: Bucket) -> None:
        """Adds residuals to the gradient; right factors stay, unless nothing is ever compressed again."""
        state = self._states.get(bucket.index)
        if state is not None:
            state.release(bucket.views)
        if self._trial is not None and self._trial.outcome == "plain":
            self._states.pop(bucket.index, None)

    def _state(self, bucket: Bucket) -> _State:
        if bucket.index not in self._states:
            # What has one dimension stays dense.
            shapes = [
                view.shape if bucket.compressed(slot) else torch.Size([view.numel()])
                for slot, view in enumerate(bucket.views)
            ]
            self._states[bucket.index] = self.config.start(shapes, bucket.names, device=bucket.whole.device)
        return self._states[bucket.index]

    def forget(self) -> None:
        """See `Algorithm.forget`."""
        self._states.clear()
        self._units.forget()

    def remembered(self, bucket: Bucket) -> dict[str, Named]:
        """Residuals without scale, factors, and how many steps they have seen; see `Algorithm.remembered`."""
        state, unit = self._state(bucket).state_dict(), self._units.of(bucket.index)
        steps = {name: torch.tensor(float(state["step"]), dtype=torch.float32) for name in state["residuals"]}
        residuals = {name: residual / unit for name, residual in state["residuals"].items()}
        lefts = {"left": state["lefts"]} if "lefts" in state else {}
        return {"residual": residuals, "right": state["rights"], **lefts, "compressed_steps": steps}

    def remember(self, bucket: Bucket, vectors: Mapping[str, Named]) -> None:
        """See `Algorithm.remember`."""
        state = self._state(bucket)
        own = state.state_dict()
        names = list(own["residuals"])
        if names and all(name in vectors.get("residual", {}) for name in names):
            step, lefts = int(vectors["compressed_steps"][names[0]]), vectors.get("left", {})
            if "lefts" in own and not lefts:
                # Steps that did not alternate have left Q alone, whose turn it is to be used.
                step, lefts = step + step % 2, own["lefts"]
            state.load_state_dict(
                {
                    "step": step,
                    "residuals": {name: vectors["residual"][name] for name in names},
                    "rights": {name: vectors["right"][name] for name in names},
                    "lefts": {name: lefts[name] for name in names if name in lefts},
                }
            )

    def residual_norm(self) -> float:
        """See `Algorithm.residual_norm`."""
        states = [(self._units.of(index), state.state_dict()) for index, state in self._states.items()]
        norms = [float(r.norm()) / unit for unit, state in states for r in state["residuals"].values()]
        return math.sqrt(math.fsum(norm**2 for norm in norms))
