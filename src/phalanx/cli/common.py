"""What the commands that look at a cluster share: its address, its published groups, names for completion."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.display.registry_records import GroupRecord, RankRecord
from phalanx.errors import DispatchError

if TYPE_CHECKING:
    from phalanx.backends.ray.cluster_reader import ClusterReader  # loads Ray

Address = Annotated[
    str | None,
    typer.Option(
        "--address", help="The cluster, host:port. (default: RAY_ADDRESS, else the one on this machine)"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print as JSON.")]


def cluster_reader(address: str | None) -> ClusterReader:
    """The cluster of that address.

    Raises:
        PlacementError: there is none, or it does not answer.
    """
    from phalanx.backends.ray.cluster_reader import ClusterReader  # loads Ray

    return ClusterReader(address)


def complete_group(incomplete: str) -> list[str]:
    """Names of groups, for the shell; none where there is no cluster."""
    with contextlib.suppress(Exception):  # a shell that completes a word shows no errors
        groups = cluster_reader(None).notices().groups
        return sorted(group.name for group in groups if group.name.startswith(incomplete))
    return []


GroupName = Annotated[
    str,
    typer.Argument(
        metavar="GROUP",
        help="Name of a group, or the beginning or end of it; RUN/NAME where names repeat.",
        autocompletion=complete_group,
    ),
]


def chosen_ranks(group: GroupRecord, ranks: list[int] | None) -> tuple[RankRecord, ...]:
    """The ranks of those numbers; all without any.

    Raises:
        DispatchError: the group has no such rank.
    """
    missing = sorted(set(ranks or ()) - {entry.rank for entry in group.ranks})
    if missing:
        raise DispatchError(
            f"group {group.name!r} has no rank {missing[0]}: its ranks are 0 to {len(group.ranks) - 1}"
        )
    return tuple(entry for entry in group.ranks if not ranks or entry.rank in ranks)
