"""A plugin of mypy: each place where the host may wait for a GPU has a reason.

A GPU runs behind the host. A place that reads an element of a tensor, or copies between host and device, lets the host wait
until the GPU has done everything before. Such a place needs a comment of its own, in the lines of the statement or in the
line above it:

    # waits: why the host must know, and how often it happens.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable

from mypy.nodes import Context, StrExpr
from mypy.plugin import FunctionContext, MethodContext, Plugin
from mypy.types import Instance, Type, get_proper_type

TENSORS = frozenset({"torch._tensor.Tensor", "torch._C.TensorBase", "torch.nn.parameter.Parameter"})
# Methods that read elements, or bring all of them to the host.
READS = frozenset({"item", "tolist", "cpu", "nonzero"})
SCALE = "torch.amp.grad_scaler.GradScaler.get_scale"
# Programs that measure wait on purpose; sockets and threads as ranks carry tensors of the CPU. Examples may print losses.
EXEMPT = (
    "examples/",
    "tests/algorithms/",
    "/comm/programs/",
    "/comm/tuning/",
    "/comm/backends/sockets/",
    "/comm/backends/local/",
)
NUMBERS = frozenset({"builtins.float", "builtins.int", "builtins.bool"})
REASON = re.compile(r"# waits: \S")
LONGEST_STATEMENT = 8


class Waits(Plugin):
    """Reports waits without a reason."""

    def get_function_hook(self, fullname: str) -> Callable[[FunctionContext], Type] | None:
        if fullname in NUMBERS:
            return self._number
        return self._made if fullname.startswith("torch._C") and fullname.endswith(".tensor") else None

    def get_method_hook(self, fullname: str) -> Callable[[MethodContext], Type] | None:
        if fullname == SCALE:
            return lambda context: self._report(context, ".get_scale()")
        owner, _, name = fullname.rpartition(".")
        if owner not in TENSORS:
            return None
        if name in READS:
            return lambda context: self._report(context, f".{name}()")
        return self._moved if name == "to" else None

    def _number(self, context: FunctionContext) -> Type:
        if any(_is(TENSORS, argument) for arguments in context.arg_types for argument in arguments):
            return self._report(context, "a number from a tensor")
        return context.default_return_type

    def _made(self, context: FunctionContext) -> Type:
        """`torch.tensor` with a device other than the CPU copies from ordinary memory."""
        given = [
            argument
            for names, arguments in zip(context.arg_names, context.args, strict=True)
            for name, argument in zip(names, arguments, strict=True)
            if name == "device"
        ]
        if any(not isinstance(argument, StrExpr) or argument.value != "cpu" for argument in given):
            return self._report(context, "torch.tensor(…, device=…)")
        return context.default_return_type

    def _moved(self, context: MethodContext) -> Type:
        """`Tensor.to` with a device, and without `non_blocking`."""
        names = [name for names in context.arg_names for name in names]
        if "non_blocking" not in names and any(_is(DEVICES, t) for types in context.arg_types for t in types):
            return self._report(context, ".to(device)")
        return context.default_return_type

    def _report(self, context: FunctionContext | MethodContext, what: str) -> Type:
        where, path = context.context, context.api.path  # type: ignore[attr-defined]
        if not reasoned(path, where) and not any(folder in path for folder in EXEMPT):
            context.api.fail(f"{what} may wait for a GPU: leave it on the device, or add '# waits: reason'", where)
        return context.default_return_type


DEVICES = frozenset({"torch._C.device", "torch.device", "builtins.str"})


def _is(names: frozenset[str], kind: Type) -> bool:
    proper = get_proper_type(kind)
    return isinstance(proper, Instance) and any(base.fullname in names for base in proper.type.mro)


def reasoned(path: str, where: Context) -> bool:
    """True if a comment with a reason is in the line, in the lines above it that belong to the statement, or before these."""
    line = where.line
    for above in range(LONGEST_STATEMENT):
        text = linecache.getline(path, line - above)
        if REASON.search(text):
            return True
        # Lines that go on with a comment, or with an expression that began further up.
        if above and not text.lstrip().startswith("#") and not text.rstrip().endswith(("(", "[", "{", ",", "=")):
            return False
    return False


def plugin(version: str) -> type[Plugin]:
    """What mypy calls."""
    return Waits
