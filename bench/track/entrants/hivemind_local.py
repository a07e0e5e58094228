"""hivemind's Optimizer with local updates: peers average parameters beside training, in 16 bits."""

from __future__ import annotations

import torch

from bench.track.loop import Loop

TITLE, PACKAGE = "hivemind", "hivemind"
EPOCH = 60  # steps of each rank from one average to the next, when all are as fast


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loop: Loop) -> None:
    """See `bench.track.measure`."""
    import hivemind

    peers: list[str] = []
    # In turn: of daemons that dial the first one at the same time, some give up.
    for rank in range(loop.size):
        if rank == loop.rank:
            listens = [f"/ip4/{loop.address(loop.rank)}/tcp/0"]
            dht = hivemind.DHT(initial_peers=peers, host_maddrs=listens, start=True, startup_timeout=60)
            loop.share(f"peers.{rank}", [str(address) for address in dht.get_visible_maddrs()])
        peers += loop.shared(f"peers.{rank}")
    halves = hivemind.compression.Float16Compression()
    wrapped = hivemind.Optimizer(
        dht=dht,
        run_id="track",
        batch_size_per_step=loop.batch,
        target_batch_size=EPOCH * loop.batch * loop.size,
        optimizer=optimizer,
        use_local_updates=True,
        matchmaking_time=3.0,
        averaging_timeout=30.0,
        state_averaging_compression=halves,
    )
    for x, y in loop.batches(optimizer, pace="own"):
        wrapped.zero_grad()
        loop.loss(model, x, y).backward()
        wrapped.step()
