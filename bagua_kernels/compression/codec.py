"""What every codec offers, and the registry that finds one by name."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from bagua_kernels.options import check_fields
from bagua_kernels.suggestions import did_you_mean

MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Unbiased:
    """E C(v) = v and E |C(v) - v|^2 <= omega |v|^2.

    Attributes:
        omega: bound of the relative variance.
    """

    omega: float


@dataclass(frozen=True)
class Contractive:
    """E |C(v) - v|^2 <= (1 - delta) |v|^2, the condition under which error feedback converges.

    Attributes:
        delta: from 0 (nothing is kept) to 1 (exact).
    """

    delta: float


@runtime_checkable
class Codec(Protocol):
    """Turns vectors into payloads of bytes and back; `docs/wire-format.md` fixes the bytes.

    A codec is a frozen value: equal codecs on two ranks understand each other, whatever their devices.

    Attributes:
        block: elements that share scales; a vector is best cut, and tensors in it best aligned, at multiples of it.
    """

    @property
    def block(self) -> int:
        """Elements that share scales."""
        ...

    @property
    def bias(self) -> Unbiased | Contractive:
        """What its error satisfies."""
        ...

    @property
    def linear(self) -> bool:
        """True if the network itself may add payloads; the codec is then a `Summable`."""
        ...

    @property
    def stochastic(self) -> bool:
        """True if `encode` and `reduce` need a seed that is different for each message."""
        ...

    def payload_size(self, n: int) -> int:
        """The exact number of bytes of `n` encoded elements, a multiple of 16."""
        ...

    def encode(self, x: torch.Tensor, *, seed: int = 0, out: torch.Tensor | None = None) -> torch.Tensor:
        """Encodes a vector of shape (n,), float32, float16 or bfloat16, into a payload of shape (size,), uint8."""
        ...

    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Decodes a payload of shape (size,) into `out`, of shape (n,); returns `out`."""
        ...

    def decode_sum(self, payloads: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Writes `scale` times the sum of the payloads, of shape (ranks, size), decoded, to `out`; returns `out`."""
        ...

    def reduce(
        self, payloads: torch.Tensor, n: int, *, scale: float = 1.0, seed: int = 0, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Encodes `scale` times the sum of the payloads, of shape (ranks, size), of `n` elements each, decoded."""
        ...


@runtime_checkable
class Summable(Protocol):
    """A linear codec: where the other parts of payloads are equal, these decode to the sum of the vectors once added."""

    def summable(self, payload: torch.Tensor) -> torch.Tensor:
        """The part of a payload that is to be added up, as a view of numbers."""
        ...


@runtime_checkable
class FusedFeedback(Protocol):
    """A codec that does error feedback in fewer passes over memory than one by one."""

    def encode_feedback(
        self, x: torch.Tensor, residual: torch.Tensor, *, seed: int = 0, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Encodes `x + residual` and leaves in `residual`, float32, what the payload lacks of it."""
        ...


_codecs: dict[str, Callable[..., Codec]] = {}


def register(name: str, make: Callable[..., Codec]) -> None:
    """Makes a codec known to `from_spec` under a name.

    Raises:
        ValueError: the name is taken by another codec.
    """
    if _codecs.setdefault(name, make) is not make:
        raise ValueError(f"the codec name {name!r} is taken by {_codecs[name]!r}; choose another")


def names() -> list[str]:
    """The names that `from_spec` knows, sorted."""
    return sorted(_codecs)


def from_spec(spec: str) -> Codec:
    """Makes a codec from text such as "minmax_uint8" or "minmax_uint8:block=128,stochastic=true".

    Raises:
        ValueError: the name or an option is unknown, or a value does not fit.
    """
    name, options = parse_spec(spec)
    if name not in _codecs:
        known = ", ".join(sorted(_codecs))
        raise ValueError(
            f"there is no codec {name!r} in {spec!r}{did_you_mean(name, _codecs) or ';'} known are {known}"
        )
    parameters = inspect.signature(_codecs[name]).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    for option in () if takes_any else options.keys() - parameters.keys():
        raise ValueError(
            f"the options of {spec!r} do not fit: the codec {name!r} got an unexpected keyword argument {option!r}"
            f"{did_you_mean(option, parameters) or ';'} its options are {', '.join(parameters) or 'none'}"
        )
    try:
        return _codecs[name](**options)
    except TypeError as error:
        raise ValueError(f"the options of {spec!r} do not fit: {error}") from None


def to_spec(codec: Codec) -> str:
    """Undoes `from_spec`, for a registered codec that is a dataclass of numbers, switches and text.

    Raises:
        ValueError: the codec is another, so that no text makes its equal.
    """
    name = next((name for name, make in _codecs.items() if make is type(codec)), None)
    described: Any = codec  # a dataclass is no protocol to type checkers
    if name is not None and is_dataclass(described):
        options = ",".join(f"{field.name}={getattr(codec, field.name)}" for field in fields(described) if field.init)
        spec = f"{name}:{options}" if options else name
        with contextlib.suppress(ValueError):
            if from_spec(spec) == codec:
                return spec
    raise ValueError(f"{codec!r} cannot be written as text that from_spec knows; register its class")


def parse_spec(spec: str) -> tuple[str, dict[str, bool | int | float | str]]:
    """Splits "name:key=value,key=value" into the name and its options, with numbers and truth values as such.

    Raises:
        TypeError: it is no text.
        ValueError: the text has another form.
    """
    if not isinstance(spec, str):
        raise TypeError(f"expected a text such as 'name:key=value,key=value', got {spec!r} of {type(spec).__name__}")
    name, _, rest = spec.partition(":")
    options: dict[str, bool | int | float | str] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not key or not equals:
            raise ValueError(f"expected key=value in {spec!r}, got {item!r}: write 'name:key=value,key=value'")
        if key.strip() in options:
            raise ValueError(f"{key.strip()} is given twice in {spec!r}")
        options[key.strip()] = _parse_value(value.strip())
    return name.strip(), options


def _parse_value(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        if math.isfinite(value):
            return value
    return text


def check_codec(codec: Any) -> None:
    """Raises unless each field of a codec that is a switch by its annotation is True or False, and each number is one.

    Raises:
        TypeError: something else was given for a number.
        ValueError: a field is something else, on which ranks could disagree.
    """
    check_fields(codec)
    for field in fields(codec):
        value = getattr(codec, field.name)
        if field.type in (bool, "bool") and not isinstance(value, bool):
            raise ValueError(f"{field.name} of {type(codec).__name__} must be true or false, got {value!r}")


def fold_seed(*numbers: int) -> int:
    """Makes one 64-bit seed from numbers that identify a message: a seed, the step, the bucket, the rank, the pass.

    `docs/wire-format.md` defines the function, so that any rank can compute the seeds of the others.
    """
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = ((state ^ (number & MASK)) + 0x9E3779B97F4A7C15) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return state
