"""What users read who misspell a name or pass something of the wrong type, on one rank as on several."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels import comm, compression
from bagua_kernels.algorithms import (
    Algorithm,
    ByteGrad,
    CompressedAllReduce,
    Decentralized,
    Guard,
    ModelAlgorithm,
    ddp,
    from_spec,
    names,
)
from bagua_kernels.compression import FP8, MinMaxUInt8
from bagua_kernels.compression.codec import names as codec_names
from bagua_kernels.warmup import warm_up
from tests.grids import folded


@pytest.fixture(autouse=True, scope="module")
def leaves_no_communicator() -> Iterator[None]:
    """One rank alone joins a job of one by its first constructor."""
    yield
    if comm.is_initialized():
        comm.shutdown()


def net() -> nn.Module:
    return nn.Linear(3, 2)


def decentralized(**options: Any) -> Algorithm:
    module = net()
    return Decentralized(module, torch.optim.SGD(module.parameters()), **options)


MISSPELLED: dict[str, tuple[Callable[[], object], type[Exception], str, str]] = {
    "an option": (lambda: ByteGrad(net(), blok=3), TypeError, "ByteGrad", "block"),  # type: ignore[call-arg]
    "of a base": (lambda: ByteGrad(net(), bucket_bites=3), TypeError, "ByteGrad", "bucket_bytes"),  # type: ignore[call-arg]
    "of gossip": (lambda: decentralized(intervall=3), TypeError, "Decentralized", "interval"),
    "of a spec": (lambda: from_spec("bytegrad:blok=3", net()), ValueError, "ByteGrad", "block"),
    "beside a spec": (lambda: from_spec("bytegrad", net(), gaurd=None), ValueError, "ByteGrad", "guard"),
    "of a hook": (lambda: ddp.hook("bytegrad:blok=3"), ValueError, "ByteGrad", "block"),
    "beside a hook": (lambda: ddp.hook("bytegrad", gaurd=None), ValueError, "ByteGrad", "guard"),
    "of a codec": (lambda: compression.from_spec("qsgd:bit=4"), ValueError, "qsgd", "bits"),
    "of a hook's codec": (lambda: ddp.hook("absmax_int8:blok=4"), ValueError, "absmax_int8", "block"),
    "an algorithm": (lambda: from_spec("bytgrad", net()), ValueError, "bytgrad", "bytegrad"),
    "its class": (lambda: from_spec("SignSGD", net()), ValueError, "SignSGD", "sign"),
    "a hook": (lambda: ddp.hook("bytgrad"), ValueError, "bytgrad", "bytegrad"),
    "a codec": (lambda: compression.from_spec("minmax_unit8"), ValueError, "minmax_unit8", "minmax_uint8"),
    "a codec in place of an algorithm": (
        lambda: from_spec("absmx_int8", net()),
        ValueError,
        "absmx_int8",
        "absmax_int8",
    ),
    "an algorithm's codec": (lambda: CompressedAllReduce(net(), codec="sgin"), ValueError, "sgin", "sign"),
    "peers": (lambda: decentralized(peers="rnig"), ValueError, "rnig", "ring"),
    "an optimizer": (lambda: warm_up("bytegrad", optimizers=["AdmaW"]), ValueError, "AdmaW", "AdamW"),
    "an action": (lambda: Guard(action="wident"), ValueError, "wident", "widen"),
    "a format": (lambda: FP8(format="e4m4"), ValueError, "e4m4", "e4m3"),
}


@folded(what=list(MISSPELLED))
def test_the_error_has_the_class_and_what_may_be_meant(what: str) -> None:
    make, kind, got, meant = MISSPELLED[what]
    with pytest.raises(kind, match=f"{got}.*did you mean '{meant}'"):
        make()


WRONG: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "a module": (lambda: ByteGrad("net"), TypeError, "torch.nn.Module.*'net'"),  # type: ignore[arg-type]
    "a hook's module": (lambda: ddp.hook("bytegrad", 3), TypeError, "DistributedDataParallel.*3"),  # type: ignore[arg-type]
    "an optimizer": (lambda: ByteGrad(net(), 3), TypeError, "optimizer.*3"),  # type: ignore[arg-type]
    "a communicator": (lambda: ByteGrad(net(), communicator=3), TypeError, "Communicator.*3"),  # type: ignore[arg-type]
    "a switch": (lambda: ByteGrad(net(), only_if_faster="ture"), TypeError, "True or False.*'ture'"),  # type: ignore[arg-type]
    "a switch of a spec": (
        lambda: from_spec("bytegrad:only_if_faster=ture", net()),
        ValueError,
        "True or False.*'ture'",
    ),
    "a number of a spec": (lambda: from_spec("bytegrad:block=many", net()), ValueError, "whole number.*'many'"),
    "a spec": (lambda: from_spec(ByteGrad, net()), TypeError, "text.*ByteGrad"),  # type: ignore[call-overload]
    "a hook's spec": (lambda: ddp.hook(3), TypeError, "text.*3"),  # type: ignore[arg-type]
    "a codec": (lambda: CompressedAllReduce(net(), codec=3), TypeError, "codec.*3"),  # type: ignore[arg-type]
}


@folded(what=list(WRONG))
def test_wrong_types_are_told_by_what_was_expected_and_given(what: str) -> None:
    make, kind, message = WRONG[what]
    with pytest.raises(kind, match=message):
        make()


def test_specs_of_wrappers_and_hooks_are_the_same() -> None:
    for name in [*names(), *codec_names()]:
        kind, options = Algorithm.named(name)
        refused = issubclass(kind, ModelAlgorithm) or not getattr(kind, "has_hook", False)
        if refused:
            with pytest.raises(ValueError, match=f"{kind.__name__}, of which there is no hook"):
                ddp.hook(name)
        else:
            ddp.hook(name)
            made = from_spec(name, net())
            assert type(made) is kind
            if options:
                assert isinstance(made, CompressedAllReduce)
                assert made.assignment.default.at(0) == options["codec"]


def test_a_codec_names_an_algorithm_with_options() -> None:
    made = from_spec("minmax_uint8:block=64", net(), min_numel=7)
    assert isinstance(made, CompressedAllReduce)
    assert made.assignment.default.at(0) == MinMaxUInt8(block=64)


def test_the_error_lists_all_arguments() -> None:
    with pytest.raises(TypeError) as caught:
        ByteGrad(net(), nothing_alike=3)  # type: ignore[call-arg]
    for option in ("block", "stochastic", "guard", "bucket_bytes", "broadcast_buffers", "communicator"):
        assert re.search(rf"\b{option}\b", str(caught.value))
    assert "did you mean" not in str(caught.value)
