"""The mean of payloads that every rank receives from every other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from bagua_kernels.algorithms.exchanges.compressed import Feedback
from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.algorithms.exchanges.vectors import Named, gather, scatter
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, Work
from bagua_kernels.comm.compressed.layout import first_seed
from bagua_kernels.comm.compressed.residuals import Residuals
from bagua_kernels.comm.hierarchical import TieredCommunicator
from bagua_kernels.comm.topology import weighted_sum
from bagua_kernels.compression import ChunkedTopK, Codec


class GatheredMean(Exchange):
    """All ranks decode the payloads of all, in the order of the ranks: the same bits everywhere.

    Attributes:
        codec: of the payloads; None for float32.
    """

    one_collective = True

    def __init__(self, bucket: Bucket, communicator: Communicator, codec: Codec | None, feedback: Feedback) -> None:
        """Begins without residuals.

        Args:
            bucket: as for `Exchange`.
            communicator: as for `Exchange`.
            codec: of the payloads.
            feedback: of this rank, with the seed of random numbers.

        Raises:
            ValueError: the codec allows no error feedback.
        """
        super().__init__(bucket, communicator)
        self.codec, self._seed = codec, feedback.seed
        self._residual: Residuals | None = None
        if codec is not None and feedback.of_workers(codec):
            self._residual = Residuals(codec, [(0, bucket.flat.numel())], bucket.flat.device)

    def empty(self) -> torch.Tensor:
        """Returns memory for a payload."""
        flat, codec = self.bucket.flat, self.codec
        if codec is None:
            return torch.empty_like(flat)
        return flat.new_empty(codec.payload_size(flat.numel()), dtype=torch.uint8)

    def encode(self, step: int) -> torch.Tensor:
        """Returns the payload of what is in the bucket, in memory of its own.

        Args:
            step: number of this rank's payload, for seeds.
        """
        codec, payload = self.codec, self.empty()
        if codec is None:
            return payload.copy_(self.bucket.flat)
        seed = first_seed(codec, self._seed + step, self.communicator.rank, self.bucket.index)
        if self._residual is None:
            return codec.encode(self.bucket.flat, seed=seed, out=payload)
        self._residual.encode(0, self.bucket.flat, seed=seed, out=payload)
        return payload

    def compile(self, weights: Sequence[Sequence[float]] = ((1.0, 1.0), (1.0, 2.0))) -> None:
        """Compiles what `combine` calls: a courier that does it answers nobody meanwhile, and would be taken for lost.

        Args:
            weights: of payloads, for a call each.
        """
        if self.codec is not None:
            zeros = torch.zeros_like(self.bucket.flat)
            payload = self.codec.encode(zeros, seed=0)
            for each in weights:
                self.combine([payload] * len(each), each, zeros)

    def combine(self, payloads: Sequence[torch.Tensor], weights: Sequence[float], out: torch.Tensor) -> None:
        """Writes the weighted mean of payloads, in their order, to a vector like the bucket.

        Args:
            payloads: of any ranks.
            weights: of each; their sum may be any number.
            out: is overwritten.
        """
        codec, equal = self.codec, len({*weights}) == 1
        if codec is not None and equal:
            codec.decode_sum(torch.stack([*payloads]), out, 1.0 / len(payloads))
            return
        rows = payloads if codec is None else [codec.decode(payload, torch.empty_like(out)) for payload in payloads]
        shares = [1.0 / len(rows) if equal else weight / sum(weights) for weight in weights]
        weighted_sum(dict(enumerate(rows)), dict(enumerate(shares)), out)

    def run(self, step: int) -> Iterator[Work]:
        """See `Exchange.run`."""
        payload = self.encode(step)
        everyone = payload.new_empty((self.senders, payload.numel()))
        yield self.start(everyone, payload)
        self.combine(everyone.unbind(0), [1.0] * len(everyone), self.bucket.flat)

    @property
    def senders(self) -> int:
        """The number of payloads of which the mean is taken."""
        return self.communicator.size

    def start(self, everyone: torch.Tensor, payload: torch.Tensor) -> Work:
        """Starts gathering the payloads of all senders, one in each row of `everyone`."""
        return self.communicator.all_gather(everyone, payload)

    def state(self) -> dict[str, Named]:
        """The residual; see `Exchange.state`."""
        return {} if self._residual is None else {"worker": scatter(self.bucket, self._residual.state())}

    def load(self, state: Mapping[str, Named]) -> None:
        """See `Exchange.load`."""
        if self._residual is not None:
            self._residual.load(gather(self.bucket, state.get("worker", {})))

    def residual_norm(self) -> float:
        """See `Exchange.residual_norm`."""
        # waits: for statistics.
        return 0.0 if self._residual is None else float(self._residual.norm())


class SparseMean(GatheredMean):
    """The mean of sparse payloads, which are made together with their residuals elsewhere.

    Attributes:
        sparse_codec: of the payloads.
        contributors: True if each element is divided by the number of ranks that have sent it, False by that of all ranks.
        payload: of this rank, or of its node.
        nodes: the communicator whose nodes send a payload each, which all ranks of a node make alike; None where ranks do.
    """

    def __init__(self, bucket: Bucket, communicator: Communicator, codec: ChunkedTopK, contributors: bool) -> None:
        """Begins without a payload."""
        super().__init__(bucket, communicator, codec, Feedback(workers=False))
        self.sparse_codec, self.contributors = codec, contributors
        self.nodes = communicator if isinstance(communicator, TieredCommunicator) and communicator.nodes.even else None
        self.payload = self.empty()

    @property
    def senders(self) -> int:
        """See `GatheredMean.senders`."""
        return super().senders if self.nodes is None else len(self.nodes.nodes.members)

    def start(self, everyone: torch.Tensor, payload: torch.Tensor) -> Work:
        """See `GatheredMean.start`."""
        if self.nodes is None:
            return super().start(everyone, payload)
        return self.nodes.all_gather_of_nodes(everyone, payload)

    def encode(self, step: int) -> torch.Tensor:
        """See `GatheredMean.encode`: a copy of what is in `payload`."""
        return self.payload.clone()

    def compile(self, weights: Sequence[Sequence[float]] = ((1.0, 1.0),)) -> None:
        """See `GatheredMean.compile`."""
        super().compile(weights)

    def combine(self, payloads: Sequence[torch.Tensor], weights: Sequence[float], out: torch.Tensor) -> None:
        """See `GatheredMean.combine`; all payloads have the same weight."""
        self.sparse_codec.mean(torch.stack([*payloads]), out, contributors=self.contributors)
