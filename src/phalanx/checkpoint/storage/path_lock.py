"""One driver writes a path at a time: a file names it, and it is asked whether it lives before it is passed over."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable

from phalanx.checkpoint.storage.retention import Holder, verdict
from phalanx.checkpoint.storage.storage import Place
from phalanx.errors import CheckpointError, CheckpointLocked

_log = logging.getLogger("phalanx")

LOCK = "lock.json"
GUARD = ".lock"

_BEAT_S = 5.0
_WATCH_S = 15.0  # of a holder on another host: three beats


class Hold:
    """This process may write a place. Taken as often as it is let go; the file goes with the last one."""

    def __init__(self, place: Place, holder: Holder) -> None:
        self._place = place
        self.holder = holder
        self.count = 1
        self._over = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._beat, name="phalanx-lock", daemon=True).start()

    def check(self) -> None:
        """Raise unless it is still ours.

        Raises:
            CheckpointLocked: another driver took it, which a process that was stopped for long has to expect.
        """
        found = Holder.from_bytes(self._place.read(LOCK))
        if found is None or found.token != self.holder.token:
            who = "nobody" if found is None else str(found)
            raise CheckpointLocked(
                f"{self._place.root} was taken over by {who} while this process wrote to it: nothing is committed "
                "here any more; end one of both drivers",
                holder=who,
            )

    def end(self) -> None:
        """Let go of it."""
        self._over.set()
        with self._lock, self._place.guarded(GUARD):
            found = Holder.from_bytes(self._place.read(LOCK))
            if found is not None and found.token == self.holder.token:
                self._place.remove(LOCK)

    def _beat(self) -> None:
        while not self._over.wait(_BEAT_S):
            with contextlib.suppress(CheckpointError), self._lock, self._place.guarded(GUARD):
                found = Holder.from_bytes(self._place.read(LOCK))
                if self._over.is_set() or found is None or found.token != self.holder.token:
                    return
                self.holder = self.holder.beats()
                self._place.write(LOCK, self.holder.to_bytes())


class _Holds:
    """Those of this process, by place."""

    def __init__(self) -> None:
        self._by_root: dict[str, Hold] = {}
        self._lock = threading.Lock()

    def take(self, place: Place, sleep: Callable[[float], object]) -> Hold:
        with self._lock:
            hold = self._by_root.get(place.root)
            if hold is not None and hold.holder.pid == os.getpid():
                hold.count += 1
                return hold
            hold = self._by_root[place.root] = Hold(place, _acquired(place, sleep))
            return hold

    def give(self, hold: Hold, root: str) -> None:
        with self._lock:
            hold.count -= 1
            if hold.count == 0:
                if self._by_root.get(root) is hold:
                    del self._by_root[root]
                hold.end()

    def end_all(self) -> None:
        with self._lock:
            mine = [hold for hold in self._by_root.values() if hold.holder.pid == os.getpid()]
            self._by_root.clear()
        for hold in mine:
            with contextlib.suppress(
                CheckpointError, OSError
            ):  # the path may be gone by the end of the process
                hold.end()


_holds = _Holds()
atexit.register(_holds.end_all)


def hold(place: Place, *, sleep: Callable[[float], object] = time.sleep) -> Hold:
    """Take the right to write ``place``, or have it once more.

    The lock of a process of this machine that is gone is taken over at once; that of another host when it has not
    shown life for three beats (15 s), which this waits for.

    Raises:
        CheckpointLocked: another process has it.
        CheckpointError: the place cannot be written.
    """
    place.make("")
    return _holds.take(place, sleep)


def let_go(hold: Hold, place: Place) -> None:
    """Give back what :func:`hold` gave."""
    _holds.give(hold, place.root)


def holder_of(place: Place) -> Holder | None:
    """Who holds a place, dead or alive."""
    return Holder.from_bytes(place.read(LOCK))


def _acquired(place: Place, sleep: Callable[[float], object]) -> Holder:
    me = this_process()
    watched: Holder | None = None
    while True:
        with place.guarded(GUARD):
            found = holder_of(place)
            what = verdict(found, me, None if found is None else started_at(found.pid))
            if what == "free" or (what == "watch" and found == watched):
                place.write(LOCK, me.to_bytes())
                break
        if found is not None and (what == "held" or watched is not None):
            raise CheckpointLocked(
                f"{place.root} is held by {found}, since {_clock(found.since)}: one driver saves to a path at a time; "
                "end that one, or choose another path",
                holder=str(found),
            )
        watched = found
        _log.warning(
            "%s is held by %s, which cannot be seen from here: waiting %g s for a sign of its life",
            place.root,
            found,
            _WATCH_S,
        )
        sleep(_WATCH_S)
    now = holder_of(place)  # a store without locks may have let two write: the last one has it
    if now is None or now.token != me.token:
        raise CheckpointLocked(f"{place.root} was taken by {now} at the same moment", holder=str(now))
    return me


def this_process() -> Holder:
    """The holder that this process would be."""
    pid = os.getpid()
    return Holder(
        host=socket.gethostname(),
        pid=pid,
        machine=_machine(),
        started=started_at(pid) or 0,
        since=time.time(),
        token=secrets.token_hex(8),
    )


def started_at(pid: int) -> int | None:
    """When the process of that pid was started, in clock ticks since boot; None where there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _machine() -> str:
    """Equal for processes that see each other under /proc."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(8)  # no other process can be seen from here: all are watched


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
