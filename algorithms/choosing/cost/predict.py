"""Seconds of a step: what the processor and the link have to do, and how much of both happens at the same time."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from bagua_kernels.algorithms.choosing.cost.facts import Job, Machine, Network
from bagua_kernels.algorithms.choosing.cost.methods import Method


@dataclass(frozen=True)
class Prediction:
    """A step of a method.

    Attributes:
        method: which.
        seconds: of a step.
        sent: bytes that a node sends, per step.
        work: seconds of encoding, decoding, sending and receiving on the processor that trains, per step.
        wire: seconds that the link is busy, per step.
    """

    method: Method
    seconds: float
    sent: float
    work: float
    wire: float


def predict(method: Method, job: Job, machine: Machine, network: Network) -> Prediction:
    """Predicts the time of a step.

    1. `work` is that of an exchange: `per_byte` of each byte, the codec's of each element, factors' of each matrix.
    2. `wire` is 8 bytes / bandwidth + latency x messages x buckets, and what ranks of a node send each other before and
       after.
    3. A step takes the longest of three times. One is computation and work together. One is what the link needs, and the
       part of computation beside which it is idle. One is computation, and then the last bucket: its codec, and its bytes.
    """
    nodes = network.nodes
    if network.ranks == 1:
        return Prediction(method, job.seconds, 0.0, 0.0, 0.0)
    sent = method.sent(job, nodes) if nodes > 1 else 0.0
    work = sending = machine.per_byte * sent
    if method.codec:
        work += machine.codec_seconds(method.codec) * job.elements
    if method.low_rank:
        work += machine.factor * job.inside
    messages = method.messages(job, network) * (job.buckets if method.buckets else 1) if nodes > 1 else 0.0
    bits = machine.bits_per_second(network, method.connections(nodes)) if nodes > 1 else network.bits_per_second
    wire = dataclasses.replace(network, bits_per_second=bits).seconds(sent, messages)
    # A reduce-scatter before, and an all-gather after.
    local = 2 * (network.per_node - 1) / network.per_node * 4.0 * job.elements
    wire += network.local_seconds(local)
    alone, busy = job.seconds, job.seconds + work
    if method.when == "backward":
        # Nothing is left to compute beside the last bucket: it is encoded, and then sent.
        last = (work - sending + max(sending, wire)) / job.buckets
        seconds = max(busy, machine.exposed * alone + wire, alone + last)
    elif method.when == "beside":
        seconds = max(busy, machine.exposed / 3 * alone + wire)
    elif method.when == "after":
        seconds = busy + wire
    elif method.when == "rounds":
        seconds = alone + (work + max(0.0, wire - method.delay * alone)) / method.interval
    else:
        # Averages follow each other without a pause, and share the processor with training.
        part = work / max(wire, work + alone)
        seconds = alone * (1 + part)
        return Prediction(method, seconds, sent * seconds / max(wire, seconds), part * alone, seconds)
    return Prediction(method, seconds, sent / method.interval, work / method.interval, wire / method.interval)
