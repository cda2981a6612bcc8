"""One builder: among threads of one process, among processes, after a kill, across hosts."""

import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_hbp import claim
from megatron_hbp.claim import Claim, Holder, built_once

SPAWN = multiprocessing.get_context("spawn")


def _find(target):
    return target.read_text() if target.exists() else None


def _time_out(words):
    return ValueError(f"timed out: {words}")


def _get(target, build, timeout_seconds=60.0, **options):
    return built_once(
        target,
        lambda: _find(target),
        build,
        timeout_seconds=timeout_seconds,
        time_out=_time_out,
        **options,
    )


def test_what_is_there_is_not_built(tmp_path):
    target = tmp_path / "thing"
    target.write_text("here")
    assert _get(target, lambda: pytest.fail("built")) == "here"
    assert [path.name for path in tmp_path.iterdir()] == ["thing"]


def test_built_once_and_the_claim_is_gone(tmp_path):
    target = tmp_path / "cache" / "thing"
    held = []

    def build():
        held.append(Claim(target).holder())
        target.write_text("new")

    assert _get(target, build) == "new"
    assert held[0] is not None
    assert held[0].pid == os.getpid()
    assert str(held[0]) == f"process {os.getpid()} on {held[0].host}"
    assert [path.name for path in target.parent.iterdir()] == ["thing"]
    assert Claim(target).holder() is None


def test_what_appears_between_two_looks_is_not_built_again(tmp_path):
    looks = iter([None, "new"])
    found = built_once(
        tmp_path / "thing",
        lambda: next(looks),
        lambda: pytest.fail("built"),
        timeout_seconds=1.0,
        time_out=_time_out,
    )
    assert found == "new"
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_builder_frees_the_claim(tmp_path):
    target = tmp_path / "thing"

    def fails():
        raise ValueError("too long")

    for _ in range(2):
        with pytest.raises(ValueError, match="too long"):
            _get(target, fails)
        assert list(tmp_path.iterdir()) == []
    assert _get(target, lambda: target.write_text("new") and None) == "new"


def test_a_builder_that_builds_nothing_is_found(tmp_path):
    with pytest.raises(RuntimeError, match="was built and is not there"):
        _get(tmp_path / "thing", lambda: None)


def test_a_held_claim_is_not_taken_and_released_ones_leave_nothing(tmp_path):
    first, second = Claim(tmp_path / "thing"), Claim(tmp_path / "thing")
    assert first.take()
    assert not second.take()
    first.release()
    first.release()  # once more does no harm
    assert list(tmp_path.iterdir()) == []
    assert second.take()
    assert not first.take()
    second.release()


def test_a_claim_on_a_removed_file_is_none(tmp_path, monkeypatch):
    """Between the opening of the file and its lock the holder may have removed it."""
    target = tmp_path / "thing"
    first, second = Claim(target), Claim(target)
    assert first.take()
    lock = claim._lock

    def locked_too_late(descriptor):
        first.release()
        return lock(descriptor)

    monkeypatch.setattr(claim, "_lock", locked_too_late)
    assert not second.take()
    monkeypatch.undo()
    assert second.take()
    second.release()


def test_time_out_names_who_was_waited_for(tmp_path):
    holder = Claim(tmp_path / "thing")
    assert holder.take()
    with pytest.raises(ValueError, match=rf"timed out: waited \d s for process {os.getpid()} on "):
        _get(tmp_path / "thing", lambda: pytest.fail("built"), timeout_seconds=0.3)
    holder.release()


def test_reports_while_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr(claim, "_REPORT_SECONDS", 0.0)
    holder, said = Claim(tmp_path / "thing"), []
    assert holder.take()
    with pytest.raises(ValueError, match="timed out"):
        _get(tmp_path / "thing", lambda: None, timeout_seconds=0.3, report=said.append)
    holder.release()
    assert said
    assert all(f"process {os.getpid()} on " in words for words in said)


