"""What a detached group leaves for drivers to come is read only by the version that can."""

from __future__ import annotations

import pytest

import phalanx as px
from phalanx.group.epoch import GroupCard
from phalanx.group.roster import PROTOCOL, DetachedRecord


def a_record() -> DetachedRecord:
    record = GroupCard("g", 1, {"": {}}, {}, {"": "Cls"})
    return DetachedRecord(record, (), {"pool": ("key",)})


def test_the_protocol_is_compared_before_anything_is_unpickled() -> None:
    other = a_record().to_bytes().replace(b"protocol %d" % PROTOCOL, b"protocol 99")
    other = other.replace(b"DetachedRecord", b"NoSuchNameHere")  # whose classes are not here
    with pytest.raises(px.DeclarationError, match=rf"protocol 99; here {PROTOCOL}.*same version in both"):
        DetachedRecord.from_bytes("g", other)
    with pytest.raises(px.DeclarationError, match="protocol 1; here"):  # the first one had no header
        DetachedRecord.from_bytes("g", b"\x80\x05cno.such.module\nRecord\n.")


def test_a_record_without_members_is_of_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_BACKEND", "inline")
    monkeypatch.setattr("phalanx.api.attach.read_record", lambda backend, name: a_record())
    with pytest.raises(px.PlacementError, match="no detached group of that name"):
        px.attach("g")
