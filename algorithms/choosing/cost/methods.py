"""What each algorithm sends in a step, and when."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from bagua_kernels.algorithms.choosing.cost.facts import Job, Network
from bagua_kernels.comm.backends.sockets.costs import Line, delays, fitted
from bagua_kernels.compression import from_spec

# When messages are under way: beside backward; beside the whole next step; after the step; in rounds of steps; always.
When = Literal["backward", "beside", "after", "rounds", "always"]
# What changes: nothing but the order of sums; the mean's bits, alike on all ranks; models, which differ between ranks.
Exactness = Literal["exact", "synchronous", "any"]
CLASSES: tuple[Exactness, ...] = get_args(Exactness)  # each changes more than the one before
_SIZE = 1 << 20  # elements, of which codecs' bytes are computed


@dataclass(frozen=True)
class Method:
    """One way to train.

    Attributes:
        name: for tables.
        spec: of the algorithm, as `from_spec` takes it; empty for what is not of this package.
        exactness: what it changes.
        when: its messages are under way.
        sent: bytes that a node sends for an exchange, by job and number of nodes.
        messages: of a bucket that wait for each other, by job and network.
        connections: that a node sends over at the same time, by number of nodes.
        codec: the spec of what encodes elements; empty if nothing does.
        low_rank: rank of factors, 0 without.
        interval: steps between two exchanges.
        delay: steps beside which a round's messages may be under way.
        buckets: True if each bucket pays latency, False if all parameters go together.
    """

    name: str
    spec: str
    exactness: Exactness
    when: When
    sent: Callable[[Job, int], float]
    messages: Callable[[Job, Network], float]
    connections: Callable[[int], float]
    codec: str = ""
    low_rank: int = 0
    interval: int = 1
    delay: int = 0
    buckets: bool = True


@functools.cache
def bytes_of(codec: str) -> float:
    """Bytes of an element's payload."""
    return 4.0 if not codec else from_spec(codec).payload_size(_SIZE) / _SIZE


def twice(codec: str, job: Job, nodes: int) -> float:
    """An all-reduce in two passes, each of which leaves out a rank's own chunk."""
    return bytes_of(codec) * 2 * (nodes - 1) / nodes * job.elements


def gathered(codec: str, job: Job, nodes: int) -> float:
    """Everybody's payload to everybody."""
    return bytes_of(codec) * (nodes - 1) * job.elements


def large(sent: Callable[[str, Job, int], float], codec: str, job: Job, nodes: int) -> float:
    """Matrices by a codec, and what is no matrix exactly; everything by the codec where no matrix is known."""
    encoded = job.inside or job.elements
    exact = bytes_of("") * 2 * (nodes - 1) / nodes * (job.elements - encoded)
    return sent(codec, dataclasses.replace(job, elements=encoded), nodes) + exact


def to_peers(codec: str, peers: float, job: Job, nodes: int) -> float:
    """A model to each of some peers."""
    return bytes_of(codec) * min(peers, nodes - 1) * job.elements


def factors(rank: int, job: Job, nodes: int) -> float:
    """Two thin factors of each matrix, and what is no matrix."""
    thin = sum(min(rank * (rows + columns), rows * columns) for rows, columns in job.matrices)
    return 4.0 * 2 * (nodes - 1) / nodes * (thin + job.elements - job.inside)


def around(job: Job, network: Network) -> float:
    """A ring's steps."""
    return 2.0 * (network.nodes - 1)


def summed(job: Job, network: Network) -> float:
    """An all-reduce of a bucket, by the way that ranks take on CPUs."""
    return _delays("all_reduce", network, min(job.bucket_bytes, 4 * job.elements))


def coded(codec: str, job: Job, network: Network) -> float:
    """Payloads to their owners, and an all-gather of the owners' payloads."""
    elements = min(job.bucket_bytes / 4, job.elements)
    return 1.0 + _delays("all_gather", network, bytes_of(codec) * elements / network.nodes)


def shared(codec: str, job: Job, network: Network) -> float:
    """An all-gather of payloads."""
    return _delays("all_gather", network, bytes_of(codec) * min(job.bucket_bytes / 4, job.elements))


def factored(rank: int, job: Job, network: Network) -> float:
    """Two all-reduces, one of each factor."""
    share = factors(rank, job, 2) / 2 / job.buckets
    return 2.0 * _delays("all_reduce", network, share)


def once(job: Job, network: Network) -> float:
    """One message."""
    return 1.0


