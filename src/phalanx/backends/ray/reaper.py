"""A small process per node that kills ranks and their descendants, and that exits last.

The script needs only the standard library: it starts in some 20 ms and uses 10 MB. It reads requests, a JSON object per
line, and writes a line in response: ``{"watch": [[pid, started, mark], ...]}``, ``{"look": true}`` or
``{"end": [pid, ...]}``. When its input or the process that started it ends, it kills all ranks that it still watches
and their descendants, and exits.

A descendant is found by its parent, by the process group that the rank leads, or by an environment variable with
the rank's mark, ``<pid>-<hex>``. The processes are scanned after each second without a request: a descendant that was
found remains one after its parent's end.
Pids are always compared with the start time of the process, so that no other process is killed.

Python's resource tracker unlinks the shared memory and the semaphores of killed processes. It is not killed at once,
because it exits automatically afterwards; but Ray kills it with a rank whose driver died. Folders with a rank's mark in
their names are removed, together with the files that links in them name.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Collection
from typing import Any, NamedTuple

MARK_VARIABLE = "PHALANX_PROCESS"
LOOK_EVERY_S = 1.0
GONE_WITHIN_S = 3.0
#: Grace period in seconds after Ray told a rank to exit. Ray reports a rank that is killed earlier as an error.
EXIT_WITHIN_S = 0.3
#: Last seconds of ``GONE_WITHIN_S``, in which remaining resource trackers are killed too.
TRACKERS_LAST_S = 1.0
_TRACKER = b"resource_tracker import main"


class Process(NamedTuple):
    """A process: fields 1, 3, 4, 5 and 22 of /proc/<pid>/stat (see proc(5)); its start in clock ticks."""

    pid: int
    state: str
    parent: int
    group: int
    started: int

    @property
    def identity(self) -> tuple[int, int]:
        return self.pid, self.started

    @property
    def stopped(self) -> bool:
        """True if a signal has stopped the process."""
        return self.state in "Tt"


def read_proc(pid: int, name: str) -> bytes:
    """Return the content of a file of a process in ``/proc``; b"" if the process has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()
    return b""


def look_at(pid: int) -> Process | None:
    """Return the process with a pid, or None if there is none or it is a zombie."""
    fields = read_proc(pid, "stat").rpartition(b")")[2].split()
    if not fields:
        return None
    state = fields[0].decode()
    parent, group, started = (int(fields[index]) for index in (1, 2, 19))
    return None if state in "ZX" else Process(pid, state, parent, group, started)


def running(pid: int, started: int) -> Process | None:
    """Return the process with a pid and start time, or None if it has ended (even if its pid is in use again)."""
    process = look_at(pid)
    return process if process is not None and process.started == started else None


