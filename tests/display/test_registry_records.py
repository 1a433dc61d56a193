"""Records in the cluster registry: reading, finding groups by name, and records of dead drivers."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.display.registry_records import (
    ChannelRecord,
    ClusterRegistry,
    GroupRecord,
    NoSuchGroup,
    RankRecord,
    RunRecord,
    read_registry,
    to_bytes,
)
from phalanx.wire.messages import SideChannel


def run(name: str, job: str = "01", started: float = 1.0) -> RunRecord:
    return RunRecord(name, job, 7, "host", started, "train.py")


def group(name: str, of: str = "a", number: int = 1, detached: bool = False) -> GroupRecord:
    side = SideChannel(1, 2, 3, 4, "mark")
    ranks = (
        RankRecord(0, "node", "host", 11, "0", "/logs/rank-0.log", side),
        RankRecord(1, "node", "host", 12),
    )
    facts: dict[str, Any] = {"roles": {"actor": "Actor"}, "methods": {"actor": ["update"]}}
    return GroupRecord(of, number, name, "ready", 0, "pool", 2.0, **facts, detached=detached, ranks=ranks)


def test_registry_records_are_read_as_written_and_unreadable_records_are_skipped() -> None:
    entries = [run("a"), run("b", started=0.5), group("one"), group("two", number=2)]
    written = {entry.key: to_bytes(entry) for entry in entries}
    others = [b"", b"{}", b"[]", b'{"unknown": 1}', b"\xff"]
    written |= {f"{kind}/x/{number}": data for kind in ("run", "group") for number, data in enumerate(others)}

    read = read_registry({**written, "else": b"{}"})

    assert read.runs == (run("b", started=0.5), run("a"))
    assert read.groups == (group("one"), group("two", number=2))


def test_a_group_is_found_by_name_prefix_or_suffix_or_refused_with_the_known_names() -> None:
    names = ("trainer", "trainer-2", "rollout", "Zvl4r5TrainingWorker", "twin")
    notices = ClusterRegistry((), (*map(group, names), group("rollout", number=2), group("twin", of="b")))

    assert notices.find("roll") == group("rollout", number=2)  # the newest of a run
    assert notices.find("trainer").name == "trainer"  # not trainer-2, which has this prefix
    assert notices.find("TrainingWorker").name == "Zvl4r5TrainingWorker"  # verl's random prefix
    assert (notices.find("b/twin").name, notices.find("b/twin").run) == ("twin", "b")
    with pytest.raises(NoSuchGroup, match="a/twin, b/twin"):
        notices.find("twin")
    with pytest.raises(NoSuchGroup, match=r"'x'.*a/trainer, a/trainer-2"):
        notices.find("x")
    with pytest.raises(NoSuchGroup, match="no driver"):
        ClusterRegistry((), ()).find("x")


def test_records_of_dead_drivers_are_stale_except_for_detached_groups_with_live_processes() -> None:
    flow = ChannelRecord("b", "rollouts", "8 items", 3, 10, 1, 0, 2, 5, 0, 0, 1.5, 9.0, 2.0)
    groups = (group("one", of="a"), group("two", of="b"), group("lost", of="gone"))
    entries = [run("a", "01"), run("b", "02"), *groups, flow]
    handles = {"channel/01/kept": b"\x80pickled", "channel/02/rollouts": b"\x80pickled"}
    notices = read_registry({entry.key: to_bytes(entry) for entry in entries} | handles)
    detached = ClusterRegistry((run("a", "01"),), (group("server", detached=True), group("other", number=2)))

    assert (notices.channels, notices.handles) == ((flow,), tuple(handles))
    lost = ["group/b/1", "group/gone/1", "run/b", "flow/b/rollouts", "channel/02/rollouts"]
    assert notices.stale(["01"], ()) == lost
    assert detached.stale([], ["server:0"]) == ["group/a/2"]
    assert detached.stale([], []) == ["group/a/1", "group/a/2", "run/a"]
