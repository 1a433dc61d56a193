"""`phalanx top`: live view of a cluster."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from phalanx.cli.common import (
    Address,
    AsJson,
    OnlyGroup,
    cluster_reader,
    duration,
    rank_status,
    show,
    titled_table,
)

if TYPE_CHECKING:
    from phalanx.backends.ray.cluster import ClusterReader  # loads Ray
    from phalanx.backends.ray.node_agents import RankObserver  # loads Ray

_STDIN = 0
_LINES_PER_GROUP = 6
#: Columns of the table of channels, which are fields of a channel, and the titles of some.
_CHANNEL_VALUES = (
    *("name", "limit", "waiting", "waiting_bytes", "oldest", "taken"),
    *("puts", "takes", "per_second", "dropped", "lost"),
)
_CHANNEL_TITLES = {"name": "channel", "limit": "may wait", "waiting_bytes": "bytes", "per_second": "items/s"}
_STYLES = {"ready": "green", "starting": "yellow", "restarting": "yellow", "broken": "bold red"}

Once = Annotated[bool, typer.Option("--once", help="Print one look and end.")]
Every = Annotated[float, typer.Option("--every", min=0.1, help="Seconds between looks.")]


def top(
    group: OnlyGroup = None,
    once: Once = False,
    every: Every = 1.0,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Show runs, groups and ranks live: running methods and their seconds.

    Ranks are observed from another process, so busy ranks are shown too, even inside native code. Ends with q or
    Ctrl-C.

    Examples:

      phalanx top

      phalanx top trainer --every 0.5

      phalanx top --once --json | jq '.runs[].groups[].state'

    Exit codes: 0 done; 2 no cluster, or no such group.
    """
    from phalanx.backends.ray.node_agents import RankObserver  # loads Ray

    cluster = cluster_reader(address)
    with contextlib.closing(RankObserver(cluster.address)) as observer:
        if not (once or as_json) and sys.stdout.isatty():
            # another reader for each look, which raises PlacementError once the cluster has ended
            _show_live(lambda: overview(cluster_reader(cluster.address), observer, group), every)
        else:
            seen = overview(cluster, observer, group)
            show(as_json, seen, render(seen))


def overview(cluster: ClusterReader, observer: RankObserver, group: str | None) -> dict[str, Any]:
    """Return the groups and channels of each run, and the calls of each rank, as plain data.

    Raises:
        NoSuchGroup: if the requested group does not exist.
    """
    records = cluster.registry()
    groups = records.groups if group is None else (records.find(group),)
    ranks = [rank for found in groups for rank in found.ranks]
    data = dict(zip(ranks, map(rank_status, ranks, observer.inspect(ranks)), strict=True))
    shown = [{**asdict(one), "ranks": [data[rank] for rank in one.ranks]} for one in groups]
    runs: list[dict[str, Any]] = []
    for run in records.runs:
        own = [found for found in shown if found["run"] == run.run]
        flows = [asdict(flow) for flow in records.channels if flow.run == run.run and group is None]
        if own or group is None:
            runs.append({**asdict(run), "groups": own, "channels": flows})
    return {"address": cluster.address, "at": time.time(), "runs": runs}


def render(overview: dict[str, Any], rows: int | None = None) -> Any:
    """Return tables for a terminal; at most ``rows`` ranks of each group, the busiest first."""
    if not overview["runs"]:
        return Text(f"no driver of Phalanx runs on the cluster at {overview['address']}")
    parts: list[Any] = []
    at = overview["at"]
    for run in overview["runs"]:
        since = time.strftime("%H:%M", time.localtime(run["started"]))
        where = f"  pid {run['pid']} on {run['host']}  up {duration(at - run['started'])}, since {since}\n"
        if run["ended"]:  # and has left detached groups
            where = "  its driver has ended\n"
        parts.append(
            Text.assemble(("run ", "dim"), (run["run"], "bold cyan"), f"  {run['script']}", (where, "dim"))
        )
        parts += [_group_table(group, at, rows) for group in run["groups"]] or [Text("  no groups\n")]
        parts += [_channel_table(run["channels"], at)] if run["channels"] else []
    return Group(*parts)


def _group_table(group: dict[str, Any], at: float, rows: int | None) -> Any:
    ranks: list[dict[str, Any]] = group["ranks"]
    facts = f" for {duration(at - group['changed'])}, {_counted(len(ranks))} of {group['label']}, pool {group['pool']}"
    facts += f", epoch {group['epoch']}" if group["epoch"] else ""
    facts += "".join(f", weights {name} {text}" for name, text in group["weights"].items())
    state = (group["state"], _STYLES.get(group["state"], ""))
    busiest = sorted(ranks, key=lambda rank: -max((call["seconds"] for call in rank["doing"]), default=-1.0))
    cells = [
        {
            "rank": rank["rank"],
            "host": rank["host"],
            "pid": rank["pid"],
            "device": rank["accelerator"],
            "doing": _doing(rank),
        }
        for rank in sorted(busiest[:rows], key=lambda rank: rank["rank"])
    ]
    hidden = len(ranks) - len(cells)
    notes = [_counted(hidden, "more ")] if hidden else []
    notes += [f"cause: {group['cause']}"] if group["cause"] and group["state"] != "ready" else []
    return titled_table(Text.assemble((group["name"], "bold"), "  ", state, (facts, "dim")), cells, *notes)


def _doing(rank: dict[str, Any]) -> Text:
    """Return the calls of a rank, and below them the line that the rank reports about itself."""
    if not rank["reachable"]:
        return Text(rank["note"], "red")
    calls = ", ".join(f"{call['method']} {duration(call['seconds'])}" for call in rank["doing"])
    text = Text(calls, "cyan") if calls else Text("idle", "dim")
    return Text.assemble(text, "\n", (rank["status"], "dim")) if rank["status"] else text


def _channel_table(channels: Sequence[dict[str, Any]], at: float) -> Any:
    cells: list[dict[str, Any]] = []
    for channel in channels:
        oldest = None if channel["oldest"] is None else duration(at - channel["oldest"])
        values = channel | {"oldest": oldest, "per_second": round(channel["per_second"], 1)}
        cells.append({_CHANNEL_TITLES.get(name, name): values[name] for name in _CHANNEL_VALUES})
    return titled_table(Text("channels", "bold"), cells)


def _counted(ranks: int, which: str = "") -> str:
    return f"{ranks} {which}rank{'s' * (ranks != 1)}"


def _show_live(look: Callable[[], dict[str, Any]], every: float) -> None:
    console = Console()
    terminals = [_STDIN] if os.isatty(_STDIN) else []

    def view() -> Any:
        seen = look()
        groups = sum(len(run["groups"]) for run in seen["runs"])
        return render(seen, max(2, (console.height - 2) // max(1, groups) - _LINES_PER_GROUP))

    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        for terminal in terminals:  # to read keys without Enter
            stack.callback(termios.tcsetattr, terminal, termios.TCSADRAIN, termios.tcgetattr(terminal))
            tty.setcbreak(terminal)
        live = stack.enter_context(Live(view(), console=console, screen=True, auto_refresh=False))
        # Not by sys.stdin, in whose buffer select() does not see the rest of an arrow key. No bytes: it is closed.
        while not select.select(terminals, [], [], every)[0] or b"q" not in (os.read(_STDIN, 1024) or b"q"):
            live.update(view(), refresh=True)
