"""What a detached group leaves for drivers to come is read only by the version that can."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import phalanx as px
from phalanx.group.roster import PROTOCOL, Roster


class Once(px.Worker):
    def __init__(self, fails: bool = False) -> None:
        if fails:
            raise ValueError("it fails")
        self.calls = 0

    @px.register
    def count(self) -> int:
        self.calls += 1
        return self.calls


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[px.ResourcePool]:
    monkeypatch.setenv("PHALANX_BACKEND", "inline")
    with px.ResourcePool([2], use_gpu=False, max_colocate_count=2, detached=True) as made:
        yield made


def test_the_protocol_is_compared_before_anything_is_unpickled(pool: px.ResourcePool) -> None:
    left = Roster.of(px.WorkerGroup(pool, Once, name="g", detached=True).core).to_bytes()
    other = left.replace(b"protocol %d" % PROTOCOL, b"protocol 99").replace(b"Roster", b"NoSuch")
    with pytest.raises(px.DeclarationError, match=rf"protocol 99; here {PROTOCOL}.*same version in both"):
        Roster.from_bytes("g", other)
    with pytest.raises(px.DeclarationError, match="protocol 1; here"):  # the first one had no header
        Roster.from_bytes("g", b"\x80\x05cno.such.module\nRecord\n.")


def test_the_roster_of_another_group_of_the_same_name_stays_and_is_not_followed(
    pool: px.ResourcePool,
) -> None:
    backend = pool.backend_api
    first = px.WorkerGroup(pool, Once, name="same", detached=True)
    attached, roster = px.attach("same"), backend.published("detached/same")
    with pytest.raises(ValueError, match="it fails"):
        px.WorkerGroup(pool, Once.bind(True), name="same", detached=True)
    assert backend.published("detached/same") == roster
    second = px.WorkerGroup(
        pool, Once, name="same", detached=True
    )  # as after the end of all ranks of the first
    second.restart()
    first.close()
    with pytest.raises(px.GroupClosed):
        attached.count()
    assert px.attach("same").count() == [1, 1]
    second.close()
    assert backend.published("detached/same") is None


def test_an_attached_handle_goes_on_after_its_owner_restarted_the_group_or_replaced_ranks(
    pool: px.ResourcePool,
) -> None:
    owned = px.WorkerGroup(pool, Once, name="moved", detached=True)
    attached = px.attach("moved", Once)
    assert attached.count() == [1, 1]
    owned.restart()
    assert attached.count() == [1, 1]
    px.replace_ranks(owned, 1, state="none")
    assert attached.count() == [2, 1]
    attached.close(pool=True)
    assert pool.backend_api.dead_of(owned.core.endpoints) == [0, 1]
    assert pool.backend_api.holders() == []
