"""What every communicator has to do, one function a subject, against NumPy; any rank of any backend can run them."""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Callable

import pytest
import torch

from bagua_kernels import comm
from bagua_kernels.comm import Communicator, ReduceOp
from bagua_kernels.errors import CommunicationError
from tests import limits
from tests.comm.values import (
    FLOATS,
    INTEGERS,
    MOVED,
    SIZES,
    bits,
    check,
    operations,
    oracle,
    same,
    values,
)


def case_reductions(c: Communicator) -> None:
    """all_reduce, reduce and reduce_scatter: every dtype and operation, against NumPy."""
    for dtype in (*FLOATS, *INTEGERS, torch.bool):
        for op in operations(dtype):
            for n in SIZES[:3]:
                parts = [values(r, n, dtype) for r in range(c.size)]
                expected = oracle(parts, op)
                x = parts[c.rank].clone()
                c.all_reduce(x, op).wait()
                check(x, expected)
                assert len(set(c.all_gather_object(bits(x)))) == 1
                dst = n % c.size
                y = parts[c.rank].clone()
                c.reduce(y, dst, op).wait()
                check(y, expected) if c.rank == dst else check(y, parts[c.rank].double().numpy())
                parts = [values(r, n * c.size, dtype) for r in range(c.size)]
                z = torch.empty(n, dtype=dtype)
                mine = parts[c.rank].clone()
                c.reduce_scatter(z, mine, op).wait()
                check(z, oracle(parts, op)[c.rank * n : (c.rank + 1) * n])
                assert same(mine, parts[c.rank])


def case_large_all_reduce(c: Communicator) -> None:
    """A buffer of several segments."""
    parts = [values(r, SIZES[-1], torch.float32) for r in range(c.size)]
    x = parts[c.rank].clone()
    c.all_reduce(x).wait()
    check(x, oracle(parts, ReduceOp.SUM))


def case_millions(c: Communicator) -> None:
    """Sizes that are cut into pieces, and that no number of ranks divides."""
    n = 1_500_007
    parts = [values(r, n, torch.float32) for r in range(c.size)]
    x = parts[c.rank].clone()
    c.all_reduce(x, ReduceOp.AVG).wait()
    check(x, oracle(parts, ReduceOp.AVG))
    y = parts[c.rank].clone()
    c.broadcast(y, c.size - 1).wait()
    assert same(y, parts[-1])
    n //= c.size
    z = torch.empty(n)
    c.reduce_scatter(z, parts[c.rank][: n * c.size], ReduceOp.MAX).wait()
    check(z, oracle([part[c.rank * n : (c.rank + 1) * n] for part in parts], ReduceOp.MAX))
    everything = torch.empty(n * c.size)
    c.all_gather(everything, parts[c.rank][:n]).wait()
    assert same(everything, torch.cat([part[:n] for part in parts]))
    c.all_to_all(everything, parts[c.rank][: n * c.size]).wait()
    assert same(everything, torch.cat([part[c.rank * n : (c.rank + 1) * n] for part in parts]))


def case_average_of_halves_does_not_overflow(c: Communicator) -> None:
    """float16 divides before it sums."""
    x = torch.full((5,), 60000.0, dtype=torch.float16)
    c.all_reduce(x, ReduceOp.AVG).wait()
    assert torch.isfinite(x).all()
    torch.testing.assert_close(x, torch.full((5,), 60000.0, dtype=torch.float16), rtol=2e-3, atol=0)


