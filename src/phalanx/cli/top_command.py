"""`phalanx top`: what runs on a cluster, live."""

from __future__ import annotations

import contextlib
import json
import select
import sys
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from phalanx.backends.ray.usage import Usage
from phalanx.cli.common import Address, AsJson, cluster_reader, complete_group
from phalanx.cli.overview import GroupNow, Overview, rank_now, render
from phalanx.display.registry_records import RankRecord

if TYPE_CHECKING:
    from phalanx.backends.ray.cluster_reader import ClusterReader  # loads Ray
    from phalanx.backends.ray.node_agents import RankObserver  # loads Ray

_BETWEEN_LOOKS_S = 0.3
_LINES_PER_GROUP = 6


def top(
    group: Annotated[
        str | None,
        typer.Argument(metavar="[GROUP]", help="Only this group.", autocompletion=complete_group),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one look and end.")] = False,
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between looks.")] = 1.0,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Live view of runs, groups and ranks: busy with which method since when, memory, CPU, GPU.

    A rank is never asked: what it does is read from beside it, also while it is inside native code. Ends with q or
    Ctrl-C.

    Examples:

      phalanx top

      phalanx top trainer --every 0.5

      phalanx top --once --json | jq '.runs[].groups[].state'

    Exit codes: 0 done; 2 no cluster, or no such group.
    """
    from phalanx.backends.ray.node_agents import RankObserver  # loads Ray

    cluster = cluster_reader(address)
    observer = RankObserver(cluster.address)
    looker = Looker(cluster, observer, group)
    try:
        if once or as_json or not sys.stdout.isatty():
            _once(looker, as_json)
        else:
            _live(looker, every)
    finally:
        observer.close()


class Looker:
    """Takes one look after another; what changes between two of them tells the use of processors."""

    def __init__(self, cluster: ClusterReader, observer: RankObserver, group: str | None) -> None:
        self._cluster = cluster
        self._observer = observer
        self._group = group
        self._before: dict[tuple[int, str], Usage | None] = {}

    def look(self) -> Overview:
        """What there is now.

        Raises:
            NoSuchGroup: the group that was asked for is not there.
        """
        notices = self._cluster.notices()
        groups = notices.groups if self._group is None else (notices.find(self._group),)
        ranks = [rank for group in groups for rank in group.ranks]
        sights = self._observer.sights(ranks)
        usage = self._observer.usage(ranks)
        gpus = self._observer.gpus(ranks) if any(rank.accelerator for rank in ranks) else [None] * len(ranks)
        now = {
            _key(rank): rank_now(rank, sight, self._before.get(_key(rank)), used, gpu)
            for rank, sight, used, gpu in zip(ranks, sights, usage, gpus, strict=True)
        }
        self._before = {_key(rank): used for rank, used in zip(ranks, usage, strict=True)}
        runs = {group.run for group in groups}
        return Overview(
            address=self._cluster.address,
            at=time.time(),
            runs=tuple(run for run in notices.runs if self._group is None or run.run in runs),
            groups=tuple(GroupNow(group, tuple(now[_key(rank)] for rank in group.ranks)) for group in groups),
            channels=notices.channels if self._group is None else (),
        )


def _key(rank: RankRecord) -> tuple[int, str]:
    return rank.pid, rank.node_id


def _once(looker: Looker, as_json: bool) -> None:
    looker.look()
    time.sleep(_BETWEEN_LOOKS_S)  # use of processors is what happens between two looks
    overview = looker.look()
    if as_json:
        typer.echo(json.dumps(overview.to_dict(), indent=1))
    else:
        Console().print(render(overview))


def _live(looker: Looker, every: float) -> None:
    console = Console()

    def view() -> Any:
        overview = looker.look()
        return render(overview, _rows(console.height, len(overview.groups)))

    with (
        contextlib.suppress(KeyboardInterrupt),
        _keys() as key_within,
        Live(view(), console=console, screen=True, auto_refresh=False) as live,
    ):
        while key_within(every) != "q":
            live.update(view(), refresh=True)


def _rows(height: int, groups: int) -> int:
    """How many ranks of each group fit on the screen."""
    return max(2, (height - 2) // max(1, groups) - _LINES_PER_GROUP)


@contextlib.contextmanager
def _keys() -> Generator[Any]:
    """Reads single keys of a terminal, without waiting for Enter."""

    def key_within(seconds: float) -> str:
        if not select.select([sys.stdin], [], [], seconds)[0]:
            return ""
        return sys.stdin.read(1) or "q"

    if not sys.stdin.isatty():
        yield lambda seconds: time.sleep(seconds)
        return
    import termios  # Unix alone has them
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin.fileno())
        yield key_within
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
