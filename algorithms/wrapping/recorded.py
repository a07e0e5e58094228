"""The options of an algorithm, which have to be equal on all ranks."""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any, Unpack, get_args, get_origin

import torch

from bagua_kernels.algorithms.wrapping.ddp import ArgumentError, explain_arguments
from bagua_kernels.comm import Communicator
from bagua_kernels.options import check_options, hints_of
from bagua_kernels.suggestions import did_you_mean

# A description is made of what JSON has; this key holds the class of an object that was described by its fields.
_CLASS = ""
_DEEPEST = 8
_NO_MODULE = torch.nn.Module()  # where a class calls its first argument otherwise


class Recorded:
    """The arguments of all constructors of one algorithm, from the outermost class to the base.

    `recorded` fills it. The arguments of a subclass come first. So a difference is reported under the name that the user
    wrote, not under the argument of the base that a constructor made of it.
    """

    def __init__(self) -> None:
        """Begins with nothing."""
        self._given: list[tuple[str, str, Any]] = []  # class, name, value

    def add(self, owner: str, arguments: Mapping[str, Any]) -> None:
        """Stores the arguments of one constructor.

        Args:
            owner: the name of its class.
            arguments: by name.
        """
        self._given += [(owner, name, value) for name, value in arguments.items()]

    def described(self, excluded: frozenset[str]) -> list[list[Any]]:
        """Returns [class, name, description] of each argument, as JSON can hold it.

        Args:
            excluded: the names of arguments that may differ between ranks.
        """
        return [[owner, name, describe(value)] for owner, name, value in self._given if name not in excluded]