def case_movement(c: Communicator) -> None:
    """broadcast, all_gather, all_to_all, gather and scatter move bits of every dtype."""
    for dtype in MOVED:
        for n in SIZES if dtype is torch.float32 else SIZES[:3]:
            root = n % c.size
            parts = [values(r, n, dtype) for r in range(c.size)]
            wide = [values(r, n * c.size, dtype, salt=1) for r in range(c.size)]
            x = parts[c.rank].clone()
            c.broadcast(x, root).wait()
            assert same(x, parts[root])
            everything = torch.empty(c.size, n, dtype=dtype)
            c.all_gather(everything, parts[c.rank]).wait()
            assert same(everything, torch.cat(parts))
            dealt = torch.empty(n * c.size, dtype=dtype)
            c.all_to_all(dealt, wide[c.rank]).wait()
            assert same(dealt, torch.cat([w[c.rank * n : (c.rank + 1) * n] for w in wide]))
            gathered = torch.empty(c.size * n, dtype=dtype) if c.rank == root else None
            c.gather(parts[c.rank], gathered, root).wait()
            assert gathered is None or same(gathered, torch.cat(parts))
            part = torch.empty(n, dtype=dtype)
            c.scatter(part, wide[root] if c.rank == root else None, root).wait()
            assert same(part, wide[root][c.rank * n : (c.rank + 1) * n])


def case_all_to_all_v(c: Communicator) -> None:
    """Uneven parts, some of them empty, and a rank that sends nothing at all."""
    for pattern in (lambda a, b: a + 2 * b, lambda a, b: (a * b) % 3, lambda a, b: 0 if a == 0 else 3 * b):
        table = [[pattern(a, b) for b in range(c.size)] for a in range(c.size)]
        inputs = [values(r, sum(table[r]), torch.float16) for r in range(c.size)]
        received = [row[c.rank] for row in table]
        output = torch.empty(sum(received), dtype=torch.float16)
        c.all_to_all_v(output, inputs[c.rank], received, table[c.rank]).wait()
        pieces = [inputs[r].split(table[r])[c.rank] for r in range(c.size)]
        assert same(output, torch.cat(pieces))


def case_point_to_point(c: Communicator) -> None:
    """A ring, and two tags received in the other order."""
    if c.size == 1:
        return
    right, left = (c.rank + 1) % c.size, (c.rank - 1) % c.size
    for n in (0, 1, 1000):
        mine, got = values(c.rank, n, torch.bfloat16), torch.empty(n, dtype=torch.bfloat16)
        works = [c.send(mine, right, tag=3), c.recv(got, left, tag=3)]
        for work in works:
            work.wait()
        assert same(got, values(left, n, torch.bfloat16))
    sends = [c.send(torch.full((4,), tag), right, tag=tag) for tag in (1, 2)]
    for tag in (2, 1):
        got = torch.empty(4, dtype=torch.int64)
        c.recv(got, left, tag=tag).wait()
        assert got.tolist() == [tag] * 4
    for work in sends:
        work.wait()


def case_neighbour_exchange(c: Communicator) -> None:
    """A ring both ways, a star that leaves ranks out, and two exchanges under way with tags of their own."""
    if c.size == 1:
        return
    for n in (0, 1, 1001):
        neighbours = {(c.rank + 1) % c.size, (c.rank - 1) % c.size}
        got = {peer: torch.empty(n) for peer in neighbours}
        c.neighbour_exchange(got, {peer: values(c.rank, n, torch.float32, peer) for peer in neighbours}).wait()
        assert all(same(got[peer], values(peer, n, torch.float32, c.rank)) for peer in neighbours)
    mine, others = values(c.rank, 33, torch.bfloat16), list(range(1, c.size))
    if c.rank == 0:
        star = {peer: torch.empty(33, dtype=torch.bfloat16) for peer in others}
        c.neighbour_exchange(star, {}).wait()
        assert all(same(star[peer], values(peer, 33, torch.bfloat16)) for peer in others)
    else:
        c.neighbour_exchange({}, {0: mine}).wait()
    right, left = (c.rank + 1) % c.size, (c.rank - 1) % c.size
    outputs = [torch.empty(5) for _ in range(2)]
    works = [
        c.neighbour_exchange({left: outputs[i]}, {right: values(c.rank, 5, torch.float32, i)}, tag=i) for i in range(2)
    ]
    for work in reversed(works):
        work.wait()
    assert all(same(outputs[i], values(left, 5, torch.float32, i)) for i in range(2))


