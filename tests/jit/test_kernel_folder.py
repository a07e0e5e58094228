"""Folders of compiled kernels: whose files are loaded, how many are kept, and who has a kernel's turn."""

import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bagua_kernels import knobs
from bagua_kernels.jit import kernel_folder
from bagua_kernels.jit.kernel_folder import DamagedEntryError, KernelFolder
from tests import limits

LIMIT = 1_000_000
OTHER_USER = 54_321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="os.geteuid() is not 0, so that files cannot be given away")


@pytest.fixture
def folder(tmp_path: Path) -> KernelFolder:
    return KernelFolder(tmp_path / "kernels", LIMIT)


def path_of(folder: KernelFolder, name: str) -> Path:
    return folder.path / f"{name}.nbc"


def test_what_was_written_is_read(folder: KernelFolder) -> None:
    assert folder.read("a") is None
    folder.write("a", b"code")
    folder.write("b", b"")
    assert (folder.read("a"), folder.read("b"), folder.read("c")) == (b"code", b"", None)
    folder.write("a", b"other code")
    assert folder.read("a") == b"other code"
    assert sorted(os.listdir(folder.path)) == ["a.nbc", "b.nbc"]


@pytest.mark.parametrize("umask", [0o022, 0o000, 0o002, 0o077])
def test_others_cannot_write_what_is_made_here(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        folder = KernelFolder(tmp_path / "x" / "kernels", LIMIT)
        assert folder.writable()
        folder.write("a", b"code")
    finally:
        os.umask(before)
    for path in (folder.path, path_of(folder, "a")):
        assert not path.stat().st_mode & 0o022, path
    assert folder.read("a") == b"code"


@pytest.mark.parametrize("mode", [0o775, 0o777, 0o757, 0o1777])
def test_nothing_is_loaded_from_a_folder_that_others_can_write(folder: KernelFolder, mode: int) -> None:
    folder.write("a", b"code")
    folder.path.chmod(mode)
    assert "can be written by other users" in str(folder.refusal())
    assert folder.read("a") is None
    assert not folder.writable()
    folder.path.chmod(0o755)
    assert folder.read("a") == b"code"


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_entry_that_others_can_write_is_not_loaded(folder: KernelFolder, mode: int) -> None:
    folder.write("a", b"code")
    path_of(folder, "a").chmod(mode)
    with pytest.raises(DamagedEntryError, match="can be written by other users"):
        folder.read("a")


@as_root
def test_entries_and_folders_of_a_third_user_are_not_loaded(folder: KernelFolder) -> None:
    folder.write("a", b"code")
    os.chown(path_of(folder, "a"), OTHER_USER, OTHER_USER)
    with pytest.raises(DamagedEntryError, match=f"belongs to user {OTHER_USER}, expected 0 or root"):
        folder.read("a")
    os.chown(path_of(folder, "a"), 0, 0)
    os.chown(folder.path, OTHER_USER, OTHER_USER)
    assert f"belongs to user {OTHER_USER}" in str(folder.refusal())
    assert folder.read("a") is None
    assert not folder.writable()


def in_a_process_of(user: int, work: Callable[[], None]) -> None:
    """Runs `work` in a forked process of another user."""

    def run() -> None:
        os.setgid(user)
        os.setuid(user)
        work()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.fixture
def shared_path() -> Iterator[Path]:
    """A folder that other users can reach: pytest keeps its own from them."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_turn_ends_with_its_process_though_children_live_on(folder: KernelFolder) -> None:
    assert folder.writable()
    fork, done = multiprocessing.get_context("fork"), multiprocessing.get_context("fork").Event()

    def take_and_die() -> None:
        turn = folder.turn("a", patience=60.0, give_way=lambda: False)
        turn.__enter__()
        # A process whose parent waits for nobody.
        if os.fork() == 0:
            done.wait(limits.seconds(60))
        os._exit(0)

    process = fork.Process(target=take_and_die)
    process.start()
    # `join` would wait for its child, too, which has the other end of the pipe.
    limits.until(lambda: process.exitcode is not None, "the process has ended", 60)
    assert process.exitcode == 0
    lock = folder.path / "a.lock"
    descriptor = kernel_folder._locked(lock, time.monotonic(), lambda: False)
    done.set()
    assert descriptor is not None
    kernel_folder._unlock(lock, descriptor)


def test_another_user_of_this_process_has_folders_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = kernel_folder.folders(str(tmp_path))
    assert kernel_folder.folders(str(tmp_path)) is first
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert kernel_folder.folders(str(tmp_path)) is not first


@as_root
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_entries_of_root_are_loaded_by_others_who_save_their_own_elsewhere(shared_path: Path) -> None:
    root = KernelFolder(shared_path / "bagua_kernels", LIMIT)
    root.write("a", b"code")
    old = path_of(root, "a").stat().st_mtime - 1_000_000
    os.utime(path_of(root, "a"), (old, old))
    home = shared_path / "home"
    home.mkdir()
    os.chown(home, OTHER_USER, OTHER_USER)

    def work() -> None:
        with knobs.override(knobs.XDG_CACHE_HOME, str(home)):
            loading, saving = kernel_folder.folders(str(shared_path))
        assert [folder.path for folder in loading] == [root.path, home / "bagua_kernels"]
        assert saving is loading[1]
        assert loading[0].read("a") == b"code"
        saving.write("b", b"new")
        assert saving.read("b") == b"new"

    in_a_process_of(OTHER_USER, work)
    assert not path_of(root, "b").exists()
    # What that user has made is nothing to root.
    assert KernelFolder(home / "bagua_kernels", LIMIT).read("b") is None


def test_a_given_folder_that_can_be_written_is_the_only_one(tmp_path: Path) -> None:
    with knobs.override(knobs.XDG_CACHE_HOME, str(tmp_path / "home")):
        loading, saving = kernel_folder.folders(str(tmp_path / "given"))
        assert [folder.path for folder in loading] == [tmp_path / "given" / "bagua_kernels"]
        assert saving is loading[0]
    assert not (tmp_path / "home").exists()


def test_without_a_folder_that_can_be_written_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with knobs.override(knobs.XDG_CACHE_HOME, str(tmp_path / "file")):
        loading, saving = kernel_folder.folders(str(tmp_path / "file" / "x"))
    assert saving is None
    assert [folder.read("a") for folder in loading] == [None, None]


def test_user_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernel_folder.sys, "platform", "linux")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert kernel_folder.user_folder() == tmp_path / ".cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert kernel_folder.user_folder() == tmp_path / "caches"
    monkeypatch.setattr(kernel_folder.sys, "platform", "darwin")
    assert kernel_folder.user_folder() == tmp_path / "Library" / "Caches"


def test_symbolic_links_are_not_followed(folder: KernelFolder, tmp_path: Path) -> None:
    folder.write("a", b"code")
    path_of(folder, "b").symlink_to(path_of(folder, "a"))
    with pytest.raises(OSError, match="symbolic links"):
        folder.read("b")


def test_entries_not_used_for_longest_are_removed(tmp_path: Path) -> None:
    folder = KernelFolder(tmp_path, 10_000)
    for number in range(20):
        folder.write(f"{number:02}", b"x" * 968)  # a thousand bytes with the checksum
        os.utime(path_of(folder, f"{number:02}"), (number + 1, number + 1))
        if number >= 1:
            folder.read("00")  # is old, so that its time is renewed
    kept = sorted(path.stem for path in tmp_path.glob("*.nbc"))
    assert "00" in kept
    assert kept[-1] == "19"
    assert kept[1:] == [f"{number:02}" for number in range(21 - len(kept), 20)]
    assert 8_000 <= sum(path.stat().st_size for path in tmp_path.glob("*.nbc")) <= 10_000


def test_a_sweep_counts_what_others_have_written(tmp_path: Path) -> None:
    for number in range(30):
        KernelFolder(tmp_path, 10**9).write(f"{number:02}", b"x" * 968)
    KernelFolder(tmp_path, 10_000).write("new", b"x" * 968)
    assert sum(path.stat().st_size for path in tmp_path.glob("*.nbc")) <= 10_000
    assert path_of(KernelFolder(tmp_path, 0), "new").exists()


def test_rests_of_killed_writers_are_removed_but_no_other_files(tmp_path: Path) -> None:
    old, young, other = tmp_path / "a.0123.tmp", tmp_path / "b.0123.tmp", tmp_path / "notes.txt"
    for path in (old, young, other):
        path.write_bytes(b"x" * 5_000)
    for path in (old, other):
        os.utime(path, (1, 1))
    KernelFolder(tmp_path, 100).write("a", b"code")
    assert not old.exists()
    assert young.exists()
    assert other.exists()


def test_failed_write_leaves_nothing(folder: KernelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write("a", b"code")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kernel_folder.os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        folder.write("a", b"other")
    assert os.listdir(folder.path) == ["a.nbc"]
    assert folder.read("a") == b"code"


def test_folder_that_is_removed_is_made_again(folder: KernelFolder) -> None:
    folder.write("a", b"code")
    path_of(folder, "a").unlink()
    folder.path.rmdir()
    folder.write("a", b"code")
    assert folder.read("a") == b"code"


def never() -> bool:
    return False


def test_one_thread_at_a_time_has_a_turn(folder: KernelFolder) -> None:
    assert folder.writable()
    inside, most, order = [0], [0], threading.Lock()

    def work() -> None:
        for _ in range(20):
            with folder.turn("a", patience=60.0, give_way=never):
                with order:
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                with order:
                    inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert os.listdir(folder.path) == []


def count_alone(path: str, times: int) -> None:
    """Counts in a file, which two processes at once would get wrong."""
    folder, counter = KernelFolder(Path(path), LIMIT), Path(path) / "counter"
    for _ in range(times):
        with folder.turn("a", patience=60.0, give_way=never):
            counter.write_text(str(int(counter.read_text()) + 1))


def test_one_process_at_a_time_has_a_turn(folder: KernelFolder) -> None:
    assert folder.writable()
    (folder.path / "counter").write_text("0")
    context = multiprocessing.get_context("fork")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_folder, "_LOOK_EVERY", 0.001)
        processes = [context.Process(target=count_alone, args=(str(folder.path), 50)) for _ in range(3)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (folder.path / "counter").read_text() == "150"
    assert os.listdir(folder.path) == ["counter"]


def test_who_is_compiling_gives_way_to_its_own_process(folder: KernelFolder) -> None:
    """The thread that has the turn may wait for the compiler's lock, which the other one holds."""
    assert folder.writable()
    with (
        folder.turn("a", patience=60.0, give_way=never),
        folder.turn("a", patience=60.0, give_way=lambda: True),
        folder.turn("b", patience=60.0, give_way=never),
    ):
        assert sorted(os.listdir(folder.path)) == ["a.lock", "b.lock"]
    assert os.listdir(folder.path) == []


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_process_waits_for_the_turn_of_its_parent(folder: KernelFolder) -> None:
    assert folder.writable()
    looks = multiprocessing.get_context("fork").Value("i", 0)

    def give_way() -> bool:
        looks.value += 1
        return False

    def child() -> None:
        time.sleep = lambda _: give_way()  # it looks again without a pause
        with folder.turn("a", patience=600.0, give_way=give_way):
            assert sorted(os.listdir(folder.path)) == ["a.lock"]

    process = multiprocessing.get_context("fork").Process(target=child)
    with folder.turn("a", patience=60.0, give_way=never):
        process.start()
        while not looks.value and process.is_alive():
            process.join(0.001)
    process.join()
    assert process.exitcode == 0


def test_patience_ends(folder: KernelFolder) -> None:
    assert folder.writable()
    with (
        folder.turn("a", patience=60.0, give_way=never),
        folder.turn("a", patience=0.0, give_way=never),
    ):
        assert os.listdir(folder.path) == ["a.lock"]


def test_folder_without_locks_lets_all_go_on(tmp_path: Path) -> None:
    folder = KernelFolder(tmp_path / "missing", LIMIT)
    with folder.turn("a", patience=60.0, give_way=never):
        assert not folder.path.exists()
