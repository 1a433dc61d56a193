"""Output of ranks: complete lines of growing files, labeled with their ranks, with equal lines merged. Pure.

A rank's file has a line that names the rank, then the unchanged output of the process. The prefix of each line is added
when the file is shown: only a process between rank and file could add it earlier, and its buffered output would be lost
if the rank is killed.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

#: Prefix of the first line of a rank's file, which names the rank.
HEADER = "# phalanx log: "
#: Prefixes of lines for programs: Ray's marks of a process's output, and the states of its progress bars.
_MARKS = (HEADER, ":job_id:", ":actor_name:", ":task_name:", "::task_name::", "__ray_tqdm_magic_token__")
_TRACEBACK = "Traceback (most recent call last):"
_CHUNK = 1 << 20
_IDLE_READS = 5  # reads without new bytes, after which held lines are returned


def prefix_of(label: str, ranks: Iterable[int], hosts: Iterable[str]) -> str:
    """Return the prefix of a line that these ranks printed: ``[actor r3@host] ``, ``[actor r0-3@2 hosts] ``."""
    names = sorted(set(hosts))
    where = names[0] if len(names) == 1 else f"{len(names)} hosts"
    return f"[{label} r{','.join(rank_ranges(ranks))}@{where}] "


def rank_ranges(ranks: Iterable[int]) -> list[str]:
    """Return ranks as ranges: ``0-3``, ``6``."""
    runs = itertools.groupby(enumerate(sorted(set(ranks))), key=lambda pair: pair[1] - pair[0])
    members = ([rank for _, rank in run] for _, run in runs)
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in members]


def is_shown(line: str) -> bool:
    """Return whether a line of a rank's file is for people."""
    return not line.startswith(_MARKS)


class Lines:
    """Splitter of a growing file into complete lines and complete tracebacks.

    Ranks are shown in turns, so a traceback in pieces would be mixed with the lines of other ranks.

    Args:
        read: returns at most a number of bytes of the file from an offset on.
    """

    def __init__(self, read: Callable[[int, int], bytes]) -> None:
        self._read = read
        self._offset = 0
        self._rest = b""
        self._held: list[str] = []
        self._idle = 0

    def new(self, *, last: bool) -> list[str]:
        """Return the lines that were completed since the last call; all remaining lines, if this is the ``last`` call.

        Raises:
            OSError: if the file cannot be read.
        """
        size, lines = _CHUNK, list[str]()
        while size == _CHUNK:
            data = self._read(self._offset, _CHUNK)
            size = len(data)
            self._offset += size
            lines += self.feed(data)
        return [*lines, *self.finish()] if last else lines

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that are complete with these bytes; empty bytes are a read without new output."""
        self._idle = 0 if data else self._idle + 1
        if self._idle >= _IDLE_READS:
            return self.finish() if self._idle >= 2 * _IDLE_READS else self._take(len(self._held))
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[rest.rstrip(b"\r").rfind(b"\r") + 1 :]  # the last state of a progress bar
        self._held += [line for line in map(_decoded, lines) if is_shown(line)]
        return self._take(sum(len(unit) for unit, is_complete in _units(self._held) if is_complete))

    def finish(self) -> list[str]:
        """Return all remaining lines, including a last line without a newline."""
        last, self._rest = _decoded(self._rest), b""
        if last and is_shown(last):
            self._held.append(last)
        return self._take(len(self._held))

    def _take(self, count: int) -> list[str]:
        taken, self._held = self._held[:count], self._held[count:]
        return taken


@dataclass
class _Printed:
    """A line or a traceback, the ranks that printed it, and the time of the first, in seconds."""

    unit: list[str]
    ranks: set[int]
    since: float


class Merged:
    """Lines of the ranks of a group; equal lines of several ranks within ``window_s`` seconds are merged.

    A window of 0 merges no lines. No line is left out: a line that a rank prints twice is shown twice, and a rank that
    prints it later gets its own line. A traceback counts as a single line. Thread-safe.
    """

    def __init__(self, label: str, hosts: Sequence[str], window_s: float = 0.0) -> None:
        self._label, self._hosts, self._window_s = label, hosts, window_s
        self._printed: list[_Printed] = []
        self._lock = threading.Lock()

    def add(self, rank: int, lines: Sequence[str], now: float) -> None:
        """Add lines of a rank, at ``now`` in seconds."""
        with self._lock:
            for unit, _ in _units(lines):
                equal = (other for other in self._printed if other.unit == unit and rank not in other.ranks)
                printed = next(equal, None) if self._window_s else None
                if printed is None:
                    self._printed.append(_Printed(unit, {rank}, now))
                else:
                    printed.ranks.add(rank)

    def take(self, now: float | None) -> list[str]:
        """Return the lines whose window ended by ``now`` (None: all lines), with the prefix of their ranks."""
        with self._lock:
            until = float("inf") if now is None else now - self._window_s
            due = [other for other in self._printed if other.since <= until]
            self._printed = [other for other in self._printed if other.since > until]
        prefixes = [prefix_of(self._label, one.ranks, map(self._hosts.__getitem__, one.ranks)) for one in due]
        return [p + line for p, one in zip(prefixes, due, strict=True) for line in one.unit]


def _units(lines: Sequence[str]) -> Iterator[tuple[list[str], bool]]:
    """Yield single lines and tracebacks, and whether each is complete; only a last traceback can be incomplete."""
    held: list[str] = []
    for line in lines:
        if not held and not line.lstrip(" +|").startswith(_TRACEBACK):
            yield [line], True
            continue
        is_last = bool(held) and bool(line) and not line.startswith((" ", "\t"))
        held.append(line)
        if is_last:
            yield held, True
            held = []
    if held:
        yield held, False


def _decoded(line: bytes) -> str:
    """Return a line as a terminal shows it: only the last state of a progress bar."""
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
