"""One builder for each folder-to-be, among all processes that see the same file system.

A claim is a small file beside the folder. Its holder keeps a kernel lock (flock) on it, which ends
with the process however it dies, and writes a sign of life into it every few seconds, for hosts
that the lock does not reach.

Guarantees (asserted by tests/unit/test_claim.py):
- of the processes on one host, and of all hosts where locks reach across the file system, exactly
  one builds; nobody waits in a lock or a collective, only by looking again, with a time limit;
- a builder that dies, also by kill -9, is succeeded at the next look (at most 2 s later) on its own
  host, and elsewhere when its sign of life has not changed for a minute by the watcher's own clock:
  clocks of hosts are never compared;
- an error of the builder reaches its caller and frees the claim; no claim file stays behind.
Where locks stop at the host, two hosts may still build at once when one was silent for a minute:
that must be harmless, so `build` writes elsewhere and renames the folder into place whole.
"""

import contextlib
import fcntl
import functools
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_BEAT_SECONDS = 5.0
_STALE_SECONDS = 60.0
_REPORT_SECONDS = 30.0
_FIRST_LOOK_SECONDS, _LAST_LOOK_SECONDS = 0.1, 2.0


@dataclass(frozen=True)
class Holder:
    """Who builds. machine: tells hosts, or rather their kernels, apart. beat: rises as it lives."""

    host: str
    pid: int
    machine: str
    beat: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Claim:
    """The right of this process to build `target`; taken and released any number of times.

    Processes forked while it is held have no part in it: they neither keep it alive nor release it.
    """

    def __init__(self, target: Path) -> None:
        self.file = target.with_name(f".{target.name}.claim")
        self._descriptor: int | None = None
        self._pid = 0
        self._stop = threading.Event()
        self._beating: threading.Thread | None = None
        self._seen: tuple[int, Holder | None] | None = None  # inode, what it said
        self._seen_since = 0.0

    def take(self) -> bool:
        """True when this process holds the claim now; False when another one does. Never waits.

        Makes the folder that it lies in. OSError when nothing can be written there.
        """
        assert self._descriptor is None, "the claim is held already"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        created = True
        try:
            descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            created = False
            try:
                # a link could lead to anything, which must not be written into
                descriptor = os.open(self.file, os.O_RDWR | os.O_NOFOLLOW)
            except FileNotFoundError:  # released this moment: the next look tells
                return False
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, descriptor)
            locked = _lock(descriptor)
            if locked is False or not self._is_current(descriptor):
                return False
            if not created and not self._is_free(descriptor, locked=bool(locked)):
                return False
            with contextlib.suppress(OSError):
                os.fchmod(descriptor, 0o666)  # other users of the folder may succeed this one
            _write(descriptor, _me(0))
            undo.pop_all()
        self._descriptor, self._pid = descriptor, os.getpid()
        _held.add(descriptor)
        self._stop.clear()
        self._beating = threading.Thread(target=self._beat, args=(descriptor,), daemon=True)
        self._beating.start()
        return True

    def release(self) -> None:
        """Frees the claim and removes its file."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None or self._pid != os.getpid():
            return
        self._stop.set()
        if self._beating is not None:
            self._beating.join()
        with contextlib.suppress(OSError):
            if self._is_current(descriptor):
                self.file.unlink()
        _held.discard(descriptor)
        os.close(descriptor)

    def holder(self) -> Holder | None:
        """Who holds the claim by what its file says; None when nobody does."""
        try:
            return _parse(self.file.read_bytes())
        except OSError:
            return None

    def _is_current(self, descriptor: int) -> bool:
        """Whether the open file is still the one of that name: a released one is not."""
        try:
            return os.path.samestat(os.stat(self.file), os.fstat(descriptor))
        except FileNotFoundError:
            return False

    def _is_free(self, descriptor: int, *, locked: bool) -> bool:
        """Whether the one who made the file is dead, as far as its words and our lock tell."""
        holder = _parse(os.pread(descriptor, 4096, 0))
        if locked and holder is not None and holder.machine == _machine():
            return True  # its lock would have reached us
        now, seen = time.monotonic(), (os.fstat(descriptor).st_ino, holder)
        if seen != self._seen:
            self._seen, self._seen_since = seen, now
            return False
        # nothing written between two looks: its maker died before its first word
        silent = now - self._seen_since
        return silent > _STALE_SECONDS or (locked and holder is None)

    def _beat(self, descriptor: int) -> None:
        beat = 0
        while not self._stop.wait(_BEAT_SECONDS):
            beat += 1
            with contextlib.suppress(OSError):  # a full disk must not end the builder
                _write(descriptor, _me(beat))


def built_once[T](
    target: Path,
    find: Callable[[], T | None],
    build: Callable[[], None],
    *,
    timeout_seconds: float,
    time_out: Callable[[str], Exception],
    report: Callable[[str], None] = lambda text: None,
) -> T:
    """What `find` finds at `target`, built by one process while the others wait.

    find: the finished thing, None while it is not there (or not usable). build: makes it appear;
    called while the claim is held and `find` found nothing. time_out: makes the error for having
    waited timeout_seconds from words on who was waited for. report: takes such words every 30 s.
    Errors of `build`, and OSError where the claim cannot be written, pass through.
    """
    claim = Claim(target)
    start = reported = time.monotonic()
    while True:
        found = find()
        if found is not None:
            return found
        if claim.take():
            try:
                found = find()  # its last holder may have finished between our two looks
                if found is not None:
                    return found
                build()
            finally:
                claim.release()
            found = find()
            if found is None:
                raise RuntimeError(f"{target} was built and is not there")
            return found
        now = time.monotonic()
        waited = now - start
        if waited > timeout_seconds:
            raise time_out(_waited_for(claim, waited))
        if now - reported > _REPORT_SECONDS:
            report(_waited_for(claim, waited))
            reported = now
        # early on often, later seldom: thousands of ranks may look at one file system
        time.sleep(min(_FIRST_LOOK_SECONDS + waited / 10, _LAST_LOOK_SECONDS))


def _waited_for(claim: Claim, seconds: float) -> str:
    return f"waited {seconds:.0f} s for {claim.holder() or 'another process'}"


_held: set[int] = set()


def _close_in_child() -> None:
    """A lock lasts until all copies of its descriptor are closed, so a child closes its own."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


def _lock(descriptor: int) -> bool | None:
    """True: ours now. False: another process holds it. None: this file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _me(beat: int) -> Holder:
    return Holder(socket.gethostname(), os.getpid(), _machine(), beat)


@functools.cache
def _machine() -> str:
    """One text per running kernel: locks reach as far, and containers may share host names."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def _write(descriptor: int, holder: Holder) -> None:
    # one write of a fixed length, so that no reader sees half of it
    os.pwrite(descriptor, json.dumps(vars(holder)).ljust(512).encode(), 0)


def _parse(content: bytes) -> Holder | None:
    try:
        return Holder(**json.loads(content))
    except (ValueError, TypeError):
        return None
