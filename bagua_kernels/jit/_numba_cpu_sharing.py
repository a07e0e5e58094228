"""Kernels that run themselves on several threads, each time with a part of their work.

Numba's own loops over several threads (`prange`) are compiled around a kernel, and that takes longer than the kernel itself.
Here it is compiled once, with a short function that calls it again from Numba's threads.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

_BYTE, _STATUS, _WORD = ir.IntType(8), ir.IntType(32), ir.IntType(64)
# What Numba's launcher calls on its threads: (first of each argument, lengths, steps, data). And the launcher: that function's
# address, the same four, the number of inner dimensions and of arguments, and the number of threads.
_TASK = ir.FunctionType(
    ir.VoidType(), [_BYTE.as_pointer().as_pointer(), _WORD.as_pointer(), _WORD.as_pointer(), _BYTE.as_pointer()]
)
_LAUNCHER = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), *_TASK.args, _WORD, _WORD, _STATUS])


def _task_of(context: Any, function: Any, frame: Any) -> Any:
    """Generates the function that calls a kernel over some of the parts of the work that a frame describes.

    Args:
        context: of the compilation.
        function: the kernel.
        frame: the type of a structure: the kernel's arguments but the last one, and a status.
    """
    task = ir.Function(function.module, _TASK, f"{function.name}.part")
    task.linkage = "internal"
    builder = ir.IRBuilder(task.append_basic_block())
    memory = builder.bitcast(task.args[3], frame.as_pointer())
    fields = [builder.gep(memory, [_STATUS(0), _STATUS(i)]) for i in range(len(frame.elements))]
    *values, begin, end, threads = (builder.load(field) for field in fields[:-1])
    # The only argument is an address that grows by one byte for each part from 0 on: the number of a part.
    first = builder.ptrtoint(builder.load(task.args[0]), _WORD)
    unused = [builder.alloca(argument.type.pointee) for argument in function.args[:2]]

    def place(part: Any) -> Any:
        return builder.add(begin, builder.sdiv(builder.mul(builder.sub(end, begin), part), threads))

    with cgutils.for_range(builder, builder.load(task.args[1])) as loop:
        part = builder.add(first, loop.index)
        bounds = place(part), place(builder.add(part, _WORD(1)))
        status = builder.call(function, [*unused, *values, *bounds, _WORD(1), _WORD(0)])
        with builder.if_then(builder.icmp_unsigned("!=", status, _STATUS(0))):
            builder.store(status, fields[-1])
    builder.ret_void()
    return task


@extending.intrinsic
def shared(context, begin, end, threads, launcher):
    """True if the kernel that calls this has just been run by several threads, and has nothing left to do.

    A kernel's last four parameters must be these, and this its first call. One thread runs what is in the kernel.

    Args:
        context: of the compilation.
        begin: where the work begins.
        end: where it ends.
        threads: among how many it is divided.
        launcher: the address of Numba's function that starts them, which is of no use if there is one.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = builder.function
        if [argument.type for argument in function.args[-4:]] != [_WORD] * 4:
            raise TypeError(f"the last four parameters of a kernel must be int64, got {function.args[-4:]}")
        threads, launcher = arguments[2:]
        several = builder.icmp_signed(">", threads, _WORD(1))
        values = [*function.args[2:-1], _STATUS(0)]
        frame = ir.LiteralStructType([value.type for value in values])
        task = _task_of(context, function, frame)
        memory = cgutils.alloca_once(builder, frame)
        number, step = (cgutils.alloca_once(builder, _WORD) for _ in range(2))
        address = cgutils.alloca_once(builder, _BYTE.as_pointer())
        with builder.if_then(several):
            fields = [builder.gep(memory, [_STATUS(0), _STATUS(i)]) for i in range(len(values))]
            for field, value in zip(fields, values, strict=True):
                builder.store(value, field)
            builder.store(threads, number)
            builder.store(_WORD(1), step)
            builder.store(cgutils.get_null_value(_BYTE.as_pointer()), address)
            called = builder.inttoptr(launcher, _LAUNCHER.as_pointer())
            bytes_of = [builder.bitcast(each, _BYTE.as_pointer()) for each in (task, memory)]
            count = builder.trunc(threads, _STATUS)
            builder.call(called, [bytes_of[0], address, number, step, bytes_of[1], _WORD(0), _WORD(1), count])
            failed = builder.icmp_unsigned("!=", builder.load(fields[-1]), _STATUS(0))
            with builder.if_then(failed, likely=False):
                context.call_conv.return_user_exc(builder, RuntimeError, ("a kernel failed on one of several threads",))
        return several

    return types.boolean(types.int64, types.int64, types.int64, types.int64), generate
