"""`phalanx stack GROUP`: the stack of each rank, without stopping it."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.backends.backend_types import ProcessStatus
from phalanx.cli.common import (
    Address,
    AsJson,
    GroupName,
    Ranks,
    duration,
    observed_ranks,
    running_calls,
    show,
)
from phalanx.collect.message import rank_list
from phalanx.display.registry_records import RankRecord


def stack(group: GroupName, rank: Ranks = None, address: Address = None, as_json: AsJson = False) -> None:
    """Stack of each rank of a group now, also while it is inside native code or a collective.

    Ranks that stand at the same place are shown together.

    Examples:

      phalanx stack trainer

      phalanx stack trainer --rank 3 --rank 7

    Exit codes: 0 done; 2 no cluster, no such group or no such rank.
    """
    with observed_ranks(address, group, rank) as (observer, found, ranks):
        statuses = observer.sights(ranks, stacks=True)
    places = [f"\n{members}\n{text}" for members, text in by_place(ranks, statuses)]
    view = "\n".join([f"group {found.name}, {found.state}, epoch {found.epoch}", *places])
    show(as_json, [_data(*pair) for pair in zip(ranks, statuses, strict=True)], view)


def _data(entry: RankRecord, status: ProcessStatus) -> dict[str, object]:
    return {
        "rank": entry.rank,
        "host": entry.host,
        "pid": entry.pid,
        "reachable": status.reachable,
        "doing": running_calls(status),
        "stack": status.stack.splitlines(),
        "note": status.note,
    }


def by_place(ranks: Sequence[RankRecord], statuses: Sequence[ProcessStatus]) -> list[tuple[str, str]]:
    """Return ranks with their calls, and their stack. Ranks with equal stacks are grouped, in order of the first."""
    together: dict[tuple[str, tuple[str, ...], bool], list[tuple[RankRecord, float]]] = {}
    for entry, status in zip(ranks, statuses, strict=True):
        calls = running_calls(status)
        text = status.stack or status.note or "no stack"
        key = (text, tuple(call["method"] for call in calls), status.reachable)
        together.setdefault(key, []).append((entry, calls[0]["seconds"] if calls else 0.0))
    shown: list[tuple[str, str]] = []
    for (text, methods, reachable), members in together.items():
        hosts = {entry.host for entry, _ in members}
        where = f"host {members[0][0].host}" if len(hosts) == 1 else f"{len(hosts)} hosts"
        where += f", pid {members[0][0].pid}" if len(members) == 1 else ""
        state = "idle" if reachable else "cannot be reached"
        if methods:
            state = f"at {', '.join(methods)} for {duration(max(seconds for _, seconds in members))}"
        head = f"{rank_list(entry.rank for entry, _ in members)} ({where}): {state}"
        shown.append((head, "\n".join(f"  {line}" for line in text.splitlines())))
    return shown
