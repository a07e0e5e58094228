"""What a prediction depends on: the job, the machines, and the network between them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FRAME = 1448 / 1514  # payload of an Ethernet frame that carries TCP with time stamps


@dataclass(frozen=True)
class Job:
    """What is trained.

    Attributes:
        seconds: of a step without communication, on one rank while the others of its machine train, too.
        matrices: rows and columns of each parameter that low rank applies to.
        elements: of all parameters; by default of the matrices.
        bucket_bytes: of gradients that are exchanged together.
    """

    seconds: float
    matrices: tuple[tuple[int, int], ...]
    elements: int = 0
    bucket_bytes: int = 10 << 20

    def __post_init__(self) -> None:
        """Raises ValueError if a number is too small."""
        object.__setattr__(self, "elements", self.elements or self.inside)
        if not self.seconds > 0 or self.bucket_bytes < 1 or self.elements < max(1, self.inside):
            raise ValueError(
                f"expected a step of more than 0 seconds, at least as many elements as the matrices have ({self.inside}) and "
                f"buckets of at least a byte, got seconds={self.seconds!r}, elements={self.elements!r} and "
                f"bucket_bytes={self.bucket_bytes!r}"
            )

    @property
    def inside(self) -> int:
        """Elements of all matrices."""
        return sum(rows * columns for rows, columns in self.matrices)

    @property
    def buckets(self) -> int:
        """How many times the network's latency is paid."""
        return math.ceil(4 * self.elements / self.bucket_bytes)


@dataclass(frozen=True)
class Network:
    """How ranks are connected.

    Attributes:
        ranks: all of them.
        bits_per_second: that a node sends, and receives at the same time.
        latency: seconds from one node to another, one way.
        per_node: ranks of a node, which share its link.
        local_bits_per_second: that a rank sends to others of its node.
    """

    ranks: int
    bits_per_second: float = math.inf
    latency: float = 0.0
    per_node: int = 1
    local_bits_per_second: float = math.inf

    def __post_init__(self) -> None:
        """Raises ValueError if a number is too small, or nodes are not full."""
        if self.ranks < 1 or self.per_node < 1 or self.ranks % self.per_node:
            raise ValueError(
                f"expected full nodes of at least one rank, got ranks={self.ranks!r} and per_node={self.per_node!r}"
            )
        if not (self.bits_per_second > 0 and self.local_bits_per_second > 0 and self.latency >= 0):
            raise ValueError(f"expected bandwidths above 0 and a latency of 0 or more, got {self}")

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return self.ranks // self.per_node

    def seconds(self, sent: float, messages: float) -> float:
        """How long a node's link is busy with bytes, and messages that wait for each other."""
        return 8 * sent / (self.bits_per_second * FRAME) + messages * self.latency

    def local_seconds(self, sent: float) -> float:
        """How long a rank is busy sending bytes within its node."""
        return 8 * sent / self.local_bits_per_second


@dataclass(frozen=True)
class Machine:
    """What work takes on a rank, in seconds of its share of the machine.

    Attributes:
        exposed: part of a step's computation beside which no gradients are sent: forward, the first gradients, the optimizer.
        per_byte: of a byte sent, with receiving and adding up another one, on the processor that trains; 0 where other
            processors do that.
        work: of an element's payload, encoded and decoded, by the codec's name: "" for a codec that is not among them.
        factor: of an element of a matrix, multiplied by thin factors.
        line_bits_per_second: that a node's software sends at most.
        window: bytes of a connection that are under way at most: 4 MiB with Linux's default settings.
    """

    exposed: float
    per_byte: float
    work: Mapping[str, float] = field(default_factory=dict)
    factor: float = 0.0
    line_bits_per_second: float = math.inf
    window: float = 4 << 20

    def bits_per_second(self, network: Network, connections: float) -> float:
        """What a node sends over some connections at a time: each carries one window per round trip."""
        carried = math.inf if not network.latency else connections * 8 * self.window / (2 * network.latency)
        return min(network.bits_per_second, self.line_bits_per_second, carried)

    def codec_seconds(self, spec: str) -> float:
        """Seconds of an element that a codec encodes and decodes."""
        name = spec.split(":")[0]
        found = self.work.get(name, self.work.get(""))
        if found is None:
            raise ValueError(f"the machine's profile has no work of {name!r}, and none for other codecs; measure it")
        return found

    def save(self, path: Path) -> None:
        """Writes a profile."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Machine:
        """Reads a profile.

        Raises:
            ValueError: the file is no profile.
        """
        read: Any = json.loads(path.read_text())
        try:
            return cls(**read)
        except TypeError as error:
            raise ValueError(f"{path} is no profile of a machine: {error}") from error


# A GPU of 2017: codecs read and write its memory a few times, and its copy engines send. Half of backward passes before the first
# gradients are worth sending, and sockets of one process carry about 25 Gbit/s.
GPU = Machine(exposed=0.4, per_byte=0.0, work={"": 4e-11}, factor=2e-11, line_bits_per_second=25e9)
