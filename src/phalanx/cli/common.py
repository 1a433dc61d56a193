"""Options, lookups and texts that the commands on a cluster share."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from phalanx.backends.backend_types import ProcessStatus
from phalanx.display.registry_records import RankRecord
from phalanx.display.tables import Table

if TYPE_CHECKING:
    from phalanx.backends.ray.cluster import ClusterReader  # loads Ray

#: Displayed names of internal methods.
_NAMES = {"__phalanx_run__": "run(...)", "": "a call"}
_GROUP_HELP = "Name of a group, or the beginning or end of it; RUN/NAME if names repeat."
_ADDRESS_HELP = "The cluster, host:port. (default: RAY_ADDRESS, else the one on this machine)"


def cluster_reader(address: str | None) -> ClusterReader:
    """Return a reader of the cluster at ``address``.

    Raises:
        PlacementError: if there is no cluster, or it does not respond.
    """
    from phalanx.backends.ray.cluster import ClusterReader  # loads Ray

    return ClusterReader(address)


def show(as_json: bool, data: Any, view: RenderableType) -> None:
    """Print plain data as JSON, or else its view; text is printed unchanged."""
    if as_json or isinstance(view, str):
        typer.echo(json.dumps(data, indent=1, default=str) if as_json else view)
    else:
        Console().print(view)


def titled_table(title: Text, rows: Sequence[dict[str, Any]], *notes: str) -> RenderableType:
    """Return a title and a table of rows, which are dicts of cells by column."""
    columns = tuple(rows[0]) if rows else ()
    return Group(title, Table("", columns, tuple(tuple(row.values()) for row in rows), notes))


def rank_status(entry: RankRecord, status: ProcessStatus) -> dict[str, Any]:
    """Return a rank and its activity as plain data; of its running calls, the longest is the first."""
    doing: list[dict[str, Any]] = []
    for number, seconds in sorted(status.running.items(), key=lambda call: -call[1]):
        role, dot, method = status.methods.get(number, "").rpartition(".")
        doing.append({"method": role + dot + _NAMES.get(method, method), "seconds": seconds})
    return {
        **{name: getattr(entry, name) for name in ("rank", "host", "node_id", "pid", "accelerator", "log")},
        **{name: getattr(status, name) for name in ("reachable", "note", "status")},
        "doing": doing,
        "stack": status.stack.splitlines(),
    }


def duration(seconds: float) -> str:
    """Return seconds as text: 0.4 s, 12 s, 3 min, 2 h 5 min, 3 d 2 h."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    if minutes < 120:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def complete_group(incomplete: str) -> list[str]:
    """Return the names of groups for shell completion; none without a cluster."""
    with contextlib.suppress(Exception):  # shell completion shows no errors
        groups = cluster_reader(None).registry().groups
        return sorted(group.name for group in groups if group.name.startswith(incomplete))
    return []


GroupName = Annotated[str, typer.Argument(metavar="GROUP", help=_GROUP_HELP, autocompletion=complete_group)]
OnlyGroup = Annotated[
    str | None, typer.Argument(metavar="[GROUP]", help="Only this group.", autocompletion=complete_group)
]
Address = Annotated[str | None, typer.Option("--address", help=_ADDRESS_HELP)]
AsJson = Annotated[bool, typer.Option("--json", help="Print as JSON.")]