def test_threads_build_once(tmp_path):
    target, builds, found = tmp_path / "thing", [], []

    def build():
        builds.append(1)
        time.sleep(0.2)
        target.write_text("new")

    threads = [threading.Thread(target=lambda: found.append(_get(target, build))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (builds, found) == ([1], ["new"] * 8)


def _build_with_trace(target: Path, folder: Path) -> None:
    def build():
        (folder / f"build-{os.getpid()}").touch()
        time.sleep(0.3)
        target.write_text("new")

    assert _get(target, build) == "new"


def test_br_k02_eight_processes_on_one_folder_build_once(tmp_path):
    traces = tmp_path / "traces"
    traces.mkdir()
    target = tmp_path / "cache" / "thing"
    workers = [SPAWN.Process(target=_build_with_trace, args=(target, traces)) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 8
    assert len(list(traces.iterdir())) == 1
    assert [path.name for path in target.parent.iterdir()] == ["thing"]


def _hang(target: Path) -> None:
    _get(target, lambda: time.sleep(600))


def test_kill_9_of_the_builder_lets_another_take_over_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(claim, "_STALE_SECONDS", 1e9)  # its sign of life is not what tells
    target = tmp_path / "thing"
    victim = SPAWN.Process(target=_hang, args=(target,), daemon=True)
    victim.start()
    waiting = Claim(target)
    while waiting.holder() is None:
        time.sleep(0.05)
    assert not waiting.take()
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    assert waiting.file.exists()  # the dead leave their file
    assert _get(target, lambda: target.write_text("new") and None) == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["thing"]


def _hang_with_a_child(target: Path, note: Path) -> None:
    claimed = Claim(target)
    assert claimed.take()
    child = os.fork()
    if child == 0:
        claimed.release()  # of its parent's claim: does nothing
        note.with_suffix(".tmp").write_text(str(os.getpid()))
        note.with_suffix(".tmp").rename(note)
    time.sleep(600)


def test_a_forked_child_has_no_part_in_the_claim(tmp_path):
    target, note = tmp_path / "thing", tmp_path / "child"
    victim = SPAWN.Process(target=_hang_with_a_child, args=(target, note), daemon=True)
    victim.start()
    deadline = time.monotonic() + 60
    while not note.exists():  # the child did its worst
        assert time.monotonic() < deadline
        time.sleep(0.05)
    waiting = Claim(target)
    assert waiting.file.exists()
    assert not waiting.take()
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    try:
        assert waiting.take()  # although the child lives
    finally:
        os.kill(int(note.read_text()), signal.SIGKILL)
    waiting.release()


def _as_other_host(target: Path, beat: int) -> None:
    """Writes the claim file as another machine would, with no lock that reaches here."""
    words = vars(Holder("node7", 42, "another kernel", beat))
    Claim(target).file.write_text(json.dumps(words))


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """The watcher's clock, moved by hand: clock.now in seconds."""
    fake = SimpleNamespace(now=1000.0, sleep=time.sleep)
    fake.monotonic = lambda: fake.now
    monkeypatch.setattr(claim, "time", fake)
    return fake


def test_another_host_is_waited_for_while_it_lives(tmp_path, clock):
    target, waiting = tmp_path / "thing", Claim(tmp_path / "thing")
    for beat in range(4):
        _as_other_host(target, beat)
        for _ in range(2):
            assert not waiting.take()
            clock.now += claim._STALE_SECONDS - 1
    clock.now += 2
    assert waiting.take()
    holder = waiting.holder()
    assert holder is not None
    assert holder.pid == os.getpid()
    waiting.release()


def test_a_minute_of_silence_is_measured_by_the_watcher(tmp_path, clock):
    """However old the file says it is: clocks of hosts differ."""
    waiting = Claim(tmp_path / "thing")
    _as_other_host(tmp_path / "thing", 5)
    os.utime(waiting.file, (0, 0))
    assert not waiting.take()
    clock.now += claim._STALE_SECONDS - 1
    assert not waiting.take()
    clock.now += 2
    assert waiting.take()
    waiting.release()


def test_without_locks_the_sign_of_life_alone_decides(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(claim, "_lock", lambda descriptor: None)
    first, second = Claim(tmp_path / "thing"), Claim(tmp_path / "thing")
    assert first.take()
    for beat in range(1, 4):
        assert not second.take()
        clock.now += claim._STALE_SECONDS + 1
        claim._write(first._descriptor, claim._me(beat))
    assert not second.take()
    clock.now += claim._STALE_SECONDS + 1
    assert second.take()
    first.release()
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_a_holder_gives_signs_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(claim, "_BEAT_SECONDS", 0.01)
    holding = Claim(tmp_path / "thing")
    assert holding.take()
    beats = set()
    while len(beats) < 3:
        holder = holding.holder()
        assert holder is not None  # no reader sees half a word
        beats.add(holder.beat)
    holding.release()


@pytest.mark.parametrize("content", ["", "half of a lin", "[1]"])
def test_a_file_without_a_word_is_taken_at_the_second_look(tmp_path, content):
    """Its maker died between making and writing it, or is about to write."""
    waiting = Claim(tmp_path / "thing")
    waiting.file.write_text(content)
    assert not waiting.take()
    assert waiting.take()
    waiting.release()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_an_os_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        Claim(tmp_path / "file" / "thing").take()


def test_a_link_in_the_place_of_a_claim_is_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("")
    claim = Claim(tmp_path / "thing")
    claim.file.symlink_to(tmp_path / "precious")
    for _ in range(2):
        with pytest.raises(OSError, match="symbolic links"):
            claim.take()
    assert (tmp_path / "precious").read_text() == ""
