"""Error feedback: what a payload lacks is added to the next vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bagua_kernels.compression.block import BlockCodec
from bagua_kernels.compression.codec import Codec, FusedFeedback, Unbiased
from bagua_kernels.compression.terngrad import TernGrad


@dataclass(frozen=True)
class Piece:
    """Where one tensor lies in a flat vector.

    Attributes:
        name: the tensor's name, unique over all vectors; residuals are stored under it.
        start: its first element.
        numel: its number of elements.
    """

    name: str
    start: int
    numel: int


class ErrorFeedback:
    """Keeps the residuals of vectors that are encoded step after step (Karimireddy et al., ICML 2019, algorithm 2).

    For each vector v, with its residual e, which starts at zero:

    1. a = v + e.
    2. The payload is that of C(a), for an unbiased codec that of C(a) / (1 + omega).
    3. e = a - what the payload decodes to; where that is not finite, e stays as it was (a sparsifier sets it to zero).

    So all that was sent and the residual add up to all vectors. That converges if what is sent is a contraction of a. Error
    feedback around an unbiased codec of large variance diverges. The factor makes it a contraction with
    delta = 1 / (1 + omega).

    Block quantizers and sparsifiers do all of this in one pass over v and e; other codecs, and float64 residuals, in several.
    """

    def __init__(self, codec: Codec, *, scale_unbiased: bool = True, dtype: torch.dtype = torch.float32) -> None:
        """Wraps a codec.

        Args:
            codec: the codec that encodes.
            scale_unbiased: True if an unbiased codec is scaled as above instead of refused.
            dtype: of residuals: float32, or float64 to study rounding.

        Raises:
            ValueError: the codec is unbiased and not to be scaled, its scales come from outside, or the dtype is another.
        """
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"residuals must be float32 or float64, got {dtype}")
        bias = codec.bias
        if isinstance(codec, TernGrad) and codec.shared:
            raise ValueError(
                "error feedback needs scales that follow from the vector and its residual, and TernGrad(shared=True) takes them "
                "from outside; use TernGrad()"
            )
        if isinstance(bias, Unbiased) and not scale_unbiased:
            raise ValueError(
                f"error feedback needs a contraction, and {codec!r} is unbiased with omega={bias.omega:g}; take a codec that "
                "rounds to nearest, or scale_unbiased=True, or no error feedback"
            )
        self.codec = codec
        self.factor = 1.0 / (1.0 + bias.omega) if isinstance(bias, Unbiased) else 1.0
        self.dtype = dtype
        self._residuals: dict[str, torch.Tensor] = {}
        self._pieces: dict[str, tuple[Piece, ...]] = {}
        # Residuals of tensors that no vector holds now, until one does.
        self._loose: dict[str, torch.Tensor] = {}

    def lay_out(self, vectors: Mapping[str, Sequence[Piece]]) -> None:
        """Sets the positions of tensors in vectors. A later call moves residuals to their tensors' new positions.

        Elements between pieces are padding: their residuals are dropped, and should be zero.

        Args:
            vectors: for each vector's key its pieces. Vectors that are encoded without being named here are one piece of
                the same name.

        Raises:
            ValueError: a name occurs twice, or pieces overlap.
        """
        seen: set[str] = set()
        for key, pieces in vectors.items():
            end = 0
            for piece in sorted(pieces, key=lambda p: p.start):
                if piece.start < end or piece.numel < 0:
                    raise ValueError(f"piece {piece} of vector {key!r} overlaps another, which ends at {end}")
                if piece.name in seen:
                    raise ValueError(f"the name {piece.name!r} occurs twice; a residual belongs to one place")
                seen.add(piece.name)
                end = piece.start + piece.numel
        self._loose = self._by_name()
        self._residuals = {}
        self._pieces = {key: tuple(pieces) for key, pieces in vectors.items()}

    def residual(self, key: str, like: torch.Tensor) -> torch.Tensor:
        """The residual of a vector of the shape (n,) and on the device of `like`; zeros, or what was stored, at first.

        Raises:
            ValueError: the vector, or a stored residual, has another size than before.
        """
        found = self._residuals.get(key)
        if found is None:
            pieces = self._pieces.get(key)
            if pieces is None:
                named = next((k for k, ps in self._pieces.items() if any(p.name == key for p in ps)), None)
                if named is not None:
                    raise ValueError(f"vector {key!r} has the name of a piece of vector {named!r}; choose another")
                pieces = (Piece(key, 0, like.numel()),)
            found = torch.zeros(like.numel(), dtype=self.dtype, device=like.device)
            for piece in pieces:
                stored = self._loose.get(piece.name)
                if piece.start + piece.numel > like.numel() or (stored is not None and stored.numel() != piece.numel):
                    kept = "nothing" if stored is None else f"{stored.numel()} elements"
                    raise ValueError(
                        f"{piece} does not fit in a vector of {like.numel()} elements, with {kept} stored for it; lay_out must "
                        "describe the vectors that are encoded"
                    )
                if stored is not None:
                    found[piece.start : piece.start + piece.numel] = stored.view(-1).to(found)
            # Only now, so that an error leaves everything as it was.
            for piece in pieces:
                self._loose.pop(piece.name, None)
            self._pieces[key] = pieces
            self._residuals[key] = found
        if found.shape != like.shape or found.device != like.device:
            raise ValueError(
                f"vector {key!r} has shape {tuple(like.shape)} on {like.device}, its residual {tuple(found.shape)} on "
                f"{found.device}; call lay_out when vectors change"
            )
        return found

    @torch.no_grad()
    def encode(
        self,
        key: str,
        x: torch.Tensor,
        *,
        seed: int = 0,
        out: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Encodes a vector and the residual of the same key, and updates that residual.

        Args:
            key: identifies the vector.
            x: shape (n,), as for the codec.
            seed: of stochastic rounding.
            out: the payload; made if None.
            counts: as for `BlockCodec.encode`, and of no use to other codecs; what only fills blocks up has no residual.

        Returns:
            The payload. Errors as in `Codec.encode`, and ValueError as in `residual`.
        """
        residual = self.residual(key, x)
        if self.dtype == torch.float32:
            if isinstance(self.codec, BlockCodec):
                return self.codec.encode_feedback(x, residual, factor=self.factor, seed=seed, out=out, counts=counts)
            if isinstance(self.codec, FusedFeedback) and self.factor == 1.0:
                return self.codec.encode_feedback(x, residual, seed=seed, out=out)
        total = residual + x
        scaled = (total * self.factor).float()
        if isinstance(self.codec, BlockCodec):
            payload = self.codec.encode(scaled, seed=seed, out=out, counts=counts)
        else:
            payload = self.codec.encode(scaled, seed=seed, out=out)
        sent = self.codec.decode(payload, torch.empty_like(x, dtype=torch.float32))
        lacking = total - sent
        if counts is not None and isinstance(self.codec, BlockCodec):
            places = torch.arange(x.numel(), device=x.device)
            lacking = lacking.where(places % self.codec.block < counts[places // self.codec.block], residual)
        torch.where(lacking.isfinite(), lacking, residual.nan_to_num(0.0, 0.0, 0.0), out=residual)
        return payload

    def norm(self) -> torch.Tensor:
        """The Euclidean norm of all residuals, a scalar tensor."""
        norms = [r.norm() for r in self._residuals.values()]
        return torch.stack(norms).norm() if norms else torch.zeros((), dtype=self.dtype)

    def state_dict(self) -> dict[str, Any]:
        """The residuals by the names of tensors, which outlive any layout: a dict of copies."""
        return {"residuals": {name: tensor.clone() for name, tensor in self._by_name().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the residuals of `state_dict`; those of tensors that it lacks start at zero again."""
        self._residuals = {}
        self._loose = {name: tensor.detach().clone() for name, tensor in state["residuals"].items()}

    def _by_name(self) -> dict[str, torch.Tensor]:
        named = dict(self._loose)
        for key, residual in self._residuals.items():
            named |= {p.name: residual[p.start : p.start + p.numel] for p in self._pieces[key]}
        return named
