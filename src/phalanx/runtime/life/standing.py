"""Processes that stand by for ranks: where they are, who takes which, and when no more are made. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from phalanx.errors import PlacementError

__all__ = ["allowed", "assigned", "berths", "told"]

_LOSSES_EACH = 3


def berths(group: str, nodes: Sequence[str], free: Sequence[int], wanted: int) -> list[int]:
    """The slots beside whose ranks standbys are, by position; one may have several.

    They are on the nodes in turn, beginning with those that have the most slots: a process can become a rank of its own
    node only. On a node they are in the slots with the most free shares.

    Args:
        group: its name, for the error.
        nodes: of each slot.
        free: shares of each slot that nobody has.
        wanted: how many.

    Raises:
        PlacementError: there are not as many free shares.
    """
    if sum(free) < wanted:
        raise PlacementError(
            f"group {group!r}: px.Replace(standbys={wanted}) needs a share of a slot for each standby, and the slots "
            f"have {sum(free)} left; make the pool with a larger max_colocate_count, close other groups on it, or ask "
            "for fewer standbys"
        )
    left = list(free)
    by_node: dict[str, list[int]] = {}
    for slot, node in enumerate(nodes):
        by_node.setdefault(node, []).append(slot)
    order = sorted(by_node, key=lambda node: -len(by_node[node]))
    found: list[int] = []
    while len(found) < wanted:
        for node in order:
            slot = max(by_node[node], key=lambda one: left[one])
            if left[slot] and len(found) < wanted:
                left[slot] -= 1
                found.append(slot)
    return found


def assigned(lost: Mapping[int, str], there: Mapping[int, str], ready: Collection[int]) -> dict[int, int]:
    """Which standby becomes which rank: one of the rank's node, those that are ready first, each once.

    Args:
        lost: the node of each rank that is to have a process; the lowest ranks choose first.
        there: the node of each standby.
        ready: the standbys that have imported all that they need; one that has not is ahead of a new process still.

    Returns:
        The standby by rank; ranks without one get a new process.
    """
    free = sorted(there, key=lambda one: (one not in ready, one))
    found: dict[int, int] = {}
    for rank in sorted(lost):
        mine = next((one for one in free if there[one] == lost[rank]), None)
        if mine is not None:
            free.remove(mine)
            found[rank] = mine
    return found


def allowed(lost_at: Sequence[float], now: float, window_s: float, wanted: int) -> bool:
    """Whether one more standby is made, after some were lost at these times without having been a rank.

    Not where there were three for each within the window: what comes back each time is not mended by another.
    """
    return sum(1 for at in lost_at if now - at < window_s) < _LOSSES_EACH * wanted


def told(states: Sequence[str], why: str) -> str:
    """How many there are, in words: ``2 of 3 standbys ready, 1 starting``."""
    counts = Counter(states)
    rest = "".join(f", {counts[state]} {state}" for state in ("starting", "missing") if counts[state])
    because = f" ({why})" if why and counts["missing"] else ""
    return f"{counts['ready']} of {len(states)} standbys ready{rest}{because}"
