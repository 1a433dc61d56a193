"""Preemption notices of draining nodes, and failures that follow them."""

from __future__ import annotations

import phalanx as px
from phalanx.backends.backend_types import DrainingNode
from phalanx.group.preemption_notices import NoticeQueue, PreemptionNotice, turn
from phalanx.testing.scripted import scripted
from phalanx.topology.slots import SlotInfo
from tests.support.fault_workers import Trouble

SLOTS = [SlotInfo(node, f"host-{node}", "", (), None) for node in "aab"]


def going(node: str, deadline: float | None = 100.0) -> list[DrainingNode]:
    return [DrainingNode(node, deadline, "preempted")]


def test_a_notice_names_ranks_host_deadline_and_reason_and_is_renewed_when_they_change() -> None:
    board = NoticeQueue("actor")
    board.see([*going("a"), *going("c")], SLOTS)
    assert board.take() == [PreemptionNotice("actor", (0, 1), "a", "host-a", 100.0, "preempted")]

    board.see(going("a", 50.0), SLOTS)
    board.see(going("a", 50.0), [*SLOTS, SLOTS[0]])

    assert [(one.deadline, one.ranks) for one in board.take()] == [(50.0, (0, 1)), (50.0, (0, 1, 3))]


def test_a_notice_queue_knows_the_ranks_to_move_after_their_node_was_lost() -> None:
    board = NoticeQueue("actor")
    board.see(going("a"), SLOTS)
    board.see([], SLOTS)

    assert board.ranks_to_move(["b", "a", "a"]) == (1, 2)
    assert board.explains(["a", "a"])
    assert not board.explains(["a", "b"])
    assert not board.explains([])


def test_notices_are_delivered_once_also_to_on_notice_whose_errors_are_ignored() -> None:
    seen: list[px.PreemptionNotice] = []

    def note(notice: px.PreemptionNotice) -> None:
        seen.append(notice)
        raise SystemExit("of the user")

    with scripted(lambda what, number: "fine") as transport, px.ResourcePool([2], backend="inline") as pool:
        group, asked = px.WorkerGroup(pool, Trouble, on_notice=note), px.WorkerGroup(pool, Trouble)
        before = px.preemption_notices(asked)
        transport.going = going("inline", None)
        notices = [px.preemption_notices(asked) for _ in range(2)]  # without waiting
        turn()
        turn()

        assert [before, [one.ranks for one in notices[0]], notices[1]] == [[], [(0, 1)], []]
        assert [one.ranks for one in seen] == [(0, 1)]
        assert px.preemption_notices(group) == seen  # callers get the notice, too
        assert group.ping() == [0, 1]
