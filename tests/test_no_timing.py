"""No test asserts on elapsed time, which depends on what else a machine does.

A test waits for an event (`limits.until`, `event.wait(limits.seconds(10))`), counts attempts, compares the order of events, or
moves a clock of its own (`tests/clocks.py`, `Schedule`). Where a thing must end, the limit that ends a hang is the assertion.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from tests.clock_reads import assertions
from tests.grids import folded

ROOT = Path(__file__).parents[1]
ADVICE = (
    "this assertion depends on a clock: wait for an event with tests.limits.until, count attempts, or patch the module's "
    "clock with tests.clocks.VirtualClock; see tests/test_no_timing.py"
)
FILES = sorted({*ROOT.glob("tests/**/*.py"), *ROOT.glob("bench/**/*.py")})


def test_no_assertion_depends_on_a_clock() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {ADVICE}"
        for path in FILES
        for line in assertions(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


def test_all_files_are_looked_at() -> None:
    names = {str(path.relative_to(ROOT)) for path in FILES}
    assert {"tests/comm/trouble.py", "bench/gpu/tests_of.py", "bench/conftest.py", "bench/bench_codecs.py"} <= names


TIMED = {
    "difference": """
        def test():
            began = time.monotonic()
            work()
            assert time.monotonic() - began < 10  # here
        """,
    "named difference": """
        def test():
            began = time.perf_counter()
            took = time.perf_counter() - began
            assert 0.1 < took, "fast"  # here
        """,
    "other names": """
        from time import process_time as used
        import time as clock
        def test():
            assert used() < 5  # here
            assert clock.thread_time_ns() < 5  # here
        """,
    "list": """
        def test():
            taken, longest = [], 0.0
            for _ in range(3):
                began = time.time()
                taken.append(time.time() - began)
                longest = max(longest, time.time() - began)
            assert max(taken) < 1  # here
            assert longest < 1  # here
            assert all(0 < each < 1 for each in taken)  # here
            assert sorted(taken)[1] == pytest.approx(0.5)  # here
        """,
    "approx": """
        def test():
            began = time.time()
            assert 2.0 == pytest.approx(time.time() - began, abs=1)  # here
        """,
    "helper": """
        def seconds(run):
            began = time.monotonic()
            run()
            return time.monotonic() - began
        def twice(run):
            return 2 * seconds(run)
        def test():
            assert twice(print) < 3  # here
        """,
    "rank": """
        def test():
            def rank(c):
                began = time.monotonic()
                c.barrier().wait()
                return time.monotonic() - began if c.rank else 0.0
            assert max(run_ranks(2, rank)) < 10  # here
        """,
    "lambda": """
        def test():
            now = lambda: time.monotonic()
            assert now() > 0  # here
        """,
    "yield": """
        def moments():
            yield time.time()
        def test():
            for moment in moments():
                assert moment < 5  # here
        """,
    "key": """
        def rank():
            print(json.dumps({"at": time.time(), "kind": "lost"}))
        def test():
            told = json.loads(output())
            assert told["kind"] == "lost"
            assert told["at"] < 5  # here
        """,
    "tag": """
        def rank():
            print("ENDED", time.monotonic(), flush=True)
        def test():
            assert float(output().split("ENDED", 1)[1]) < 5  # here
        """,
    "keyword": """
        def rank():
            report(closed=time.time(), left=[])
        def test():
            assert json.loads(output())["left"] == []
            assert json.loads(output())["closed"] < 5  # here
        """,
    "attribute": """
        class Timer:
            def __enter__(self):
                self.began = time.monotonic()
            def __exit__(self, *error):
                self.seconds = time.monotonic() - self.began
        def test():
            with Timer() as timer:
                work()
            assert timer.seconds < 1  # here
        """,
    "tuple": """
        def test():
            began, count = time.monotonic(), 0
            assert count == 0
            assert began  # here
        """,
    "choice": """
        def run():
            wrong = []
            began = time.time()
            if time.time() - began > 5:
                wrong.append("late")
            return wrong
        def test():
            assert run() == []  # here
        """,
    "fail": """
        def test():
            began = time.time()
            if time.time() - began > 5:  # here
                pytest.fail("slow")
        """,
    "raise": """
        def test():
            began = time.time()
            while True:
                if time.time() - began > 5:  # here
                    raise AssertionError("slow")
        """,
    "assertion function": """
        def test():
            torch.testing.assert_close(time.time() - time.time(), 0.0)  # here
        """,
    "walrus": """
        def test():
            if (took := time.time() - 3) and work():
                assert took < 1  # here
        """,
    "assertion in a deadline loop": """
        def test():
            deadline = time.monotonic() + 10
            while not done():
                assert time.monotonic() < deadline  # here
        """,
    "program": '''
        PROGRAM = """
        import time
        began = time.time()
        assert time.time() - began < 1
        """  # here
        ''',
}  # fmt: skip

UNTIMED = {
    "deadline loop": """
        def test():
            deadline = time.monotonic() + 10
            while not done() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert done()
        """,
    "limit that raises": """
        def wait(seconds):
            deadline = time.monotonic() + seconds
            while not done():
                if time.monotonic() > deadline:
                    raise TimeoutError("it hangs")
        def test():
            wait(10)
            assert done()
        """,
    "deadline of a thing": """
        def test():
            with BoundedStore(store, time.monotonic() + 10) as bounded:
                assert bounded.get("key") == "value"
        """,
    "printed progress": """
        def main():
            began = time.monotonic()
            failed = run()
            print(f"{time.monotonic() - began:.0f} s")
            assert not failed
        """,
    "virtual clock": """
        def test(monkeypatch):
            clock = VirtualClock()
            monkeypatch.setattr(module, "time", clock)
            module.run()
            assert clock.now == 2.0
            assert clock.monotonic() == 2.0
        """,
    "another function's variable": """
        def one():
            now = time.time()
            return None
        def test():
            now = 5
            assert now == 5
        """,
    "another function's inner function": """
        def one():
            def rank(c):
                return time.time()
            run_ranks(2, rank)
        def test():
            def rank(c):
                return 5
            assert run_ranks(2, rank) == [5, 5]
        """,
    "sleep": """
        def test():
            time.sleep(0.1)
            assert done()
        """,
    "another module's time": """
        def test():
            assert datetime.time() < noon
            assert driver.time() == 3
        """,
    "text that is no program": '''
        def test():
            text = """
            it takes time, and assert
            """
            assert text
        ''',
}  # fmt: skip


@folded(name=list(TIMED))
def test_timed_assertions_are_found(name: str) -> None:
    source = "import time\n" + textwrap.dedent(TIMED[name])
    marked = [number for number, line in enumerate(source.splitlines(), 1) if line.rstrip().endswith("# here")]
    if name == "program":
        # The line within the text. Programs are written without an indentation.
        marked = [number - 1 for number in marked]
    assert marked
    assert assertions(source) == marked


@folded(name=list(UNTIMED))
def test_other_uses_of_clocks_are_fine(name: str) -> None:
    assert assertions("import time\n" + textwrap.dedent(UNTIMED[name])) == []