def case_many_at_once(c: Communicator) -> None:
    """Several operations under way, waited for in reverse order, and each more than once."""
    tensors = [torch.full((100,), float(i)) for i in range(8)]
    works = [c.all_reduce(t, ReduceOp.AVG) for t in tensors]
    for work in reversed(works):
        work.wait()
        work.wait()
        assert work.is_completed()
    for i, t in enumerate(tensors):
        torch.testing.assert_close(t, torch.full((100,), float(i)))


def case_many_threads_wait_for_one_work(c: Communicator) -> None:
    """What follows an operation, such as the division of AVG, happens once; every thread sees the result."""
    everyone, size = 6, 64 * c.size
    for kind in ("all_reduce", "reduce_scatter", "all_gather", "neighbour_exchange"):
        x, wide, y = torch.full((size,), 8.0), torch.empty(c.size * size), torch.empty(64)
        right, left = (c.rank + 1) % c.size, (c.rank - 1) % c.size
        if kind == "all_reduce":
            work, output, expected = c.all_reduce(x, ReduceOp.AVG), x, 8.0
        elif kind == "reduce_scatter":
            work, output, expected = c.reduce_scatter(y, x, ReduceOp.AVG), y, 8.0
        elif kind == "all_gather":
            work, output, expected = c.all_gather(wide, x), wide, 8.0
        elif c.size > 1:
            work, output, expected = c.neighbour_exchange({left: y}, {right: x[:64]}), y, 8.0
        together, seen = threading.Barrier(everyone, timeout=limits.seconds(30)), []

        def wait() -> None:
            try:
                together.wait()  # noqa: B023
                work.wait()  # noqa: B023
                seen.append(output.tolist())  # noqa: B023
            except BaseException as error:
                seen.append(error)  # noqa: B023

        threads = [threading.Thread(target=wait) for _ in range(everyone)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(limits.seconds(30))
        assert seen == [[expected] * output.numel()] * everyone, (kind, seen)


def case_shapes_and_autograd(c: Communicator) -> None:
    """Tensors of any shape, and parameters."""
    p = torch.nn.Parameter(torch.full((3, 1, 2), float(c.rank)))
    c.broadcast(p, c.size - 1).wait()
    assert p.requires_grad
    assert (p == c.size - 1).all()
    scalar = torch.tensor(1.0)
    c.all_reduce(scalar).wait()
    assert scalar.item() == c.size


def case_objects(c: Communicator) -> None:
    """Pickled objects of different lengths."""
    last = c.size - 1
    obj = {"rank": c.rank, "text": "x" * (100 * c.rank)}
    everything = [{"rank": r, "text": "x" * (100 * r)} for r in range(c.size)]
    assert c.broadcast_object(obj, last) == everything[last]
    assert c.all_gather_object(obj) == everything
    assert c.gather_object(obj, last) == (everything if c.rank == last else None)
    assert c.scatter_object(everything if c.rank == 0 else None) == obj


def case_split(c: Communicator) -> None:
    """Halves, rows that exist at once, splits of splits with unequal histories, and closed ones made anew."""
    even = list(range(0, c.size, 2))
    odd = list(range(1, c.size, 2))
    part = c.split(even if c.rank % 2 == 0 else odd)
    assert part is not None
    x = torch.tensor([c.rank])
    part.all_reduce(x).wait()
    assert x.item() == sum(even if c.rank % 2 == 0 else odd)
    if c.rank % 2 == 0:
        # Rank 0 has now been in more groups than the others; later splits must still find their members.
        inner = part.split([0])
        assert (inner is not None) == (part.rank == 0)
    none = c.split([0])
    assert (none is None) == (c.rank != 0)
    for _ in range(2):
        with c.duplicate() as again:
            assert (again.rank, again.size) == (c.rank, c.size)
            y = torch.ones(3)
            again.all_reduce(y).wait()
            assert y.tolist() == [c.size] * 3
        with pytest.raises(CommunicationError, match="closed"):
            again.all_reduce(y)
    part.close()


def case_bytes_sent(c: Communicator) -> None:
    """What all ranks together send is what the algorithms need."""
    x, n = torch.zeros(c.size * 6000), c.size
    wide = torch.zeros(c.size, x.numel())

    def sent(call: Callable[[], comm.Work]) -> int:
        before = c.bytes_sent
        call().wait()
        after = c.bytes_sent
        return sum(c.all_gather_object(after - before))

    b = x.nbytes
    assert sent(lambda: c.all_reduce(x)) == 2 * (n - 1) * b
    assert sent(lambda: c.broadcast(x)) == (n - 1) * b
    assert sent(lambda: c.all_gather(wide, x)) == n * (n - 1) * b
    assert sent(lambda: c.all_to_all(torch.empty_like(x), x)) == (n - 1) * b
    assert sent(lambda: c.reduce_scatter(torch.empty(6000), x)) == (n - 1) * b
    assert sent(lambda: c.barrier()) == 0


def case_argument_errors(c: Communicator) -> None:
    """Errors say what was got and expected, and leave the communicator usable."""
    x = torch.zeros(4 * c.size)
    wrong: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (TypeError, "torch.Tensor, got list", lambda: c.all_reduce([1.0])),  # type: ignore[arg-type]
        (TypeError, "ReduceOp", lambda: c.all_reduce(x, "sum")),  # type: ignore[arg-type]
        (TypeError, "floating-point", lambda: c.all_reduce(x.long(), ReduceOp.AVG)),
        (TypeError, "integer or bool", lambda: c.all_reduce(x, ReduceOp.BXOR)),
        (TypeError, "complex64", lambda: c.all_reduce(x.to(torch.complex64))),
        (TypeError, "one dtype", lambda: c.all_gather(torch.zeros(c.size * 4 * c.size), x.double())),
        (ValueError, "contiguous", lambda: c.all_reduce(torch.zeros(4, 2).t())),
        (ValueError, "dense", lambda: c.all_reduce(torch.zeros(4).to_sparse())),
        (ValueError, "on cpu", lambda: c.all_reduce(torch.zeros(4, device="meta"))),
        (ValueError, "numel", lambda: c.all_gather(torch.zeros(1), x)),
        (ValueError, "numel", lambda: c.reduce_scatter(torch.zeros(1), x)),
        (ValueError, "numel", lambda: c.all_to_all(torch.zeros(1), x)),
        (ValueError, "output_splits", lambda: c.all_to_all_v(x, x, [0] * c.size, [4] * c.size)),
        (ValueError, "input_splits", lambda: c.all_to_all_v(x, x, [4] * c.size, [4] * (c.size + 1))),
        (ValueError, "src", lambda: c.broadcast(x, c.size)),
        (ValueError, "dst", lambda: c.reduce(x, -1)),
        (TypeError, "int", lambda: c.broadcast(x, 0.0)),  # type: ignore[arg-type]
        (ValueError, "another rank", lambda: c.send(x, c.rank)),
        (ValueError, "ranks", lambda: c.split([0, c.size])),
        (ValueError, "once", lambda: c.split([0, 0])),
        (ValueError, "output", lambda: c.gather(x, None, c.rank)),
        (ValueError, "input", lambda: c.scatter(x, None, c.rank)),
    ]
    for kind, text, call in wrong:
        with pytest.raises(kind, match=text):
            call()
    if c.size > 1:
        with pytest.raises(ValueError, match="divides"):
            c.all_to_all(torch.zeros(c.size + 1), torch.zeros(c.size + 1))
    c.barrier().wait()


CASES = [value for name, value in list(globals().items()) if name.startswith("case_")]


def battery() -> None:
    """Runs all cases in this process's rank, and prints those that failed."""
    communicator = comm.init(timeout=limits.seconds(30))
    failures = {}
    for case in CASES:
        try:
            case(communicator)
        except BaseException:
            failures[case.__name__] = traceback.format_exc()
            break  # the ranks no longer agree on what comes next
    print("FAILURES", json.dumps(failures), flush=True)
