"""Pays what one exchange has left behind with the first gradients of the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from bagua_kernels.algorithms.exchanges.exchange import Exchange, Updates
from bagua_kernels.algorithms.exchanges.vectors import Named
from bagua_kernels.comm import Work

# Of exchanges' states: what their payloads have lacked. The rest speeds up or steadies the same exchange only.
_OWED = ("worker", "owner", "residual")


def owed_by(state: Mapping[str, Named]) -> dict[str, torch.Tensor]:
    """Adds up what payloads have lacked so far, by parameter.

    What one key alone has is not copied. Owners' residuals are equal on all ranks here, so that the mean of all ranks' sums is
    the mean of what is owed.
    """
    found: dict[str, torch.Tensor] = {}
    for key in _OWED:
        for name, vector in state.get(key, {}).items():
            flat = vector.reshape(-1)
            found[name] = found[name] + flat if name in found else flat
    return found


class Repaying(Exchange):
    """Another exchange, whose first gradients are increased by what is owed."""

    def __init__(self, inner: Exchange, owed: Named) -> None:
        """Takes what is owed to the parameters of the exchange's bucket."""
        super().__init__(inner.bucket, inner.communicator)
        self.inner = inner
        self._owed = {name: owed[name] for name in inner.bucket.names if name in owed}
        self.one_collective, self.delivers = inner.one_collective, inner.delivers
        self._pays = bool(self._owed)

    @property
    def paid(self) -> bool:
        """True if nothing is owed any more."""
        return not self._owed

    @property
    def reads_in_place(self) -> bool:  # type: ignore[override]
        """True once everything is paid, if the exchange does."""
        return self.inner.reads_in_place and not self._owed

    @property
    def has_memory(self) -> bool:  # type: ignore[override]
        """True in a step that pays: what is owed to a parameter that no rank has used is its gradient."""
        return self.inner.has_memory or self._pays

    @property
    def updates(self) -> Updates | None:
        """The inner exchange's."""
        return self.inner.updates if hasattr(self, "inner") else None

    @updates.setter
    def updates(self, updates: Updates | None) -> None:
        if hasattr(self, "inner"):
            self.inner.updates = updates

    def run(self, step: int) -> Iterator[Work]:
        """See `Exchange.run`."""
        bucket, paid, self._pays = self.bucket, [], bool(self._owed)
        for slot, (name, view) in enumerate(zip(bucket.names, bucket.views, strict=True)):
            # A frozen parameter gets nothing, and what is remembered of it stays as it is.
            if name in self._owed and slot not in bucket.frozen:
                view.add_(self._owed[name].view(view.shape).to(view.dtype), alpha=self.inner.loss_scale)
                paid.append(name)
        yield from self.inner.run(step)
        if paid and not all(each.isfinite() for each in bucket.whole.aminmax()):
            # No optimizer takes such a step. The inner exchange forgets it, as if it had not been.
            self.inner.load({})
            return
        for name in paid:
            del self._owed[name]

    def state(self) -> dict[str, Named]:
        """See `Exchange.state`; what is still owed counts as a worker's residual."""
        return _with_owed(self.inner.state(), self._owed)

    def own_state(self) -> dict[str, Named]:
        """See `Exchange.own_state`."""
        return _with_owed(self.inner.own_state(), {name: each.clone() for name, each in self._owed.items()})

    def mark(self, spare: list[torch.Tensor]) -> Callable[[], dict[str, Named]]:
        """See `Exchange.mark`."""
        back, owed = self.inner.mark(spare), dict(self._owed)
        return lambda: _with_owed(back(), owed)

    def load(self, state: Mapping[str, Named]) -> None:
        """See `Exchange.load`."""
        self.inner.load(state)
        kept, names = self.inner.state(), set(self.bucket.names)
        # What the exchange has no place for is still owed: all of it by exact means, and before a payment was made.
        lacking = {
            key: {name: named[name] for name in named.keys() & names if name not in kept.get(key, {})}
            for key, named in state.items()
        }
        self._owed = owed_by(lacking)

    def scale_to(self, loss_scale: float) -> None:
        """See `Exchange.scale_to`."""
        self.inner.scale_to(loss_scale)

    def end_step(self, unused: Sequence[int]) -> None:
        """See `Exchange.end_step`."""
        self.inner.end_step(unused)

    def residual_norm(self) -> float:
        """See `Exchange.residual_norm`."""
        return self.inner.residual_norm()


def _with_owed(state: Mapping[str, Named], owed: Named) -> dict[str, Named]:
    found = {key: dict(named) for key, named in state.items()}
    if owed:
        found.setdefault("worker", {}).update(owed)
    return dict(found)
