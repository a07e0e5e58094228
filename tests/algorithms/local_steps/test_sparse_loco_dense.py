"""What SparseLoCo does with dense parameters: biases, norms and tensors below one chunk."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import LocalSGD, SparseLoCo
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.compression import AbsMaxInt8, ChunkedTopK, from_spec
from tests.algorithms import parts
from tests.algorithms.gossip.common import flat
from tests.algorithms.local_steps.common import Tensors, step
from tests.grids import grid, only


def test_the_norm_is_of_all_residuals() -> None:
    """Those of sparse and of dense parameters, and on each rank that of the mean in its chunk."""

    def rank(communicator: Communicator) -> tuple[float, dict[str, torch.Tensor]]:
        module = Tensors((4096,), (128, 32), (60, 60))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with SparseLoCo(module, optimizer, communicator=communicator, interval=2, dense="sign") as model:
            for number in range(4):
                step(module, optimizer, communicator.rank, number)
            model.wait()
            vectors = {key: torch.cat(list(named.values())).double() for key, named in parts.vectors(model).items()}
            return model.stats().residual_norm, vectors

    everyone = run_ranks(3, rank)
    residuals = [everyone[0][1]["owner"], *(vectors[key] for _, vectors in everyone for key in ("residual", "worker"))]
    squares = [float(each.square().sum()) for each in residuals]
    assert min(squares) > 1e-2 * sum(squares)
    assert sum(norm**2 for norm, _ in everyone) == pytest.approx(sum(squares), rel=1e-5)


@grid(size=[2, 3], dense=["absmax_int8", "sign", "topk:ratio=0.1"], cover=1)
def test_nothing_is_lost(size: int, dense: str) -> None:
    """What ranks have learned in the mean is in the outer parameters, or ranks remember it."""

    def rank(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        module = Tensors((700,), (20, 30))
        begin, learned = flat(module).double(), torch.zeros(1300).double()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with SparseLoCo(module, optimizer, communicator=communicator, interval=2, dense=dense) as model:
            for number in range(4):
                before = flat(module).double()
                step(module, optimizer, communicator.rank, 2 * number)
                step(module, optimizer, communicator.rank, 2 * number + 1)
                learned += before - flat(module).double()
                model.wait()
            vectors = parts.vectors(model)
            kept = [torch.cat(list(vectors[key].values())) for key in {"worker", "owner"} & vectors.keys()]
            return learned, begin - flat(module).double(), torch.stack(kept).double().sum(0)

    everyone = run_ranks(size, rank)
    learned, applied, kept = (torch.stack([each[place] for each in everyone]).mean(0) for place in range(3))
    assert all(torch.equal(each[1], everyone[0][1]) for each in everyone)
    assert float((learned - applied - kept).norm()) <= 1e-5 * float(learned.norm())
    assert float(kept.norm()) > 1e-3 * float(learned.norm())


@grid(cover=1, size=only([2, 3, 4, 5, 8], 2, 3))
def test_bytes_are_those_of_the_codec(size: int) -> None:
    """To the byte: twice the payload of a chunk for each other rank, a third of the bytes of float32 or less."""

    def rank(communicator: Communicator, dense: Any) -> int:
        module = Tensors((64, 64), (2048,), (1000,), (20, 30))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with SparseLoCo(module, optimizer, communicator=communicator, interval=2, dense=dense) as model:
            for number in range(4):
                step(module, optimizer, communicator.rank, number)
            model.wait()
            return int(model.stats().bytes_sent)

    codec = AbsMaxInt8()
    blocks = 2048 // 256 + -(-1000 // 256) + -(-600 // 256)
    chunk = codec.payload_size(-(-blocks // size) * 256)
    # Messages have whole units of 16 bytes.
    sparse = (size - 1) * -(-84 // 16) * 16
    expected = 2 * (sparse + 2 * (size - 1) * chunk)
    assert run_ranks(size, rank, "absmax_int8") == [expected] * size
    exact = sum(run_ranks(size, rank, None)) - 2 * size * sparse
    assert exact == pytest.approx(2 * 8 * (size - 1) * (2048 + 1000 + 600), rel=1e-3)
    assert size * (expected - 2 * sparse) < exact / 3


@grid(size=[2, 3], shapes=[((300,), (20, 30)), ((300,), (64, 64), (5,))], dense=["absmax_int8", "qsgd"], cover=1)
def test_resumes_bit_for_bit(size: int, shapes: Any, dense: str) -> None:
    """In the middle of a round, residuals included; with random numbers, too."""
    options: dict[str, Any] = {"interval": 3, "dense": dense}

    def rank(communicator: Communicator) -> None:
        runs = []
        for part in (False, True):
            module = Tensors(*shapes)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            model = SparseLoCo(module, optimizer, communicator=communicator, **options)
            for number in range(7):
                step(module, optimizer, communicator.rank, number)
            if part:
                state = copy.deepcopy(model.algorithm_state_dict())
                model.close()
                module = Tensors(*shapes)
                optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
                model = SparseLoCo(module, optimizer, communicator=communicator, **options)
                model.load_algorithm_state_dict(state)
            for number in range(7, 13):
                step(module, optimizer, communicator.rank, number)
            model.wait()
            vectors = parts.vectors(model)
            runs.append([flat(module), *(each for named in vectors.values() for each in named.values())])
            assert dense == "qsgd" or vectors["worker"]["p0"].any()
            model.close()
        assert len(runs[0]) == len(runs[1])
        assert all(map(torch.equal, *runs))

    run_ranks(size, rank)


@grid(cover=1, dense=[None, "absmax_int8"])
def test_a_state_of_a_run_without_a_codec_is_taken(dense: Any) -> None:
    """Residuals are zero then; those of a run with a codec are dropped by one without."""

    def rank(communicator: Communicator) -> None:
        states = []
        for each in (dense, None if dense else "absmax_int8"):
            module = Tensors((300,), (64, 64))
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            with SparseLoCo(module, optimizer, communicator=communicator, interval=2, dense=each) as model:
                for state in states:
                    model.load_algorithm_state_dict(state)
                    assert torch.equal(parts.vectors(model)["residual"]["p1"], state["vectors"]["residual"]["p1"])
                    assert not parts.vectors(model).get("worker", {}).get("p0", torch.zeros(1)).any() or dense
                for number in range(4):
                    step(module, optimizer, communicator.rank, number)
                states.append(copy.deepcopy(model.algorithm_state_dict()))

    run_ranks(2, rank)


@grid(cover=1, dense=[None, "identity"])
def test_a_model_with_small_tensors_only_is_averaged(dense: Any) -> None:
    """Bit for bit as by plain averaging where nothing is lost, and there is no residual."""

    def rank(communicator: Communicator, kind: Any, options: dict[str, Any]) -> torch.Tensor:
        module = Tensors((300,), (20, 30), (5,), ())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with kind(module, optimizer, communicator=communicator, interval=2, **options) as model:
            for number in range(8):
                step(module, optimizer, communicator.rank, number)
            model.wait()
            assert model.stats().residual_norm == 0
            return flat(module)

    for found, expected in zip(
        run_ranks(2, rank, SparseLoCo, {"dense": dense}), run_ranks(2, rank, LocalSGD, {}), strict=True
    ):
        assert torch.equal(found, expected)


def test_a_model_with_small_tensors_only_has_a_residual() -> None:
    def rank(communicator: Communicator) -> torch.Tensor:
        module = Tensors((300,), (20, 30))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with SparseLoCo(module, optimizer, communicator=communicator, interval=2) as model:
            for number in range(4):
                step(module, optimizer, communicator.rank, number)
            model.wait()
            assert model.stats().residual_norm > 0
            return flat(module)

    assert torch.equal(*run_ranks(2, rank))


def test_a_model_without_small_tensors_has_no_other_residual() -> None:
    """The same bits and bytes with any codec for dense parameters."""

    def rank(communicator: Communicator, dense: Any) -> Any:
        module = Tensors((64, 64), (70, 90))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with SparseLoCo(module, optimizer, communicator=communicator, interval=2, dense=dense) as model:
            for number in range(4):
                step(module, optimizer, communicator.rank, number)
            model.wait()
            assert parts.vectors(model).keys() == {"start", "residual"}
            return flat(module), model.stats().bytes_sent, model.stats().residual_norm

    (with_codec, _), (without, _) = (run_ranks(2, rank, dense) for dense in ("absmax_int8", None))
    assert torch.equal(with_codec[0], without[0])
    assert with_codec[1:] == without[1:]


def test_kinds_of_parameters() -> None:
    """A name in `exact`, float64 and a tensor below one block stay float32, or what they are; "1d" stands for dense ones."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(64, 128)
            self.norm = nn.LayerNorm(128)
            self.second = nn.Linear(128, 64)
            self.few, self.empty = nn.Parameter(torch.zeros(67)), nn.Parameter(torch.zeros(0, 3))
            self.precise = nn.Parameter(torch.zeros(300, dtype=torch.float64))

    def rank(communicator: Communicator) -> dict[str, Any]:
        module = Net()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        options: dict[str, Any] = {"exact": ("1d", "norm.*", "second.weight")}
        with SparseLoCo(module, optimizer, communicator=communicator, **options) as model:
            rounds = parts.outer_rounds(model).outer
            return {name: each.difference.kind for each in rounds for name in each.difference.names}

    kinds = run_ranks(2, rank)[0]
    codecs = {name: None if kind is None else kind.at(0) for name, kind in kinds.items()}
    sparse, dense = from_spec("chunked_topk:k=64,chunk=4096"), AbsMaxInt8()
    expected = {"first.weight": sparse, "first.bias": dense, "second.bias": None, "few": None, "empty": None}
    assert codecs == {**expected, "norm.weight": None, "norm.bias": None, "second.weight": None, "precise": None}