def _delays(operation: str, network: Network, nbytes: float) -> float:
    """Returns for how many one-way delays a collective waits by the table for this network."""
    nodes = network.nodes
    way = fitted(nodes, Line.measured(network.latency)).way(operation, int(nbytes))
    return float(delays(operation, way, nodes))


def one(nodes: int) -> float:
    """A connection to one other node."""
    return 1.0


def others(nodes: int) -> float:
    """A connection to each other node."""
    return nodes - 1.0


def couple(nodes: int) -> float:
    """Both neighbours."""
    return min(2.0, nodes - 1.0)


def known() -> dict[str, Method]:
    """All methods by their names."""
    return {method.name: method for method in methods()}


def methods() -> list[Method]:
    """All that are known, with their default options."""
    plain, half = functools.partial(twice, ""), "cast:dtype=float16"
    reduced = functools.partial(Method, when="backward", messages=summed, connections=others)
    local = functools.partial(Method, exactness="any", when="rounds", messages=summed, connections=others, interval=30)
    model = functools.partial(Method, exactness="any", messages=once)
    peer = functools.partial(model, when="beside", sent=functools.partial(to_peers, "", 1), connections=one)
    near = functools.partial(model, connections=couple)
    ring = functools.partial(Method, spec="", when="backward", messages=around, connections=one)
    topk, chunked = "topk:ratio=0.01", "chunked_topk:k=64,chunk=4096"
    found = [
        ring("DDP", exactness="exact", sent=plain),
        ring("DDP fp16", exactness="synchronous", sent=functools.partial(twice, half), codec=half),
        reduced("GradientAllReduce", "allreduce", "exact", sent=plain),
        *(
            reduced(
                name,
                spec,
                "synchronous",
                sent=functools.partial(large, twice, codec) if codec == "sign" else functools.partial(twice, codec),
                messages=functools.partial(coded, codec),
                codec=codec,
            )
            for name, spec, codec in (
                ("ByteGrad", "bytegrad", "minmax_uint8"),
                ("8 bits", "compressed:codec=absmax_int8", "absmax_int8"),
                ("4 bits", "compressed:codec=absmax_int4", "absmax_int4"),
                ("SignSGD", "sign", "sign"),
                ("OneBitAdam", "onebit_adam", "sign"),
            )
        ),
        reduced(
            "TopK 1 %",
            topk,
            "synchronous",
            sent=functools.partial(large, gathered, topk),
            messages=functools.partial(shared, topk),
            codec=topk,
        ),
        *(
            reduced(
                f"PowerSGD {rank}",
                f"powersgd:rank={rank}",
                "synchronous",
                sent=functools.partial(factors, rank),
                messages=functools.partial(factored, rank),
                low_rank=rank,
            )
            for rank in (1, 2, 4)
        ),
        peer("Decentralized", "decentralized:peers=one_peer_exponential"),
        peer("SGP", "sgp:peers=one_peer_exponential"),
        *(
            near(
                f"LowPrecisionDecentralized {bits}",
                f"lowprec:codec={codec}",
                when="beside",
                sent=functools.partial(to_peers, codec, 2),
                codec=codec,
            )
            for bits, codec in ((8, "minmax_uint8"), (2, "minmax_uint2"))
        ),
        near("Choco", "choco", when="after", sent=functools.partial(to_peers, "minmax_uint8", 2), codec="minmax_uint8"),
        near("D2 chain", "d2:peers=chain", when="after", sent=functools.partial(to_peers, "", 1.5)),
        near("D2 ring", "d2:peers=lazy_ring", when="after", sent=functools.partial(to_peers, "", 2)),
        local("LocalSGD 16", "local_sgd:interval=16", sent=plain, interval=16),
        local("DiLoCo 30", "diloco:interval=30", sent=plain),
        local(
            "DiLoCo 30, 4 bits",
            "diloco:interval=30,codec=absmax_int4,delay=10",
            sent=functools.partial(twice, "absmax_int4"),
            messages=functools.partial(coded, "absmax_int4"),
            codec="absmax_int4",
            delay=10,
        ),
        local(
            "SparseLoCo 30",
            "sparse_loco:interval=30,delay=29",
            sent=functools.partial(gathered, chunked),
            messages=functools.partial(shared, chunked),
            codec=chunked,
            delay=29,
        ),
        local("AsyncModelAverage", "async_model_average", when="always", sent=plain, interval=1, buckets=False),
    ]
    return found
