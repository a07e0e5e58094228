"""The trainable parameters of a module as views of a few flat buckets."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import pairwise

import torch

from bagua_kernels.algorithms.exchanges.vectors import Named, gather, scatter
from bagua_kernels.bucket import Bucket, is_exclusive, partition
from bagua_kernels.own_storage import with_own_storage


class FlatParameters:
    """Parameters that lie in buckets, in the order in which the module names them, and float32 vectors beside each bucket.

    The parameters stay the same objects; their `data` becomes parts of the buckets' memory, with storages of their own. Autograd
    does not notice a write to a bucket. So nothing may write between a forward pass and the end of its backward pass.

    Attributes:
        parameters: by name.
        buckets: each holds parameters of one dtype.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        bucket_bytes: int = 10 << 20,
        align: int | Callable[[Hashable], int] = 1,
        kinds: Mapping[str, Hashable] | None = None,
    ) -> None:
        """Moves parameters into buckets.

        Args:
            parameters: dense, by name, on one device.
            bucket_bytes: size from which a bucket takes no more parameters.
            align: the alignment of parameters in a bucket, in elements, or a function that returns it for a kind.
            kinds: of parameters, by name: a bucket has those of one kind. All are the same if None.

        Raises:
            ValueError: two parameters share memory, which a bucket would separate.
        """
        self.parameters = dict(parameters)
        _check_apart(self.parameters)
        names = list(parameters)
        # The parameters themselves: a reference to memory that they leave would keep it.
        tensors = list(parameters.values())
        self.buckets: list[Bucket] = []
        self._slots: list[tuple[str, torch.nn.Parameter, torch.Tensor]] = []
        self._vectors: dict[tuple[int, str], torch.Tensor] = {}
        self._matrices: dict[tuple[int, str], torch.Tensor] = {}
        self._saved: dict[str, None] = {}
        self._places: list[tuple[torch.nn.Parameter, int]] = []  # their addresses
        self._outside: dict[str, torch.Tensor] = {}  # memory to which `move_out` moved parameters
        of = [None if kinds is None else kinds[name] for name in names]
        for index, positions in enumerate(partition(tensors, bucket_bytes, of) if tensors else []):
            bucket = Bucket(
                [tensors[position] for position in positions],
                align=align if isinstance(align, int) else align(of[positions[0]]),
                index=index,
                kind=of[positions[0]],
                names=[names[position] for position in positions],
            )
            self.buckets.append(bucket)
            for slot, name in enumerate(bucket.names):
                bucket.fill(slot, self.parameters[name])
                self.parameters[name].data = with_own_storage(bucket.views[slot])
                self._slots.append((name, self.parameters[name], bucket.views[slot]))
                self._places.append((self.parameters[name], bucket.views[slot].data_ptr()))

    @property
    def is_moved(self) -> bool:
        """True if a parameter lies elsewhere now."""
        return any(parameter.data_ptr() != place for parameter, place in self._places)

    @torch.no_grad()
    def check(self, *, quickly: bool = False) -> None:
        """Takes back parameters that were moved to memory of their own, with the values that they have there.

        `move_out` does that. `module.to("cpu:0")` copies parameters of the CPU, as Accelerate has it done before evaluation.
        A module that is sent to another process is moved to shared memory; that process keeps the values of then.

        Args:
            quickly: True to look at nothing but the addresses of parameters where none has changed.

        Raises:
            RuntimeError: a parameter has another dtype, shape or device now, or its memory belongs to another owner as well, such
                as that of `fuse_optimizer`.
        """
        if quickly and not self.is_moved:
            return
        for name, parameter, view in self._slots:
            alike = parameter.dtype == view.dtype and parameter.shape == view.shape
            if alike and parameter.data_ptr() == view.data_ptr() and parameter.stride() == view.stride():
                continue
            outside = self._outside.pop(name, None)
            returns = outside is not None and parameter.is_set_to(outside)
            if not (alike and parameter.device == view.device and (returns or self._may_leave(name, parameter))):
                raise RuntimeError(
                    f"parameter {name!r} was moved out of the memory from which it is exchanged, such as by fuse_optimizer, "
                    ".to(), .half() or an assignment to .data: do that before the module is wrapped"
                )
            view.copy_(parameter)
            parameter.data = with_own_storage(view)

    def _may_leave(self, name: str, parameter: torch.nn.Parameter) -> bool:
        if parameter.device.type != "cpu" or not parameter.is_shared():
            return is_exclusive(parameter)
        warnings.warn(
            f"parameter {name!r} was moved to shared memory, and is exchanged from this process's own again: other processes "
            "keep the values of now; send them a copy each time that they need new ones",
            RuntimeWarning,
            stacklevel=2,
        )
        return True

    @torch.no_grad()
    def move_out(self, *, for_ever: bool = False) -> None:
        """Moves parameters to memory of their own.

        Args:
            for_ever: False if `check` is to take them back.
        """
        for name, parameter, view in self._slots:
            if parameter.data_ptr() == view.data_ptr():
                parameter.data = view.clone()
                # Then it may return, even where others have a reference to this memory.
                self._outside |= {} if for_ever else {name: parameter.detach()}
        if for_ever:
            self._outside.clear()

    def copies(self) -> list[torch.Tensor]:
        """Returns a copy of each bucket's vector."""
        return [bucket.flat.clone() for bucket in self.buckets]

    @torch.no_grad()
    def take_back(self) -> None:
        """Takes back parameters from buckets of another owner, which does not use them any more."""
        for _, parameter, view in self._slots:
            view.copy_(parameter)
            parameter.data = with_own_storage(view)

    def kept(self, bucket: Bucket, key: str, *, saved: bool = True) -> torch.Tensor:
        """Returns a float32 vector like `bucket.flat`, float64 for parameters of that dtype; zeros at first.

        Args:
            bucket: beside which it is kept.
            key: its name.
            saved: True if checkpoints contain it.
        """
        found = self._vectors.get((bucket.index, key))
        if found is None:
            dtype = torch.promote_types(bucket.flat.dtype, torch.float32)
            found = self._vectors[bucket.index, key] = torch.zeros_like(bucket.flat, dtype=dtype)
            if saved:
                self._saved[key] = None
        return found

    def keeps(self, bucket: Bucket, key: str) -> bool:
        """Returns True if a vector of this name is kept beside a bucket."""
        return (bucket.index, key) in self._vectors

    def forget(self) -> None:
        """Frees all vectors that are kept: what is kept next begins with zeros."""
        self._vectors.clear()
        self._matrices.clear()
        self._saved.clear()

    def rows(self, bucket: Bucket, key: str, numbers: Sequence[int]) -> torch.Tensor:
        """Returns several saved vectors as the rows of a matrix of shape (len(numbers), n), float32; zeros at first.

        Args:
            bucket: beside which they are kept.
            key: their name, to which the number of each is added.
            numbers: of the rows, such as ranks.
        """
        if (bucket.index, key) not in self._matrices:
            matrix = torch.zeros(len(numbers), bucket.flat.numel(), dtype=torch.float32, device=bucket.flat.device)
            self._matrices[bucket.index, key] = matrix
            for number, row in zip(numbers, matrix, strict=True):
                self._vectors[bucket.index, f"{key} {number}"] = row
                self._saved[f"{key} {number}"] = None
        return self._matrices[bucket.index, key]

    def state(self, *, copies: bool = True) -> dict[str, dict[str, torch.Tensor]]:
        """Returns the vectors that checkpoints contain: by key, one flat tensor per parameter's name.

        Args:
            copies: False for views, which change in the next round.
        """
        state: dict[str, dict[str, torch.Tensor]] = {}
        for key in self._saved:
            state[key] = {}
            for bucket in self.buckets:
                state[key].update(scatter(bucket, self.kept(bucket, key), copies=copies))
        return state

    def load(self, state: Mapping[str, Named]) -> None:
        """Restores what `state` returned; saved vectors that it lacks are zero again."""
        for key in {**self._saved, **state}:
            for bucket in self.buckets:
                self.kept(bucket, key).copy_(gather(bucket, state.get(key, {})))


def _check_apart(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    ends: list[tuple[int, int, str]] = []
    for name, parameter in parameters.items():
        if parameter.numel():
            extent = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
            ends.append((parameter.data_ptr(), parameter.data_ptr() + (extent + 1) * parameter.element_size(), name))
    ends.sort()
    for (_, end, name), (begin, _, other) in pairwise(ends):
        if begin < end:
            raise ValueError(
                f"parameters {name!r} and {other!r} share memory, which flat parameters would separate: make them one "
                "parameter, or clone one"
            )