def recorded(init: Callable[..., None]) -> Callable[..., None]:
    """Makes a constructor store its arguments in the attribute `_options` before it runs.

    Raises:
        ArgumentError: by the constructor, if it has no such argument. The message has one that is spelled alike; of those of
            `DistributedDataParallel` it has the counterpart. Or as for `own_names`.
        TypeError: something else was given for a number.
        ValueError: by a constructor of this package, if a number is not what its annotation asks for.
    """
    signature = inspect.signature(init)
    owner = init.__qualname__.rpartition(".")[0]

    @functools.wraps(init)
    def record(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs = own_names(type(self), kwargs)
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError as error:
            unknown = kwargs.keys() - signature.parameters.keys()
            explain_arguments(type(self), unknown)
            raise ArgumentError(_misspelled(type(self), unknown) or f"{type(self).__name__}: {error}") from None
        bound.apply_defaults()
        options = self.__dict__.get("_options")
        if options is None:
            options = self.__dict__["_options"] = Recorded()
            # At first, for constructors compute with options that they pass on to their bases.
            kind: Any = type(self)
            _check_kinds(kind.__name__, bound.arguments)
            check_options(annotations_of(kind), kind.__name__, dict(_flattened(bound)))
        options.add(owner, dict(_flattened(bound)))
        init(self, *args, **kwargs)

    return record


def own_names(kind: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns keyword arguments of a class by its own names, in place of the names that its `synonyms` has.

    Raises:
        ArgumentError: an argument is given by two names.
    """
    synonyms = synonyms_of(kind)
    found: dict[str, Any] = {}
    used: dict[str, str] = {}
    for name, value in given.items():
        own = synonyms.get(name, name)
        if own in used:
            raise ArgumentError(
                f"{kind.__name__} got both {used[own]} and {name}, two names of one argument: leave out one of them"
            )
        found[own], used[own] = value, name
    return found


def synonyms_of(kind: type[Any]) -> dict[str, str]:
    """Returns the names that a class accepts for arguments of its constructors, with its own names of these.

    What a constructor declares is an argument of its own, whatever the bases of its class accept under that name.
    """
    found: dict[str, str] = {}
    declared: set[str] = set()
    for each in kind.__mro__:
        if (init := vars(each).get("__init__")) is not None:
            declared |= inspect.signature(init).parameters.keys()
        others = vars(each).get("synonyms", {})
        found.update({other: own for other, own in others.items() if other not in declared | found.keys()})
    return found


def _check_kinds(owner: str, arguments: Mapping[str, Any]) -> None:
    """Raises if what is to be wrapped is no module, or what carries it no communicator."""
    module, others = arguments.get("module", _NO_MODULE), {**arguments, **arguments.get("options", {})}
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"{owner} wraps a torch.nn.Module, got {module!r} of {type(module).__name__}: pass the module first"
        )
    communicator = others.get("communicator")
    if communicator is not None and not isinstance(communicator, Communicator):
        raise TypeError(
            f"communicator of {owner} must be a Communicator or None, got {communicator!r}: pass what comm.init() returns, or "
            "comm.TorchCommunicator(group)"
        )


def _misspelled(kind: type[Any], unknown: Iterable[str]) -> str:
    """Returns what is wrong with arguments that a class's constructors do not have; empty if there are none."""
    known = arguments_of(kind)
    found = [f"an unexpected keyword argument {name!r}{did_you_mean(name, known) or ';'}" for name in sorted(unknown)]
    return f"{kind.__name__} got {' '.join(found)} its arguments are {', '.join(known)}" if found else ""


def arguments_of(kind: type[Any]) -> list[str]:
    """Returns the names of the arguments of a class's constructor, and of its bases' where it passes others on."""
    found: dict[str, None] = {}
    for each in kind.__mro__:
        if (init := vars(each).get("__init__")) is None or each is torch.nn.Module:
            continue
        parameters = list(inspect.signature(init).parameters.values())[1:]
        others = [p for p in parameters if p.kind is p.VAR_KEYWORD]
        found.update(dict.fromkeys(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)))
        hint = hints_of(inspect.unwrap(init)).get(others[0].name) if others else None
        if get_origin(hint) is Unpack:
            found.update(dict.fromkeys(hints_of(get_args(hint)[0])))
            break
        if not others:
            break
    return list(found)


@functools.cache
def annotations_of(kind: type[Any]) -> dict[str, Any]:
    """Returns the annotations of the arguments of a class's constructors and of its bases'.

    Those of constructors outside of the package are their authors' business.
    """
    found: dict[str, Any] = {}
    for each in reversed(kind.__mro__):
        if (init := vars(each).get("__init__")) is not None:
            own = each.__module__.startswith(f"{__name__.partition('.')[0]}.")
            for name in inspect.signature(init).parameters:
                found.pop(name, None)
            found.update(hints_of(inspect.unwrap(init)) if own else {})
    return found


def _flattened(bound: inspect.BoundArguments) -> Iterator[tuple[str, Any]]:
    parameters = iter(bound.signature.parameters.values())
    next(parameters)  # self
    for parameter in parameters:
        value = bound.arguments[parameter.name]
        if parameter.kind is parameter.VAR_KEYWORD:
            yield from value.items()
        else:
            yield parameter.name, value


def describe(value: Any, depth: int = 0) -> Any:
    """Describes a value by what JSON can hold, so that equal values of two processes have equal descriptions.

    Numbers and texts stand for themselves, tensors for the digest of their bytes. Functions and classes stand for their
    qualified names, other objects for their class and public attributes. All modules, and all iterators, are alike.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value.name if isinstance(value, Enum) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_CLASS: str(value)}
    if isinstance(value, torch.Tensor):
        return _described_tensor(value)
    if isinstance(value, torch.device):
        return {_CLASS: f"a device of the type {value.type}"}  # ranks have GPUs of their own
    if isinstance(value, torch.nn.Module):
        return {_CLASS: "a module"}
    if isinstance(value, torch.optim.Optimizer):
        return {_CLASS: f"an optimizer of the class {_name(type(value))}"}
    if isinstance(value, (Communicator, torch.Generator)) or depth > _DEEPEST:
        return {_CLASS: type(value).__name__}
    return _described_object(value, depth + 1)


def _described_object(value: Any, depth: int) -> Any:
    if isinstance(value, torch.amp.GradScaler):
        return {_CLASS: "GradScaler", **{name: describe(each, depth) for name, each in value.state_dict().items()}}
    if isinstance(value, Mapping):
        # In their order: of patterns the first that matches counts.
        return {"entries": [[describe(key, depth), describe(each, depth)] for key, each in value.items()]}
    if isinstance(value, (list, tuple, range)):
        return [describe(each, depth) for each in value]
    if isinstance(value, (set, frozenset)):
        return {"members": sorted((describe(each, depth) for each in value), key=str)}
    if isinstance(value, functools.partial):
        parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
        return {_CLASS: "partial", **{name: describe(part, depth) for name, part in parts.items()}}
    if isinstance(value, (torch.dtype, PurePath)):
        return str(value)
    if isinstance(value, Enum):
        return f"{_name(type(value))}.{value.name}"
    if callable(value) and hasattr(value, "__qualname__"):
        return {_CLASS: _name(value)}
    if is_dataclass(value):
        return {
            _CLASS: type(value).__name__,
            **{f.name: describe(getattr(value, f.name), depth) for f in fields(value)},
        }
    if hasattr(value, "tolist"):
        return describe(value.tolist(), depth)  # of NumPy
    public = {name: each for name, each in getattr(value, "__dict__", {}).items() if not name.startswith("_")}
    # What these attributes lead to may be anything, so that only values are looked at.
    return {_CLASS: _name(type(value)), **{name: describe(each, _DEEPEST) for name, each in public.items()}}


def _described_tensor(value: torch.Tensor) -> dict[str, Any]:
    kind = f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    if isinstance(value, torch.nn.Parameter):
        return {_CLASS: kind}  # rank 0's are about to become everyone's
    # waits: options are compared at start.
    data = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return {_CLASS: kind, "sha256": hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]}


def _name(of: Any) -> str:
    return f"{of.__module__}.{of.__qualname__}"


def differences(everyone: list[list[list[Any]]]) -> list[str]:
    """Names the options that differ between ranks, with the values and the ranks that have them.

    Args:
        everyone: of each rank what `Recorded.described` gave.

    Returns:
        A text for each option of the outermost class in which any option differs; empty if all are equal.
    """
    tables = [{(owner, name): value for owner, name, value in options} for options in everyone]
    found: dict[str, list[str]] = {}
    for owner, name in dict.fromkeys(key for table in tables for key in table):
        values = [table.get((owner, name), {_CLASS: "not given"}) for table in tables]
        if any(value != values[0] for value in values):
            found.setdefault(owner, []).append(f"{name} differs between ranks: {grouped(values)}")
    return next(iter(found.values()), [])


def grouped(values: list[Any]) -> str:
    """Returns which ranks have which value, such as "1 on ranks 0 and 2, 5 on rank 1"."""
    ranks: list[tuple[Any, list[str]]] = []
    for rank, value in enumerate(values):
        same = next((holders for other, holders in ranks if other == value), None)
        if same is None:
            ranks.append((value, [str(rank)]))
        else:
            same.append(str(rank))
    return ", ".join(f"{shown(value)} on {_counted(holders)}" for value, holders in ranks)


def _counted(ranks: list[str]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks[:-1])} and {ranks[-1]}"


def shown(description: Any) -> str:
    """A description as a user would write the value."""
    if isinstance(description, list):
        return f"({', '.join(map(shown, description))})"
    if not isinstance(description, dict):
        return repr(description)
    if "entries" in description:
        return "{" + ", ".join(f"{shown(key)}: {shown(value)}" for key, value in description["entries"]) + "}"
    if "members" in description:
        return "{" + ", ".join(map(shown, description["members"])) + "}"
    rest = ", ".join(f"{name}={shown(value)}" for name, value in description.items() if name != _CLASS)
    return f"{description[_CLASS]}({rest})" if rest else str(description[_CLASS])
