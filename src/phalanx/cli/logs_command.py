"""`phalanx logs GROUP`: what the ranks print, each line with its rank."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from phalanx.cli.common import Address, AsJson, GroupName, chosen_ranks, cluster_reader
from phalanx.display.log_merging import Lines, prefix_of
from phalanx.display.registry_records import GroupRecord, RankRecord
from phalanx.errors import DispatchError

if TYPE_CHECKING:
    from phalanx.backends.ray.node_agents import RankObserver  # loads Ray

_CHUNK = 1 << 20
_LOOK_EVERY_S = 0.2
# A date and time near the beginning of a line, as `logging`, glog and most others write it.
_STAMP = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?")
_STAMP_WITHIN = 60


class Order(str, Enum):
    """How lines of several ranks are put together."""

    RANK = "rank"
    TIME = "time"


class Line(NamedTuple):
    """One line of a rank; ``at`` is the date and time that it, or the line before it, bears."""

    rank: int
    prefix: str
    text: str
    at: str = ""

    def __str__(self) -> str:
        return self.prefix + self.text


def logs(
    group: GroupName,
    rank: Annotated[
        list[int] | None, typer.Option("--rank", "-r", help="Only this rank; repeatable.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is printed from now on.")
    ] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", min=0, help="Only the last lines of each rank.")
    ] = None,
    order: Annotated[
        Order, typer.Option("--order", help="Rank after rank, or by the times in the lines.")
    ] = Order.RANK,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """What the ranks of a group print: output of Python, of native libraries and of child processes.

    Each line has its rank's prefix, as \\[actor r3@host]; nothing is left out, not even equal lines of many ranks.

    Examples:

      phalanx logs trainer --rank 0 --tail 50

      phalanx logs trainer --order time | grep -i error

      phalanx logs trainer --follow

    Exit codes: 0 done; 2 no cluster, no such group or rank, or a file cannot be read.
    """
    from phalanx.backends.ray.node_agents import RankObserver  # loads Ray

    cluster = cluster_reader(address)
    found = cluster.notices().find(group)
    ranks = chosen_ranks(found, rank)
    observer = RankObserver(cluster.address)
    try:
        files = [RankFile(observer, found, entry) for entry in ranks]
        lines = [[*file.lines(), *([] if follow else file.rest())] for file in files]
        _print(merged(lines, order, tail), as_json)
        if follow:
            with contextlib.suppress(KeyboardInterrupt):
                _follow(files, as_json)
    except OSError as error:
        raise DispatchError(f"group {found.name!r}: {error}") from None
    finally:
        observer.close()


class RankFile:
    """The file of one rank, read on and on."""

    def __init__(self, observer: RankObserver, group: GroupRecord, entry: RankRecord) -> None:
        self._observer = observer
        self._entry = entry
        self._prefix = prefix_of(group.label, entry.rank, entry.host)
        self._lines = Lines()
        self._offset = 0
        self._at = ""

    def lines(self) -> list[Line]:
        """The whole lines that are new.

        Raises:
            OSError: the file cannot be read.
        """
        found: list[str] = []
        while True:
            data = self._observer.read(self._entry, self._offset, _CHUNK)
            self._offset += len(data)
            found += self._lines.feed(data)
            if len(data) < _CHUNK:
                return self._as_lines(found)

    def rest(self) -> list[Line]:
        """What is held back because it has no end yet."""
        return self._as_lines(self._lines.finish())

    def _as_lines(self, texts: Iterable[str]) -> list[Line]:
        lines: list[Line] = []
        for text in texts:
            stamp = _STAMP.search(text, 0, _STAMP_WITHIN)
            self._at = stamp.group().replace("T", " ").replace(",", ".") if stamp else self._at
            lines.append(Line(self._entry.rank, self._prefix, text, self._at))
        return lines


def merged(by_rank: Sequence[list[Line]], order: Order, tail: int | None = None) -> list[Line]:
    """The lines of several ranks in one list; a line without a time stays behind the one before it."""
    cut = [lines[max(0, len(lines) - tail) :] if tail is not None else lines for lines in by_rank]
    lines = [line for lines in cut for line in lines]
    return sorted(lines, key=lambda line: line.at) if order is Order.TIME else lines


def _follow(files: Sequence[RankFile], as_json: bool) -> None:
    while True:
        time.sleep(_LOOK_EVERY_S)
        _print([line for file in files for line in file.lines()], as_json)


def _print(lines: Iterable[Line], as_json: bool) -> None:
    for line in lines:
        typer.echo(json.dumps({"rank": line.rank, "text": line.text}) if as_json else str(line))
