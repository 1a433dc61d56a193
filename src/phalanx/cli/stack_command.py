"""`phalanx stack GROUP`: the stack of each rank, without stopping it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.cli.common import Address, AsJson, GroupName, Ranks, duration, observed_ranks, rank_status, show
from phalanx.collect.message import rank_list


def stack(group: GroupName, rank: Ranks = None, address: Address = None, as_json: AsJson = False) -> None:
    """Print the current stack of each rank of a group, even inside native code or a collective.

    Ranks with equal stacks are shown together.

    Examples:

      phalanx stack trainer

      phalanx stack trainer --rank 3 --rank 7

    Exit codes: 0 done; 2 no cluster, no such group or no such rank.
    """
    with observed_ranks(address, group, rank) as (observer, found, ranks):
        statuses = observer.inspect(ranks, stacks=True)
    data = list(map(rank_status, ranks, statuses))
    places = [f"\n{members}\n{text}" for members, text in by_place(data)]
    show(as_json, data, "\n".join([f"group {found.name}, {found.state}, epoch {found.epoch}", *places]))


def by_place(ranks: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return pairs of ranks with their calls, and stack. Ranks with equal stacks and calls are grouped."""
    together: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for rank in ranks:
        lines = rank["stack"] or rank["note"].splitlines() or ["no stack"]
        methods = ", ".join(call["method"] for call in rank["doing"])
        together.setdefault((tuple(lines), methods, rank["reachable"]), []).append(rank)
    shown: list[tuple[str, str]] = []
    for (lines, methods, reachable), members in together.items():
        hosts = {rank["host"] for rank in members}
        where = f"host {members[0]['host']}" if len(hosts) == 1 else f"{len(hosts)} hosts"
        where += f", pid {members[0]['pid']}" if len(members) == 1 else ""
        state = "idle" if reachable else "cannot be reached"
        if methods:
            state = f"at {methods} for {duration(max(rank['doing'][0]['seconds'] for rank in members))}"
        head = f"{rank_list(rank['rank'] for rank in members)} ({where}): {state}"
        shown.append((head, "\n".join(f"  {line}" for line in lines)))
    return shown
