"""Local steps whose pseudo-gradients are sparse, with a decayed residual instead of a momentum: SparseLoCo."""

from __future__ import annotations

from typing import Literal, Unpack

import torch

from bagua_kernels.algorithms.exchanges.gathered import SparseMean
from bagua_kernels.algorithms.exchanges.vectors import Named
from bagua_kernels.algorithms.local_steps.kind import OuterKind
from bagua_kernels.algorithms.local_steps.outer_loop import LoopOptions, OuterLoop
from bagua_kernels.algorithms.local_steps.outer_round import OuterParts, OuterRound, OuterRule
from bagua_kernels.algorithms.local_steps.outer_rule import Plain
from bagua_kernels.algorithms.local_steps.outer_setup import pseudo_gradient
from bagua_kernels.algorithms.models.local_model import LocalModel
from bagua_kernels.algorithms.policy.schedule import Assignment
from bagua_kernels.algorithms.registry import register
from bagua_kernels.bucket import Bucket
from bagua_kernels.compression import ChunkedTopK, Codec
from bagua_kernels.compression.codec import from_spec

# Payloads are a two-hundredth of that: messages of small buckets would be so short that a slow line is idle between them.
_BUCKET_BYTES = 256 << 20


@register
class SparseLoCo(OuterLoop):
    """Ranks train by themselves, and send their largest changes at times (SparseLoCo, Sarfi et al., 2025, algorithm 1).

    1. Take `interval` steps of the optimizer, which is AdamW in the paper.
    2. e = beta e + (start - x), the residual of this rank.
    3. v = the largest elements of e in each chunk, with their signs and two magnitudes; e -= v.
    4. d = the mean of all ranks' v. An element is divided by the number of ranks that have sent it, or by that of all ranks.
    5. start -= outer_lr d, and x = start, at once or after `delay` steps, see `OuterLoop`.

    Biases, norms and tensors below one chunk are dense, with these steps in place of 2 to 4, as with `DiLoCo` and a codec:

    2. e = e + (start - x). This residual does not decay.
    3. v = all elements of e, encoded by `dense`;  e -= v.
    4. d = the mean of all ranks' v, encoded by `dense` with a residual of its own.

    In two tiers, the ranks of a node take the mean of their x in step 2, and have one residual and one payload.

    The decayed residual takes the place of an outer momentum, which harms here. In a round one of P ranks sends
    0.0205 (P - 1) bytes per sparse element. At 64 ranks these are 1.29, and `DiLoCo` with 4 bits sends 1.04. In two tiers that
    counts nodes instead of ranks.

    Options and their defaults, all by keyword::

        interval=30             optimizer's steps from one round to the next
        outer_lr=1.0            of step 5
        beta=0.95               of step 2, from 0 to 1
        codec='chunked_topk:k=64,chunk=4096'
                                the codec of step 3, or its spec
        dense='absmax_int8'     how biases, norms and tensors below one chunk are sent: another codec, its spec, or None
                                for float32
        reduce='contributors'   what step 4 divides by: "contributors" as published programs do, or "mean" as the paper
                                does
        exact='1d'              patterns of names of parameters that no codec encodes; "1d" for all biases and norms
        delay=0                 optimizer's steps, less than `interval`, that an exchange may take beside training
        blend=None              from 0 to 1: the share of a rank's own parameters when a result is used
        sync_state=None         how often the optimizer's first and second moments are averaged (DES-LOC, Iacob et al.,
                                2025)
        by_speed=False          True if ranks take steps in proportion to their speeds, of which `interval` is the mean
                                then
        quorum=None             ranks whose pseudo-gradients are enough for an outer step; None for all
        grace=0.0               seconds for which a quorum waits for further ranks
        communicator=None       the ranks that train together; those of `comm.init()` if None, which is called if it has
                                not been
        hierarchical=None       True to average inside nodes in full precision first, and then between them; False for
                                never; None where nodes have several ranks
        nodes=None              which ranks share a node, such as `[[0, 1], [2, 3]]`; found by the hosts if None
        bucket_bytes=268435456  parameters are exchanged in buckets of about this size
        average_states=False    True if `synchronize` averages the optimizer's states, too
        verify_every=None       steps from one comparison of what all ranks have alike to the next; None for none, at
                                the first round after so many steps
        on_failure='raise'      "raise", or "heal": when ranks are lost, those that are left go on without an error

    Attributes:
        codec: of step 3 for sparse parameters.
        dense: the codec of dense parameters; None for float32.
    """

    name = "sparse_loco"
    begins_in_node = True
    # A payload is made when a round begins, and its elements are those of few ranks.
    weighs = False

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        interval: int = 30,
        outer_lr: float = 1.0,
        beta: float = 0.95,
        codec: ChunkedTopK | str = "chunked_topk:k=64,chunk=4096",
        dense: Codec | str | None = "absmax_int8",
        reduce: Literal["contributors", "mean"] = "contributors",
        **options: Unpack[LoopOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `OuterLoop`.
            optimizer: as for `OuterLoop`.
            interval: as for `OuterLoop`.
            outer_lr: of step 5. The paper has 1, and less in the last part of training.
            beta: of step 2, from 0 to 1.
            codec: the codec of step 3, or its spec.
            dense: how biases, norms and tensors below one chunk are sent: another codec, its spec, or None for float32. Names in
                `exact` other than "1d" stay float32, and so do tensors that are shorter in float32 than one block of the codec.
            reduce: what step 4 divides by: "contributors" as published programs do, or "mean" as the paper does.
            **options: as for `OuterLoop`; by default `bucket_bytes` is 256 MiB.

        Raises:
            TypeError: as for `OuterLoop`, the codec is no `ChunkedTopK`, or `dense` is one or is no codec.
            ValueError: a number or a spec does not fit, or as for `OuterLoop`.
        """
        found: Codec = from_spec(codec) if isinstance(codec, str) else codec
        if not isinstance(found, ChunkedTopK):
            raise TypeError(f"expected codec to be a ChunkedTopK or the spec of one, got {codec!r}")
        if not outer_lr > 0 or not 0 <= beta <= 1:
            raise ValueError(f"outer_lr must be above 0, beta from 0 to 1, got {outer_lr=} and {beta=}")
        if reduce not in ("contributors", "mean"):
            raise ValueError(f"reduce must be 'contributors' or 'mean', got {reduce!r}")
        self.outer_lr, self.beta, self.reduce = outer_lr, beta, reduce
        self.codec, self.dense = found, _dense_codec(dense)
        options.setdefault("bucket_bytes", _BUCKET_BYTES)
        self.acts_alone = self.outer_lr != 1.0
        super().__init__(module, optimizer, interval=interval, codec=found, min_numel=found.chunk, **options)

    def kind(self, name: str, parameter: torch.Tensor) -> OuterKind:
        """See `OuterLoop.kind`: dense parameters have a kind of their own, if a codec encodes them."""
        found = super().kind(name, parameter)
        if found.schedule is not None or self.dense is None:
            return found
        named = tuple(pattern for pattern in self.assignment.exact if pattern != "1d")
        # A block belongs to one tensor: with its last one filled up, a tensor of fewer elements would be longer than in float32.
        least = self.dense.payload_size(self.dense.block) // 4
        schedule, exact = Assignment.make(self.dense, exact=named, min_numel=least).place(name, parameter)
        return OuterKind.of(found.part, None if exact else schedule)

    def round_for(self, local: LocalModel, bucket: Bucket) -> OuterRound:
        """See `OuterLoop.round_for`."""
        difference = pseudo_gradient(bucket)
        if difference.kind != self.assignment.default:
            return OuterRound(local, bucket, self.setup.parts_for(bucket), Plain(self.outer_lr))
        sparse = SparseMean(difference, self.setup.communicator, self.codec, self.reduce == "contributors")
        meets = local.communicator.size > 1 or self.quorum is not None
        parts = self.setup.parts_for(bucket, sparse)
        return SparseRound(local, bucket, parts, Plain(self.outer_lr), sparse, self.beta, meets)


class SparseRound(OuterRound):
    """Sends the largest elements of a residual; one pass makes it and the payload."""

    def __init__(
        self,
        local: LocalModel,
        bucket: Bucket,
        parts: OuterParts,
        rule: OuterRule,
        sparse: SparseMean,
        beta: float,
        meets: bool,
    ) -> None:
        """Begins without a residual.

        Args:
            local: as for `Round`.
            bucket: as for `Round`.
            parts: as for `OuterRound`.
            rule: as for `OuterRound`.
            sparse: the exchange.
            beta: of step 2.
            meets: False for one rank alone, whose pseudo-gradient is its own mean.
        """
        super().__init__(local, bucket, parts, rule)
        self._sparse, self._beta, self._meets = sparse, beta, meets
        self._residual_before: torch.Tensor | None = None

    def remember(self, number: int) -> None:
        """See `OuterRound.remember`."""
        super().remember(number)
        self._residual_before = self._residual.clone()

    def restored(self, number: int) -> dict[str, Named] | None:
        """See `OuterRound.restored`."""
        found = super().restored(number)
        if found is not None and self._residual_before is not None:
            self._residual.copy_(self._residual_before)
        return found

    def take_difference(self) -> None:
        """See `OuterRound.take_difference`."""
        if self._meets:
            flat, residual, sparse = self.bucket.flat, self._residual, self._sparse
            if sparse.nodes is not None:
                flat = flat.clone()
                # waits: for ranks of this node, which make one payload.
                sparse.nodes.all_reduce_inside(flat).wait()
            sparse.sparse_codec.encode_outer(self.start, flat, residual, self._beta, out=sparse.payload)
        else:
            super().take_difference()

    def residual_norm(self) -> float:
        """See `Round.residual_norm`."""
        return float(self._residual.norm())

    def forget(self) -> None:
        """See `OuterRound.forget`."""
        super().forget()
        self._residual.zero_()

    @property
    def _residual(self) -> torch.Tensor:
        return self.kept("residual")


def _dense_codec(given: Codec | str | None) -> Codec | None:
    """The codec of dense parameters, of what a user has written."""
    expected = 'expected dense to be a codec, the spec of one such as "absmax_int8", or None for float32'
    found: object = given
    if isinstance(given, str):
        try:
            found = from_spec(given)
        except ValueError as error:
            raise ValueError(f"{expected}, got {given!r}: {error}") from None
    if isinstance(found, ChunkedTopK):
        raise TypeError(f"{expected}, got {given!r}: a ChunkedTopK is for sparse parameters, so pass it as codec")
    if found is not None and not isinstance(found, Codec):
        raise TypeError(f"{expected}, got {given!r}")
    return found
