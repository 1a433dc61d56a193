"""What ranks print: whose it is, and whole lines of a file that grows. Pure.

A rank's file holds what the process wrote, byte for byte, behind one line that says whose it is: the prefix of each
line is added where the file is shown. A prefix in the file would have to be written by something between the
process and the file, and what that something holds is lost when the process is killed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

#: Beginning of the first line of a rank's file, which says whose it is.
HEADER = "# phalanx log: "
#: Lines that are for programs: Ray's marks of whose output follows, and the states of its progress bars.
_MARKS = (HEADER, ":job_id:", ":actor_name:", ":task_name:", "::task_name::", "__ray_tqdm_magic_token__")
_TRACEBACK = "Traceback (most recent call last):"
_PATIENCE = 5  # looks without anything new, after which what is held back is given


def label_of(classes: Iterable[tuple[str, str]]) -> str:
    """What the process of a rank is called: its roles, or the class of a group of one; from (role, class) pairs."""
    return "+".join(role or name for role, name in classes)


def prefix_of(label: str, rank: int, host: str) -> str:
    """What stands before each line of a rank: ``[actor r3@host] ``."""
    return f"[{label} r{rank}@{host}] "


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks as people write them: ``r0``, ``r0-3``, ``r0-3,6``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    return "r" + ",".join("-".join(map(str, run)) for run in runs)


def is_shown(line: str) -> bool:
    """Whether a line of a rank's file is for people."""
    return not line.startswith(_MARKS)


class Lines:
    """Bytes of a file that grows, as whole lines; a traceback is given when its last line is there.

    What several ranks print is shown in turns, so a traceback that came in pieces would be mixed up with others.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._held: list[str] = []
        self._idle = 0

    def feed(self, data: bytes) -> list[str]:
        """The lines that are complete with these bytes; nothing read is a look without anything new."""
        self._idle = 0 if data else self._idle + 1
        if self._idle >= _PATIENCE:
            return self.finish() if self._idle >= 2 * _PATIENCE else self._give(len(self._held))
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._held += [line for line in map(_decoded, lines) if is_shown(line)]
        return self._give(_whole(self._held))

    def finish(self) -> list[str]:
        """All that is left, a last line without an end too."""
        last, self._rest = self._rest, b""
        if last and is_shown(_decoded(last)):
            self._held.append(_decoded(last))
        return self._give(len(self._held))

    def _give(self, count: int) -> list[str]:
        given, self._held = self._held[:count], self._held[count:]
        return given


@dataclass
class _Said:
    """One line, or one traceback, and the ranks that printed it since."""

    text: str
    ranks: set[int]
    since: float


class Merged:
    """Lines of the ranks of a group; what several of them print within ``window_s`` seconds is one, with their ranks.

    Nothing is left out: a line that a rank prints twice comes twice, and a rank that comes later has a line of its own.
    A traceback counts as one line.
    """

    def __init__(self, label: str, hosts: Sequence[str], window_s: float = 0.5) -> None:
        self._label = label
        self._hosts = hosts
        self._window_s = window_s
        self._said: list[_Said] = []

    def add(self, rank: int, lines: Sequence[str], now: float) -> None:
        """What a rank has printed, at ``now`` in seconds."""
        for text in _units(lines):
            same = (said for said in self._said if said.text == text and rank not in said.ranks)
            found = next(same, None)
            if found is None:
                self._said.append(_Said(text, {rank}, now))
            else:
                found.ranks.add(rank)

    def take(self, now: float | None) -> list[str]:
        """The lines whose time is over at ``now``, each behind its ranks; all of them where that is None."""
        due = [said for said in self._said if now is None or now - said.since >= self._window_s]
        self._said = self._said[len(due) :]  # they are in the order in which they came
        return [self._prefix(said.ranks) + line for said in due for line in said.text.split("\n")]

    def _prefix(self, ranks: set[int]) -> str:
        hosts = sorted({self._hosts[rank] for rank in ranks})
        where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
        return f"[{self._label} {ranks_text(ranks)}@{where}] "


def _units(lines: Sequence[str]) -> Iterator[str]:
    """The lines, each traceback as one text."""
    held: list[str] = []
    for line in lines:
        if held:
            held.append(line)
            if line and not line.startswith((" ", "\t")):
                yield "\n".join(held)
                held = []
        elif line.lstrip(" +|").startswith(_TRACEBACK):
            held = [line]
        else:
            yield line
    if held:
        yield "\n".join(held)


def _decoded(line: bytes) -> str:
    """A line as a terminal would leave it: of what a progress bar wrote over and over, the last."""
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]


def _whole(lines: Sequence[str]) -> int:
    """How many lines stand before a traceback that has not ended."""
    begin: int | None = None
    for index, line in enumerate(lines):
        if line.lstrip(" +|").startswith(_TRACEBACK):
            begin = index if begin is None else begin
        elif begin is not None and line and not line.startswith((" ", "\t")):
            begin = None
    return len(lines) if begin is None else begin
