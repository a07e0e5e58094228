"""The cost model: its limits by arithmetic, and the order of algorithms in published measurements."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagua_kernels import algorithms
from bagua_kernels.algorithms.choosing.cost.facts import GPU, Job, Machine, Network
from bagua_kernels.algorithms.choosing.cost.methods import Method, methods
from bagua_kernels.algorithms.choosing.cost.predict import predict
from bagua_kernels.comm import LocalCommunicator
from tests.grids import folded

KNOWN = {method.name: method for method in methods()}
FREE = Machine(exposed=0.5, per_byte=0.0, work={"": 0.0})
# One matrix of a million elements, in one bucket.
JOB = Job(0.1, ((1000, 1000),))
TEN = dataclasses.replace(JOB, bucket_bytes=400_000)
FRAME = 1448 / 1514


def seconds(name: str, network: Network, machine: Machine = FREE, job: Job = JOB) -> float:
    return predict(KNOWN[name], job, machine, network).seconds


def test_by_arithmetic() -> None:
    """4 ranks at 8 Mbit/s: a float32 all-reduce sends 1.5 times 4 MB, a peer's model 4 MB."""
    network = Network(4, 8e6 / FRAME)
    assert seconds("GradientAllReduce", network) == pytest.approx(0.1 + 6.0)
    assert seconds("GradientAllReduce", network, job=TEN) == pytest.approx(0.05 + 6.0)
    assert seconds("Decentralized", network) == pytest.approx(0.1 / 6 + 4.0)
    assert seconds("D2 ring", network) == pytest.approx(0.1 + 8.0)
    assert seconds("DiLoCo 30", network) == pytest.approx(0.1 + 6.0 / 30)
    assert seconds("AsyncModelAverage", network) == pytest.approx(0.1)
    # A row and a column of 1,000, and two passes of each: 12 kB.
    assert seconds("PowerSGD 1", network) == pytest.approx(0.1 + 0.012)
    assert seconds("PowerSGD 1", network, job=TEN) == pytest.approx(0.1 + 0.0012)
    assert seconds("PowerSGD 1", Network(4, 8e4 / FRAME)) == pytest.approx(0.1 + 1.2)


def test_latency_by_arithmetic() -> None:
    fast = Network(4, latency=0.01)
    endless = dataclasses.replace(FREE, window=math.inf)
    assert seconds("DDP", fast, endless) == pytest.approx(0.1 + 6 * 0.01)
    assert seconds("GradientAllReduce", Network(4, latency=0.1), endless) == pytest.approx(0.1 + 2 * 0.1)
    # A window of 1 MB each 20 ms is 50 MB/s on one connection: 6 MB in 0.12 s.
    narrow = dataclasses.replace(FREE, window=1e6)
    assert seconds("DDP", fast, narrow) == pytest.approx(0.1 + 6 * 0.01 + 6 / 50 / FRAME)


def test_work_by_arithmetic() -> None:
    machine = Machine(exposed=0.5, per_byte=1e-8, work={"minmax_uint8": 1e-7}, factor=2e-7)
    found = predict(KNOWN["ByteGrad"], JOB, machine, Network(2))
    assert found.sent == pytest.approx(1.03125e6, rel=0.01)
    assert found.work == pytest.approx(0.1 + found.sent * 1e-8)
    assert found.seconds == pytest.approx(0.1 + found.work)
    assert predict(KNOWN["PowerSGD 1"], JOB, machine, Network(2)).work == pytest.approx(0.2, rel=0.01)
    with pytest.raises(ValueError, match="no work of 'sign', and none for other codecs"):
        predict(KNOWN["SignSGD"], JOB, machine, Network(2))


@given(
    st.sampled_from(sorted(KNOWN)),
    st.integers(1, 64),
    st.sampled_from([1, 2, 8]),
    st.floats(1e5, 1e12),
    st.floats(0, 0.1),
)
def test_slower_networks_take_longer(name: str, nodes: int, per_node: int, rate: float, latency: float) -> None:
    network = Network(nodes * per_node, rate, latency, per_node, 1e12)
    found = seconds(name, network, GPU)
    assert JOB.seconds <= found < math.inf
    assert found <= seconds(name, dataclasses.replace(network, bits_per_second=rate / 2), GPU)
    assert found <= seconds(name, dataclasses.replace(network, latency=latency + 0.01), GPU)
    assert seconds(name, Network(1, rate, latency), GPU) == JOB.seconds


