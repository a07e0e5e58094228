"""Compiles rules and launcher templates with Numba-CUDA, or runs them in its simulator."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numba
import numpy as np
import torch

from bagua_kernels.jit import scalar
from bagua_kernels.jit._numba_cuda_package import SIMULATED, cuda
from bagua_kernels.jit.rule import rebuilt, with_literals
from bagua_kernels.rules import rounding
from bagua_kernels.rules import vocabulary as tl
from bagua_kernels.rules.calls import Rule, called_rules, code_of

if not SIMULATED:
    from numba.cuda import extending, libdevice, types

    # A short vector is no mistake of the caller, and would be reported to him as one at each launch.
    numba.config.CUDA_LOW_OCCUPANCY_WARNINGS = 0

    scalar.install(
        extending,
        types,
        single=scalar.Exact(
            divide=cuda.jit(lambda x, y: libdevice.fdiv_rn(x, y), device=True),
            root=cuda.jit(lambda x: libdevice.fsqrt_rn(x), device=True),
            multiply=cuda.jit(lambda x, y: libdevice.fmul_rn(x, y), device=True),
            fma=cuda.jit(lambda x, y, z: libdevice.fmaf_rn(x, y, z), device=True),
        ),
        double=scalar.Exact(
            divide=cuda.jit(lambda x, y: libdevice.ddiv_rn(x, y), device=True),
            root=cuda.jit(lambda x: libdevice.dsqrt_rn(x), device=True),
            multiply=cuda.jit(lambda x, y: libdevice.dmul_rn(x, y), device=True),
            fma=cuda.jit(lambda x, y, z: libdevice.fma_rn(x, y, z), device=True),
        ),
    )


class _ExplicitProducts(ast.NodeTransformer):
    """Turns `a * b` into `tl.multiply(a, b)`.

    Numba-CUDA contracts a product and a sum into one operation with one rounding, and has no switch against it. A product
    from libdevice's `fmul_rn` is never contracted.
    """

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Mult):
            return node
        word = ast.Attribute(ast.Name("tl", ast.Load()), "multiply", ast.Load())
        return ast.copy_location(ast.Call(word, [node.left, node.right], []), node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        assert isinstance(node.target, ast.Name), "rules assign to names only"
        value = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
        assignment = ast.Assign([node.target], ast.copy_location(value, node))
        return self.visit(ast.copy_location(assignment, node))


def exact_code(rule: Rule, literal: type) -> CodeType:
    """The rule's code with explicit products, and its float literals of one type."""
    original = code_of(rule)
    lines, first = inspect.getsourcelines(rule)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    tree = ast.fix_missing_locations(ast.increment_lineno(_ExplicitProducts().visit(tree), first - 1))
    module = compile(tree, original.co_filename, "exec")
    code = next(c for c in module.co_consts if isinstance(c, CodeType))
    return with_literals(code, literal)


def vocabulary_module() -> ModuleType:
    """What `tl` stands for: compiled words, or NumPy's in the simulator."""
    return tl if SIMULATED else scalar


@functools.cache
def compile_rule(rule: Rule, literal: type = np.float32) -> Any:
    """The rule as a device function of scalars, with every rule that it calls and its float literals of one type."""
    names: dict[str, Any] = {name: compile_rule(callee, literal) for name, callee in called_rules(rule).items()}
    # NumPy does not contract, and its scalars keep float32 beside Python's literals.
    code = None if SIMULATED else exact_code(rule, literal)
    return cuda.jit(rebuilt(rule, {**names, "tl": vocabulary_module()}, code=code), device=True)


def compile_template(
    template: Rule, bindings: Mapping[str, Any], *, device: bool = False, literal: type = np.float32
) -> Any:
    """A launcher's template as a kernel, or as a device function for another template."""
    names = {
        name: compile_rule(value, literal) if isinstance(value, FunctionType) else value
        for name, value in bindings.items()
    }
    return cuda.jit(rebuilt(template, {**names, "tl": vocabulary_module()}), device=device)


def array(tensor: torch.Tensor) -> Any:
    """The device array over a tensor's memory; bfloat16 as uint16 bits, which the rules convert."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return tensor.numpy() if SIMULATED else cuda.as_cuda_array(tensor)


@contextlib.contextmanager
def launching(tensor: torch.Tensor) -> Iterator[Any]:
    """Gives the stream to launch on: torch's current one, on the tensor's device, so that no synchronisation is needed."""
    if SIMULATED:
        with warnings.catch_warnings():
            # NumPy scalars warn where the hardware wraps around; the simulator's threads start with default settings.
            warnings.simplefilter("ignore", RuntimeWarning)
            yield 0
    else:
        with torch.cuda.device(tensor.device), cuda.gpus[tensor.device.index]:
            yield cuda.external_stream(torch.cuda.current_stream(tensor.device).cuda_stream)


def half_float(x):
    """float16 to float32, exact."""
    return tl.cast(x, tl.float32)


def float_half(x):
    """float32 to the nearest float16, ties to even."""
    return tl.cast(x, tl.float16)


# How a kernel reads an element as float32 (float64 stays what it is) and writes it back.
LOAD = {
    torch.float64: rounding.identity,
    torch.float32: rounding.identity,
    torch.float16: half_float,
    torch.bfloat16: rounding.bfloat16_float,
}
STORE = {
    torch.float64: rounding.identity,
    torch.float32: rounding.identity,
    torch.float16: float_half,
    torch.bfloat16: rounding.float_bfloat16,
}
