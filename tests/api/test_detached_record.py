"""The record that a detached group leaves for other drivers."""

from __future__ import annotations

import pytest

import phalanx as px
from phalanx.backends.inline import InlineBackend
from phalanx.group.epoch import GroupHandle
from phalanx.group.roster import PROTOCOL, DetachedRecord


def a_record() -> DetachedRecord:
    record = GroupHandle("g", 1, {"": {}}, {}, {"": "Cls"})
    return DetachedRecord(record, (), {"pool": ("key",)})


def test_the_protocol_is_compared_before_anything_is_unpickled() -> None:
    other = a_record().to_bytes().replace(b"protocol %d" % PROTOCOL, b"protocol 99")
    other = other.replace(b"DetachedRecord", b"NoSuchNameHere")  # a class that does not exist
    with pytest.raises(px.DeclarationError, match=rf"protocol 99; here {PROTOCOL}.*same version in both"):
        DetachedRecord.from_bytes("g", other)
    with pytest.raises(px.DeclarationError, match="protocol 1; here"):  # protocol 1 had no header
        DetachedRecord.from_bytes("g", b"\x80\x05cno.such.module\nRecord\n.")


def test_attach_finds_no_group_for_a_record_without_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_BACKEND", "inline")
    monkeypatch.setattr(InlineBackend, "published", lambda backend, key: a_record().to_bytes())
    with pytest.raises(px.PlacementError, match="no detached group of that name"):
        px.attach("g")


class Once(px.Worker):
    def __init__(self, fails: bool = False) -> None:
        if fails:
            raise ValueError("it fails")


def test_a_detached_group_cannot_be_resized() -> None:
    with px.ResourcePool([2], use_gpu=False, backend="inline", detached=True) as pool:
        group = px.WorkerGroup(pool, Once, name="fixed", detached=True)
        with pytest.raises(px.DeclarationError, match="a detached group cannot be resized"):
            px.resize(group, 1)


def test_the_record_of_another_group_of_the_same_name_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = px.ResourcePool([1], use_gpu=False, backend="inline", max_colocate_count=2, detached=True)
    with pool:
        first = px.WorkerGroup(pool, Once, name="same", detached=True)
        record = pool.backend_api.published("detached/same")
        with pytest.raises(ValueError, match="it fails"):
            px.WorkerGroup(pool, Once.bind(True), name="same", detached=True)
        assert pool.backend_api.published("detached/same") == record
        # as if all ranks of the first had died
        second = px.WorkerGroup(pool, Once, name="same", detached=True)
        first.close()
        record = pool.backend_api.published("detached/same")
        assert record is not None

        monkeypatch.setattr(InlineBackend, "find", lambda backend, name: name == "same:0" or None)
        with pytest.raises(px.PlacementError, match=r"px\.attach\('same'\)\.close\(pool=True\) ends it"):
            px.WorkerGroup(pool, Once, name="same", detached=True)
        assert pool.backend_api.published("detached/same") == record
        second.close()
        assert pool.backend_api.published("detached/same") is None
