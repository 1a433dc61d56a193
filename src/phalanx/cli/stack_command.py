"""`phalanx stack GROUP`: where each rank stands, without stopping it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from phalanx.backends.backend_types import ProcessStatus
from phalanx.cli.common import Address, AsJson, GroupName, chosen_ranks, cluster_reader
from phalanx.cli.overview import doing, duration
from phalanx.collect.message import rank_list
from phalanx.display.registry_records import RankRecord


def stack(
    group: GroupName,
    rank: Annotated[
        list[int] | None, typer.Option("--rank", "-r", help="Only this rank; repeatable.")
    ] = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Where each rank of a group stands now, also while it is inside native code or a collective.

    Ranks that stand at the same place are shown together.

    Examples:

      phalanx stack trainer

      phalanx stack trainer --rank 3 --rank 7

    Exit codes: 0 done; 2 no cluster, no such group or no such rank.
    """
    from phalanx.backends.ray.node_agents import RankObserver  # loads Ray

    cluster = cluster_reader(address)
    found = cluster.notices().find(group)
    ranks = chosen_ranks(found, rank)
    observer = RankObserver(cluster.address)
    try:
        sights = observer.sights(ranks, stacks=True)
    finally:
        observer.close()
    if as_json:
        typer.echo(
            json.dumps([_data(entry, sight) for entry, sight in zip(ranks, sights, strict=True)], indent=1)
        )
        return
    typer.echo(f"group {found.name}, {found.state}, epoch {found.epoch}")
    for members, text in alike(ranks, sights):
        typer.echo(f"\n{members}\n{text}")


def alike(ranks: Sequence[RankRecord], sights: Sequence[ProcessStatus]) -> list[tuple[str, str]]:
    """Ranks with what they do, and their stack; those of one stack together, in the order of their first rank."""
    together: dict[tuple[str, tuple[str, ...], bool], list[tuple[RankRecord, float]]] = {}
    for entry, sight in zip(ranks, sights, strict=True):
        calls = doing(sight)
        key = (_stack(sight), tuple(method for method, _ in calls), sight.reachable)
        together.setdefault(key, []).append((entry, max((seconds for _, seconds in calls), default=0.0)))
    shown: list[tuple[str, str]] = []
    for (text, methods, reachable), members in together.items():
        hosts = sorted({entry.host for entry, _ in members})
        where = f"host {hosts[0]}" if len(hosts) == 1 else f"{len(hosts)} hosts"
        where += f", pid {members[0][0].pid}" if len(members) == 1 else ""
        since = duration(max(seconds for _, seconds in members))
        at = (
            f"at {', '.join(methods)} for {since}"
            if methods
            else "idle"
            if reachable
            else "cannot be reached"
        )
        head = f"{rank_list(entry.rank for entry, _ in members)} ({where}): {at}"
        shown.append((head, "\n".join(f"  {line}" for line in text.splitlines())))
    return shown


def _stack(sight: ProcessStatus) -> str:
    return sight.stack or sight.note or "no stack"


def _data(entry: RankRecord, sight: ProcessStatus) -> dict[str, Any]:
    return {
        "rank": entry.rank,
        "host": entry.host,
        "pid": entry.pid,
        "reachable": sight.reachable,
        "doing": [{"method": method, "seconds": seconds} for method, seconds in doing(sight)],
        "stack": sight.stack.splitlines(),
        "note": sight.note,
    }
