"""What a lost rank leaves alone."""

from __future__ import annotations

import socket

import torch

from bagua_kernels.comm.backends.sockets.loop import Loop
from bagua_kernels.comm.backends.sockets.transfer import Lane, Transfers
from tests.comm.backends.sockets.common import operation, part, until, wait


def test_loss_of_a_rank_whose_messages_are_all_here() -> None:
    """It does not concern an operation that waits for another rank alone."""
    pairs = [socket.socketpair() for _ in range(2)]
    loop = Loop("two peers", {peer: [ours] for peer, (ours, _) in enumerate(pairs, 1)}, lambda n: None)
    got = [torch.zeros(10, dtype=torch.uint8) for _ in pairs]

    def steps(lane: Lane) -> Transfers:
        yield [lane.receive(1, got[0])]
        yield [lane.receive(2, got[1])]

    work = operation(0, [steps])
    try:
        loop.submit(work)
        pairs[0][1].sendall(part(0, b"1" * 10))
        pairs[0][1].close()
        until(lambda: 1 in loop._lost)
        pairs[1][1].sendall(part(0, b"2" * 10))
        wait(work)
        assert [bytes(each.tolist()) for each in got] == [b"1" * 10, b"2" * 10]
    finally:
        loop.stop("the test is over")
        pairs[1][1].close()