def processes() -> list[Process]:
    """Return all processes of this node that are visible to this process."""
    found = (look_at(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [process for process in found if process is not None]


def is_tracker(pid: int) -> bool:
    """Return whether a process is a resource tracker of Python's multiprocessing, or of a similar library."""
    return _TRACKER in read_proc(pid, "cmdline")


def has_mark(pid: int, mark: str) -> bool:
    """Return whether the environment of a process has the mark."""
    return f"{MARK_VARIABLE}={mark}".encode() in read_proc(pid, "environ").split(b"\0")


def remove_folders(marks: Collection[str]) -> None:
    """Remove the temporary folders whose names begin with ``phalanx-`` and one of the marks, and what they link to."""
    place = os.environ.get("TMPDIR") or "/tmp"
    with contextlib.suppress(OSError):
        for name in os.listdir(place):
            folder = os.path.join(place, name)
            is_marked = name.startswith("phalanx-") and "-".join(name.split("-")[1:3]) in marks
            # Links of other users could name any file.
            if is_marked and os.lstat(folder).st_uid == os.getuid():
                remove_folder(folder)


def remove_folder(folder: str) -> None:
    """Remove a folder, and the files that links in it name."""
    import shutil  # slow to import, and rarely needed

    with contextlib.suppress(OSError):  # without the folder
        for entry in filter(os.DirEntry.is_symlink, os.scandir(folder)):
            with contextlib.suppress(OSError):
                os.unlink(os.readlink(entry.path))
    shutil.rmtree(folder, ignore_errors=True)


class Watched:
    """A watched rank, and its descendants found so far (``seen``: pids and start times)."""

    def __init__(self, pid: int, started: int, mark: str) -> None:
        self.pid = pid
        self.started = started
        self.mark = mark
        self.seen: set[tuple[int, int]] = set()

    def look(self, everything: list[Process], *, marks: bool = False) -> None:
        """Record the rank's descendants, found by process group, by parent and, with ``marks``, by environment."""
        present = {process.identity for process in everything}
        self.seen &= present
        alive = (self.pid, self.started) in present
        # While a process group has members, the kernel does not reuse the pid of its leader.
        leads = alive or look_at(self.pid) is None
        for process in everything:
            if process.pid == self.pid or process.started < self.started:
                continue
            if (leads and process.group == self.pid) or (marks and has_mark(process.pid, self.mark)):
                self.seen.add(process.identity)
        parents = {pid for pid, _ in self.seen} | ({self.pid} if alive else set())
        while found := {p.identity for p in everything if p.parent in parents and p.pid not in parents}:
            self.seen |= found
            parents |= {pid for pid, _ in found}


class Reaper:
    """The watched ranks of a node."""

    def __init__(self) -> None:
        self.watched: dict[int, Watched] = {}

    def look(self, *, marks: bool = False) -> None:
        everything = processes()
        for one in self.watched.values():
            one.look(everything, marks=marks)

    def end(self, pids: list[int], patience: float = 0.0) -> list[int]:
        """Kill these ranks and all their descendants. Return the pids of processes that did not end.

        The ranks first have ``patience`` seconds to exit on their own.
        """
        chosen = [self.watched[pid] for pid in pids if pid in self.watched]
        if patience:
            self.look(marks=True)  # once a rank has ended, its descendants have another parent
            limit = time.monotonic() + patience
            while any(running(one.pid, one.started) for one in chosen) and time.monotonic() < limit:
                time.sleep(0.002)
        limit = time.monotonic() + GONE_WITHIN_S
        left: list[int] = []
        while chosen:
            everything = processes()
            for one in chosen:
                one.look(everything, marks=True)
            trackers = time.monotonic() > limit - TRACKERS_LAST_S
            left = [pid for one in chosen for pid in self._kill(one, trackers=trackers)]
            if not left or time.monotonic() > limit:
                break
            time.sleep(0.01)
        remove_folders({one.mark for one in chosen})
        for one in chosen:
            del self.watched[one.pid]
        return left

    def _kill(self, one: Watched, *, trackers: bool) -> list[int]:
        known = [(one.pid, one.started), *one.seen]
        left = [pid for pid, started in known if running(pid, started) and pid != os.getpid()]
        for pid in left:
            if trackers or not is_tracker(pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        return left

    def answer(self, request: dict[str, Any]) -> list[int] | None:
        if "watch" in request:
            for pid, *identity in request["watch"]:
                self.watched[pid] = Watched(pid, *identity)
        if "look" in request:
            self.look()
        if "end" in request:
            return self.end(request["end"], EXIT_WITHIN_S)
        return None


def serve(requests: int, answers: int, starter: int, starter_started: int) -> None:
    """Serve requests until the input ends or the starter process has ended, then kill all watched ranks."""
    reaper = Reaper()
    buffer = b""
    while True:
        ready, _, _ = select.select([requests], [], [], LOOK_EVERY_S)
        if ready:
            chunk = os.read(requests, 65536)
            if not chunk:
                break
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                reply = json.dumps(reaper.answer(json.loads(line))) + "\n"
                with contextlib.suppress(BrokenPipeError):
                    os.write(answers, reply.encode())
        else:
            # A forked child of the starter may keep the pipe open, so the input does not always end with the starter.
            if running(starter, starter_started) is None:
                break
            reaper.look()
    reaper.look(marks=True)
    reaper.end(list(reaper.watched))


def main() -> None:
    starter, started = int(sys.argv[1]), int(sys.argv[2])
    if os.fork() > 0:
        os._exit(0)  # the child survives the end of the starter and of its process group
    os.setsid()
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(one, signal.SIG_IGN)
    os.chdir("/")
    serve(0, 1, starter, started)


if __name__ == "__main__":
    main()
