"""`phalanx logs GROUP`: output of the ranks, each line with its rank."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from phalanx.cli.common import Address, AsJson, GroupName, Ranks, observed_ranks
from phalanx.display.log_merging import Lines, prefix_of
from phalanx.display.registry_records import GroupRecord, RankRecord
from phalanx.errors import DispatchError

if TYPE_CHECKING:
    from phalanx.backends.ray.node_agents import RankObserver  # loads Ray

_CHUNK = 1 << 20
_POLL_S = 0.2
# A date and time near the beginning of a line, as `logging`, glog and most others write it.
_STAMP = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?")
_STAMP_WITHIN = 60

Order = Literal["rank", "time"]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is printed from now on.")]
Tail = Annotated[int | None, typer.Option("--tail", "-n", min=0, help="Only the last lines of each rank.")]
InOrder = Annotated[Order, typer.Option("--order", help="Rank after rank, or by the times in the lines.")]


class Line(NamedTuple):
    """A line of a rank; ``at`` is the date and time in the line, or in the last line before it that has them."""

    rank: int
    prefix: str
    text: str
    at: str = ""


def logs(
    group: GroupName,
    rank: Ranks = None,
    follow: Follow = False,
    tail: Tail = None,
    order: InOrder = "rank",
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Output of the ranks of a group: of Python, of native libraries and of child processes.

    Each line has its rank's prefix, as \\[actor r3@host]; nothing is left out, not even equal lines of many ranks.

    Examples:

      phalanx logs trainer --rank 0 --tail 50

      phalanx logs trainer --order time | grep -i error

      phalanx logs trainer --follow

    Exit codes: 0 done; 2 no cluster, no such group or rank, or a file cannot be read.
    """
    with observed_ranks(address, group, rank) as (observer, found, ranks):
        try:
            files = [rank_lines(observer, found, entry, follow=follow) for entry in ranks]
            _print(merged([next(file) for file in files], order, tail), as_json)
            with contextlib.suppress(KeyboardInterrupt):
                while follow:
                    time.sleep(_POLL_S)
                    _print([line for file in files for line in next(file)], as_json)
        except OSError as error:
            raise DispatchError(f"group {found.name!r}: {error}") from None


def rank_lines(
    observer: RankObserver, group: GroupRecord, entry: RankRecord, *, follow: bool
) -> Iterator[list[Line]]:
    """Read the log file of a rank again and again: its new lines, without ``follow`` also a last line without an end.

    Raises:
        OSError: if the file cannot be read.
    """
    prefix, lines, offset, at = prefix_of(group.label, entry.rank, entry.host), Lines(), 0, ""
    while True:
        texts: list[str] = []
        data = None
        while data is None or len(data) == _CHUNK:
            data = observer.read(entry, offset, _CHUNK)
            offset += len(data)
            texts += lines.feed(data)
        new: list[Line] = []
        for text in texts if follow else [*texts, *lines.finish()]:
            stamp = _STAMP.search(text, 0, _STAMP_WITHIN)
            at = stamp.group().replace("T", " ").replace(",", ".") if stamp else at
            new.append(Line(entry.rank, prefix, text, at))
        yield new


def merged(by_rank: Sequence[list[Line]], order: Order, tail: int | None = None) -> list[Line]:
    """Return the lines of several ranks in a list; a line without a time stays behind the line before it."""
    lines = [line for own in by_rank for line in own[0 if tail is None else max(0, len(own) - tail) :]]
    return sorted(lines, key=lambda line: line.at) if order == "time" else lines


def _print(lines: Iterable[Line], as_json: bool) -> None:
    for line in lines:
        data = {"rank": line.rank, "text": line.text}
        typer.echo(json.dumps(data) if as_json else line.prefix + line.text)
