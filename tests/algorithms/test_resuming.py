"""Training that is resumed goes on with the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.rows import ROWS, SAMPLE, Row, every_kind
from tests.algorithms.training import FULL, ODD, Everyone, Given, Wrap, draw, follow, pairs, same, stored
from tests.grids import grid
from tests.oracles.algorithms import Shapes


def check_resume(wrap: Wrap, shapes: Shapes, data: list[Everyone], done: int, names: Sequence[str] = ()) -> None:
    """Whole, and in two parts with a checkpoint between, is the same bits. `names` is the order in which gradients come."""

    def rank(communicator: Communicator) -> None:
        own = [{name: e[communicator.rank][name] for name in names or shapes} for e in data]
        whole = wrap(Given(shapes), communicator=communicator)
        expected = follow(whole, own)
        first = wrap(Given(shapes), communicator=communicator)
        assert same(follow(first, own[:done]), expected[:done])
        state = stored([first.module.state_dict(), first.algorithm_state_dict()])
        first.close()
        second = wrap(Given(shapes), communicator=communicator)
        second.module.load_state_dict(state[0])
        second.load_algorithm_state_dict(state[1])
        assert second.stats().steps == done
        again = follow(second, own[done:])
        for step, (ours, other) in enumerate(zip(again, expected[done:], strict=True)):
            assert same([ours], [other]), f"step {step} after resuming differs"
        for vector, other in pairs(second.algorithm_state_dict(), whole.algorithm_state_dict()):
            assert torch.equal(vector, other)

    run_ranks(len(data[0]), rank)


@grid(shapes={"full": FULL, "odd": ODD}, row=SAMPLE, cover=1)
def test_resuming_goes_on_bit_for_bit(row: Row, shapes: Shapes) -> None:
    check_resume(row.make, shapes, draw(shapes, 2 if shapes is FULL else 3, 6), 3)


@every_kind
def test_resuming_before_the_first_step(row: Row) -> None:
    check_resume(row.make, FULL, draw(FULL, 2, 3), 0)


@pytest.mark.parametrize("name", ["allreduce", "bytegrad", "qsgd", "sign", "topk", "dgc", "powersgd"])
def test_resuming_with_gradients_in_another_order(name: str) -> None:
    """Buckets have been laid out by the order in which gradients come, and are laid out so again."""
    check_resume(ROWS[name].make, FULL, draw(FULL, 3, 7), 3, names=["scale", "first", "bias", "second"])