def test_nodes_share_a_link() -> None:
    """Eight ranks of a node send as much to others as one, and each sends to the others of its node before and after."""
    network = Network(32, 1e9, 0.0, 8, 1e10)
    inside = 2 * 7 / 8 * 4e6 * 8 / 1e10
    assert seconds("GradientAllReduce", network) == pytest.approx(
        seconds("GradientAllReduce", Network(4, 1e9)) + inside
    )


@folded(method={method.name: method for method in methods() if method.spec})
def test_specs_are_those_of_algorithms(method: Method) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer: torch.optim.Optimizer | None = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments: dict[str, Any] = {"communicator": LocalCommunicator.alone()}
    if method.spec == "onebit_adam":
        optimizer, arguments = None, {**arguments, "lr": 1e-3}
    algorithms.from_spec(method.spec, model, optimizer, **arguments).close()


def test_refusals() -> None:
    with pytest.raises(ValueError, match="expected full nodes"):
        Network(9, per_node=8)
    with pytest.raises(ValueError, match="bandwidths above 0"):
        Network(8, 0.0)
    with pytest.raises(ValueError, match="a step of more than 0 seconds"):
        Job(0.0, ((2, 2),))
    with pytest.raises(ValueError, match=r"as many elements as the matrices have \(4\)"):
        Job(1.0, ((2, 2),), 3)


# Seconds of an epoch of BERT-Large on SQuAD with 128 V100 in 16 nodes (BAGUA, VLDB 2022 and its site; read off a chart), at
# 1, 2 and 100 Gbit/s, and at 100 Gbit/s with 1 and 5 ms.
PUBLISHED: dict[str, tuple[float | None, ...]] = {
    "DDP": (2580, 1290, 125, 290, 905),
    "Decentralized": (1500, 790, 83, 137, 415),
    "ByteGrad": (700, 350, 86, 142, 465),
    "LowPrecisionDecentralized 8": (730, 365, 75, 92, 155),
    "OneBitAdam": (70, None, 68, 83, 220),
    "AsyncModelAverage": (60, None, 61, 61, 61),
}
NETWORKS = ((1e9, 5e-5), (2e9, 5e-5), (1e11, 5e-5), (1e11, 1e-3), (1e11, 5e-3))
STEPS = 88_000 / (128 * 6)
APART = 1.15  # what a chart shows surely
RIGHT = 0.8  # of the pairs that far apart


def test_order_of_published_measurements() -> None:
    layer = [(1024, 1024)] * 4 + [(4096, 1024), (1024, 4096)]
    matrices = (*layer * 24, (30522, 1024))
    # There the model of 8 bits is exchanged after the optimizer's step, beside nothing.
    known = KNOWN | {
        name: dataclasses.replace(KNOWN[name], when="after") for name in KNOWN if name.startswith("LowPrecision")
    }
    pairs = []
    for column, (rate, latency) in enumerate(NETWORKS):
        network = Network(128, rate, latency, 8, 1.2e12)
        measured = {name: times[column] for name, times in PUBLISHED.items() if times[column] is not None}
        # Asynchronous training waits for nothing: its time is that of computation.
        predicted = {
            name: predict(
                known[name], Job(61 / STEPS, matrices, bucket_bytes=(25 if name == "DDP" else 10) << 20), GPU, network
            ).seconds
            for name in measured
        }
        for best in (min, max):
            assert best(predicted, key=predicted.__getitem__) == best(measured, key=lambda name: measured[name] or 0)
        pairs += [
            (predicted[one] > predicted[other]) == (measured[one] > measured[other])  # type: ignore[operator]
            for one, other in itertools.combinations(measured, 2)
            if max(measured[one] / measured[other], measured[other] / measured[one]) > APART  # type: ignore[operator]
        ]
    assert len(pairs) == 56
    assert sum(pairs) >= RIGHT * len(pairs)
