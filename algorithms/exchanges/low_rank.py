"""The exchange of a bucket of matrices as thin factors."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager

import torch

from bagua_kernels import compression
from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.algorithms.exchanges.vectors import Named
from bagua_kernels.algorithms.policy.policy import Policy
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, ReduceOp, Work
from bagua_kernels.launchers.multitensor import TensorUpdate
from bagua_kernels.quotient import divide_


class LowRankExchange(Exchange):
    """Averages a bucket's matrices as thin factors, and the rest of it as it is, in the steps that its policy chooses."""

    reads_in_place = True
    delivers = True

    def __init__(
        self, bucket: Bucket, communicator: Communicator, policy: Policy, config: compression.PowerSGD
    ) -> None:
        """Begins with residuals of zero and random right factors."""
        super().__init__(bucket, communicator)
        self.policy = policy
        self._config = config
        self._made: compression.LowRank | compression.AlternatingLowRank | None = None
        self._has_matrices: bool | None = None

    @property
    def _factors(self) -> compression.LowRank | compression.AlternatingLowRank:
        if self._made is None:
            # What has one dimension stays dense.
            shapes = [
                view.shape if self.bucket.compressed(slot) else torch.Size([view.numel()])
                for slot, view in enumerate(self.bucket.views)
            ]
            self._made = self._config.start(shapes, self.bucket.names, device=self.bucket.whole.device)
        return self._made

    @torch.no_grad()
    def run(self, step: int) -> Iterator[Work]:
        """See `Exchange.run`."""
        bucket = self.bucket
        if self._has_matrices is None:
            self._has_matrices = len(self._factors.dense) < len(bucket.views)
        if not self._has_matrices or self.policy.codec(bucket.kind, step) is None:
            bucket.collect()
            if self._made is not None:
                # Right factors stay, unless nothing is ever compressed again.
                self._made.release(bucket.views)
                self._made = None if self.policy.outcome == "plain" else self._made
            yield self.communicator.all_reduce(bucket.whole, ReduceOp.AVG)
            return
        with self._factors.withheld(bucket.frozen) if bucket.frozen else contextlib.nullcontext():
            yield from self._exchange_factors()

    def _exchange_factors(self) -> Iterator[Work]:
        bucket, factors = self.bucket, self._factors
        bucket.collect(factors.dense)
        # What has one dimension lies side by side with the flags.
        dense = [*(bucket.views[slot] for slot in factors.dense if bucket.compressed(slot)), bucket.exact]
        sources = bucket.sources()
        factor = factors.left(sources) if isinstance(factors, compression.LowRank) else factors.factor(sources)
        together = torch.cat([factor, *(view.reshape(-1).to(factor.dtype) for view in dense)])
        yield self.communicator.all_reduce(together, ReduceOp.AVG)
        factor, *means = together.split([factor.numel(), *(view.numel() for view in dense)])
        if isinstance(factors, compression.LowRank):
            factor = factors.right(factor)
            yield self.communicator.all_reduce(factor, ReduceOp.AVG)
        with self._updates() as updates:
            if updates is None:
                factors.finish(factor, bucket.views)
            else:
                factors.finish_with_updates(factor, updates)
        for view, mean in zip(dense, means, strict=True):
            view.copy_(mean.view(view.shape))

    def _updates(self) -> AbstractContextManager[dict[int, TensorUpdate] | None]:
        """What the matrices update instead of being written to the bucket."""
        if self.updates is None or not self.delivers or not self._factors.updates:
            return contextlib.nullcontext()
        return self.updates.from_factors(
            [slot for slot in range(len(self.bucket.views)) if slot not in self._factors.dense]
        )

    def rescale(self, factor: float) -> None:
        """See `Exchange.rescale`."""
        if self._made is not None:
            self._made.scale(factor)

    def state(self) -> dict[str, Named]:
        """Residuals, factors, and how many steps they have seen; see `Exchange.state`."""
        state = self._factors.state_dict()
        steps = {name: torch.tensor(float(state["step"]), dtype=torch.float32) for name in state["residuals"]}
        residuals = {name: divide_(residual, self.loss_scale) for name, residual in state["residuals"].items()}
        lefts = {"left": state["lefts"]} if "lefts" in state else {}
        return {"residual": residuals, "right": state["rights"], **lefts, "compressed_steps": steps}

    def load(self, state: Mapping[str, Named]) -> None:
        """See `Exchange.load`."""
        own = self._factors.state_dict()
        names = list(own["residuals"])
        if names and all(name in state.get("residual", {}) for name in names):
            # waits: a checkpoint is loaded.
            step, lefts = int(state["compressed_steps"][names[0]]), state.get("left", {})
            if "lefts" in own and not lefts:
                # Steps that did not alternate have left Q alone, whose turn it is to be used.
                step, lefts = step + step % 2, own["lefts"]
            self._factors.load_state_dict(
                {
                    "step": step,
                    "residuals": {name: state["residual"][name] for name in names},
                    "rights": {name: state["right"][name] for name in names},
                    "lefts": {name: lefts[name] for name in names if name in lefts},
                }
            )
        else:
            self._made = None

    def take_over(self, other: Exchange) -> bool:
        """See `Exchange.take_over`: from an exchange of the same kind, whatever its rank.

        If a scaler skips the next step, its output is lost as in any other step of PowerSGD.
        """
        if not isinstance(other, LowRankExchange) or other.bucket is not self.bucket or other._made is None:
            return False
        self._made = other._made if other._config == self._config else self._config.take_over(other._made)
        if self._made is None:
            return False
        other._made, self.loss_scale = None, other.loss_scale
        return True

    def residual_norm(self) -> float:
        """See `Exchange.residual_norm`."""
        residuals = [] if self._made is None else self._made.state_dict()["residuals"].values()
        return math.sqrt(math.fsum((float(residual.norm()) / self.loss_scale) ** 2 for residual in residuals))
