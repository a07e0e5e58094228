"""A frozen base, such as that below LoRA's adapters: it is compared when a module is wrapped, and sent where it differs."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import Algorithm, Decentralized, DiLoCo, LocalSGD, checkpoint, from_spec
from bagua_kernels.algorithms.wrapping.frozen import share_frozen
from bagua_kernels.comm import Communicator, run_ranks
from tests.grids import folded

WIDTH = 600
LITTLE = 4096  # bytes that comparing takes, beside what is trained
BASE = 4 * WIDTH * WIDTH  # bytes of one frozen weight


class Adapted(nn.Module):
    """Two frozen layers, packed bytes as of a base of 4 bits, and an adapter that is trained."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.packed = nn.Parameter(torch.zeros(100_001, dtype=torch.uint8), requires_grad=False)
        self.adapter = nn.Linear(WIDTH, 2)
        for name, parameter in self.named_parameters():
            with torch.no_grad():
                parameter.copy_(100 * torch.rand(parameter.shape, generator=generator))
            parameter.requires_grad_(name.startswith("adapter"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adapter(self.second(torch.tanh(self.first(x))))

    def frozen(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if not parameter.requires_grad]


TRAINED = 4 * (2 * WIDTH + 2)


def bits(tensors: list[torch.Tensor]) -> str:
    """Returns a digest of the bytes of some tensors."""
    data = [each.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for each in tensors]
    return hashlib.sha256(b"".join(data)).hexdigest()


def wrap(communicator: Communicator, module: nn.Module, spec: str = "allreduce") -> Algorithm:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return from_spec(spec, module, torch.optim.SGD(trained, lr=0.1), communicator=communicator)


@pytest.mark.parametrize("spec", ["allreduce", "bytegrad", "diloco", "decentralized", "async_model_average"])
def test_an_equal_base_is_not_sent(spec: str) -> None:
    """Neither by the constructor nor by what comes after it; its tensors stay the same, and in the same memory."""

    def rank(communicator: Communicator) -> tuple[int, int]:
        module = Adapted()
        # The adapter differs: only that is sent.
        with torch.no_grad():
            module.adapter.bias.add_(communicator.rank)
        before = [(id(each), each.data_ptr(), each._version) for each in module.frozen()]
        model = wrap(communicator, module, spec)
        sent = model._setup_bytes
        assert [(id(each), each.data_ptr(), each._version) for each in module.frozen()] == before
        model(torch.ones(1, WIDTH)).mean().backward()
        assert model.optimizer is not None
        model.optimizer.step()
        model.synchronize()
        with model.averaged():
            pass
        later = model._bytes_sent - sent
        assert [(id(each), each.data_ptr(), each._version) for each in module.frozen()] == before
        model.close()
        return sent, later

    for sent, later in run_ranks(3, rank):
        assert sent < 2 * TRAINED + LITTLE
        assert later < 20 * TRAINED + LITTLE < BASE


@pytest.mark.parametrize("name", ["first.weight", "second.weight", "packed"])
def test_only_a_tensor_that_differs_is_sent(name: str) -> None:
    """All ranks get rank 0's; the others are not written."""

    def rank(communicator: Communicator) -> tuple[int, str, set[str]]:
        module = Adapted()
        if communicator.rank == 2:
            with torch.no_grad():
                module.get_parameter(name).view(-1)[-1] = 7
        before = {key: each._version for key, each in module.named_parameters()}
        model = wrap(communicator, module)
        written = {key for key, each in module.named_parameters() if each._version != before[key]}
        model.close()
        return model._setup_bytes, bits(module.frozen()), written

    size = Adapted().get_parameter(name).nbytes
    expected = bits(Adapted().frozen())
    for number, (sent, digest, written) in enumerate(run_ranks(3, rank)):
        assert digest == expected
        assert sent < 2 * size + 2 * TRAINED + LITTLE
        assert written <= ({name} if number else set()) | {"adapter.weight", "adapter.bias"}


def test_a_small_base_is_compared_too() -> None:
    """Of a few bytes, which would be sent as fast as they are compared: a quantized base is not written."""

    def rank(communicator: Communicator) -> tuple[int, int]:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        for parameter in module.parameters():
            nn.init.ones_(parameter)
        module[0].requires_grad_(False)
        before = module[0].weight._version
        wrap(communicator, module).close()
        return before, module[0].weight._version

    assert all(before == after for before, after in run_ranks(2, rank))


def test_bits_of_nan_count() -> None:
    """Two numbers that are no numbers, and two zeros, with other bits: the base is made equal bit for bit."""
    words = torch.tensor([0x7FC00001, 0x7F800001, -(1 << 31), 0x3F800000], dtype=torch.int32)

    def rank(communicator: Communicator) -> list[int]:
        module = Adapted()
        own = words.clone()
        own[:3] += torch.tensor([1, 5, 0], dtype=torch.int32) * communicator.rank
        own[2] *= communicator.rank == 0
        module.second.weight.detach().view(-1).view(torch.int32)[:4] = own
        wrap(communicator, module).close()
        return module.second.weight.detach().view(-1).view(torch.int32)[:4].tolist()

    assert run_ranks(2, rank) == [words.tolist()] * 2


def channels_last() -> torch.Tensor:
    return torch.rand(8, 3, 5, 5).to(memory_format=torch.channels_last)


def with_gaps() -> torch.Tensor:
    return torch.rand(40, 60)[:, ::2]


MADE: dict[str, Callable[[], torch.Tensor]] = {
    "float32": lambda: torch.rand(50, 70),
    "float16": lambda: torch.rand(5000).half(),
    "bfloat16": lambda: torch.rand(50, 70).bfloat16().t(),
    "float8": lambda: torch.rand(5001).to(torch.float8_e4m3fn),
    "complex": lambda: torch.rand(50, 7, dtype=torch.complex64),
    "bool": lambda: torch.rand(333) > 0.5,
    "int64": lambda: torch.randint(1 << 40, (77,)),
    "scalar": lambda: torch.rand(()),
    "empty": lambda: torch.rand(0, 3),
    "channels_last": channels_last,
    "with gaps": with_gaps,
    "within a storage": lambda: torch.rand(101)[1:],
}


@folded(made=list(MADE), differs=[False, True])
def test_every_dtype_and_layout(made: str, differs: bool) -> None:
    """Bytes are compared where they lie. What is equal is sent by none; what differs has rank 0's bytes afterwards."""
    torch.manual_seed(1)
    start = MADE[made]()

    def rank(communicator: Communicator) -> tuple[int, str]:
        # Another storage of the same strides.
        own = torch.empty_strided(start.shape, start.stride(), dtype=start.dtype).copy_(start)
        parameters = [("base", nn.Parameter(own, requires_grad=False)), ("same", torch.ones(3))]
        if differs and communicator.rank == 1:
            own.zero_()
        before = parameters[0][1]._version
        share_frozen(parameters, communicator)
        if not differs:
            assert parameters[0][1]._version == before
        return communicator.bytes_sent, bits([parameters[0][1]])

    for sent, digest in run_ranks(2, rank):
        assert digest == bits([start])
        assert (sent < 1000) or differs


def test_the_order_of_memory_may_differ() -> None:
    """One rank has a weight by columns: its values are compared and sent in the order of elements."""
    start = torch.rand(50, 70)

    def rank(communicator: Communicator) -> tuple[int, torch.Tensor]:
        own = start.clone() if communicator.rank == 0 else start.t().contiguous().t()
        other = start * (1 + communicator.rank)
        share_frozen([("base", own), ("other", other)], communicator)
        assert torch.equal(other, start)
        assert own.is_contiguous() == (communicator.rank == 0)
        return communicator.bytes_sent, own

    for sent, own in run_ranks(2, rank):
        assert torch.equal(own, start)
        assert sent < start.nbytes + LITTLE


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_quantized_dtype() -> None:
    """Its bytes are made equal; another scale is an error on all ranks."""
    numbers = torch.arange(-40, 40).float().view(8, 10)

    def rank(communicator: Communicator, scale: float) -> list[int]:
        own = torch.quantize_per_tensor(
            numbers * (1 - communicator.rank), scale if communicator.rank else 0.5, 3, torch.qint8
        )
        share_frozen([("base", nn.Parameter(own, requires_grad=False))], communicator)
        return own.int_repr().view(-1).tolist()

    first, second = run_ranks(2, rank, 0.5)
    assert first == second
    assert len(set(first)) == 80

    def refused(communicator: Communicator) -> None:
        with pytest.raises(ValueError, match=r"rank 0 has 'base .* scale=0.5 .* rank 1 has 'base .* scale=0.25 "):
            rank(communicator, 0.25)

    run_ranks(2, refused)


class Pair(torch.Tensor):
    """A wrapper of two tensors, as libraries of quantization have them: numbers of 8 bits, and a scale for each row."""

    numbers: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, scales: torch.Tensor) -> Pair:
        found: Pair = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)
        found.numbers, found.scales = numbers, scales
        return found

    def __init__(self, numbers: torch.Tensor, scales: torch.Tensor) -> None:
        pass

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scales"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], meta: None, size: object, stride: object) -> Pair:
        return Pair(inner["numbers"], inner["scales"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise NotImplementedError(f"{function} is not needed: only the tensors inside are read")


@pytest.mark.parametrize("differs", ["", "scales", "shape"])
def test_a_wrapper_of_tensors_is_what_is_inside(differs: str) -> None:
    def rank(communicator: Communicator) -> int:
        changed = differs if communicator.rank else ""
        pair = Pair(torch.ones(300, 400, dtype=torch.int8), torch.ones(301 if changed == "shape" else 300))
        if changed == "scales":
            pair.scales[5] = 3
        pointers = pair.numbers.data_ptr(), pair.scales.data_ptr()
        if differs == "shape":
            with pytest.raises(ValueError, match=r"rank 0 has 'base \(300,\) .*: load the same base on all ranks"):
                share_frozen([("base", pair)], communicator)
            return 0
        share_frozen([("base", pair)], communicator)
        assert (pair.numbers.data_ptr(), pair.scales.data_ptr()) == pointers
        assert pair.numbers._version == 0
        assert pair.scales.eq(1).all()
        return communicator.bytes_sent

    assert max(run_ranks(2, rank)) < LITTLE


def test_other_shapes_are_refused() -> None:
    """On all ranks, before anything is compared."""

    def rank(communicator: Communicator) -> None:
        module = nn.Sequential(nn.Linear(5, 5 + communicator.rank), nn.Linear(5, 2))
        module[0].requires_grad_(False)
        with pytest.raises(ValueError, match=r"rank 0 has '0.weight \(5, 5\) .* rank 1 has '0.weight \(6, 5\)"):
            wrap(communicator, module)

    run_ranks(2, rank)


@pytest.mark.parametrize("kind", [DiLoCo, LocalSGD, Decentralized])
def test_checkpoints_have_no_base(kind: type[Algorithm], tmp_path: Path) -> None:
    """Neither what is sent for one nor its files."""

    def rank(communicator: Communicator) -> int:
        module = Adapted()
        optimizer = torch.optim.SGD(module.adapter.parameters(), lr=0.1)
        model = kind(module, optimizer, communicator=communicator)
        model(torch.ones(1, WIDTH)).mean().backward()
        optimizer.step()
        before = model._bytes_sent
        checkpoint.save(model, tmp_path)
        checkpoint.load(model, tmp_path)
        sent = model._bytes_sent - before
        model.close()
        return sent

    assert max(run_ranks(2, rank)) < 10 * TRAINED + LITTLE
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < BASE


def test_ranks_may_have_bases_in_common_that_none_has_changed_since() -> None:
    """A second wrapper sends no base that the first one has made equal."""

    def rank(communicator: Communicator) -> int:
        module = Adapted()
        if communicator.rank:
            nn.init.zeros_(module.first.weight)
        wrap(communicator, module).close()
        model = wrap(communicator, copy.deepcopy(module))
        model.close()
        return model._setup_bytes

    assert max(run_ranks(2, rank)) < TRAINED + LITTLE