@grid(
    bad=[float("nan"), float("inf")],
    size=[2, 3],
    dense=only(["absmax_int8:block=32", "sign:block=32"], "absmax_int8:block=32"),
    cover=1,
)
def test_a_value_that_is_not_finite_is_seen_by_all_and_not_kept(bad: float, size: int, dense: str) -> None:
    """All ranks get NaN in its block. Other blocks and tensors go on."""

    def rank(communicator: Communicator) -> tuple[torch.Tensor, float]:
        module = Tensors((300,), (64, 64), (20, 30))
        start = flat(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with SparseLoCo(module, optimizer, communicator=communicator, interval=4, dense=dense) as model:
            for number in range(4):
                step(module, optimizer, communicator.rank, number)
                if communicator.rank == 1 and number == 1:
                    with torch.no_grad():
                        module.p0[70] = bad
            model.wait()
            for begin, end in ((0, 64), (96, 300), (300, 300 + 64 * 64), (300 + 64 * 64, len(start))):
                assert not torch.equal(flat(module)[begin:end], start[begin:end])
            return flat(module), model.stats().residual_norm

    everyone = run_ranks(size, rank)
    for found, norm in everyone:
        assert torch.equal(found.nan_to_num(7e7), everyone[0][0].nan_to_num(7e7))
        assert not found[64:96].isfinite().any()
        assert torch.cat([found[:64], found[96:]]).isfinite().all()
        assert 0 < norm < float("inf")


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_one_rank_alone_sends_nothing_through_a_codec(rate: float) -> None:
    """It meets nobody: the codec changes no bit, whether the outer step changes anything or not."""

    def rank(communicator: Communicator, dense: Any) -> torch.Tensor:
        module = Tensors((300,), (64, 64), (5,))
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        options: dict[str, Any] = {"interval": 2, "outer_lr": rate, "dense": dense}
        with SparseLoCo(module, optimizer, communicator=communicator, **options) as model:
            for number in range(5):
                step(module, optimizer, 0, number)
            assert model.stats().bytes_sent == 0
            assert model.stats().residual_norm == 0
        return flat(module)

    def plain() -> torch.Tensor:
        module = Tensors((300,), (64, 64), (5,))
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        for number in range(5):
            step(module, optimizer, 0, number)
        return flat(module)

    (exact,), (found,) = (run_ranks(1, rank, dense) for dense in (None, "sign"))
    assert torch.equal(found, exact)
    assert torch.equal(found, plain()) == (rate == 1.0)


@pytest.mark.parametrize(
    ("dense", "kind", "reason"),
    [
        (ChunkedTopK(), TypeError, "ChunkedTopK is for sparse parameters, so pass it as codec"),
        ("chunked_topk:k=5,chunk=32", TypeError, "ChunkedTopK is for sparse parameters, so pass it as codec"),
        ("int8", ValueError, "there is no codec 'int8'"),
        ("absmax_int8:block=7", ValueError, "must be a power of two"),
        ("absmax_int8:blok=32", ValueError, "blok"),
        (8, TypeError, ""),
        ({0: "absmax_int8"}, TypeError, ""),
    ],
)
def test_what_is_no_codec_for_dense_parameters_is_refused(dense: Any, kind: Any, reason: str) -> None:
    """At once, with what is expected and what was got."""
    module = Tensors((300,))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(kind) as caught:
        SparseLoCo(module, optimizer, dense=dense)
    text = str(caught.value)
    assert text.startswith('expected dense to be a codec, the spec of one such as "absmax_int8", or None for float32')
    assert f"got {dense!r}" in text
    assert reason in text
