"""Record of a detached group, published for later drivers."""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass

import cloudpickle

from phalanx.backends.backend_types import Backend
from phalanx.errors import DeclarationError
from phalanx.group.epoch import GroupCard
from phalanx.group.group import Group
from phalanx.topology.slots import Slot
from phalanx.wire.messages import ProcessInfo

#: Of the record: raised where a driver could not read what another version has left.
PROTOCOL = 3
_HEADER = b"phalanx group, protocol %d\n"
_HEADER_READ = re.compile(rb"phalanx group, protocol (\d+)\n")


@dataclass(frozen=True)
class DetachedRecord:
    """Record of a detached group for later drivers; plain values only.

    It is published as a line of bytes, which every version reads, and the pickled record, which versions of the same
    protocol read.
    """

    card: GroupCard
    slots: tuple[Slot, ...]
    facts: tuple[ProcessInfo, ...]
    reservations: dict[str, tuple[str, ...]]

    def to_bytes(self) -> bytes:
        return _HEADER % PROTOCOL + cloudpickle.dumps(self)

    @staticmethod
    def from_bytes(name: str, kept: bytes) -> DetachedRecord:
        """The record of the group of that name.

        Raises:
            DeclarationError: another version of the library started the group; nothing of its record was unpickled.
        """
        head = _HEADER_READ.match(kept)
        if head is None or int(head[1]) != PROTOCOL:
            raise DeclarationError(
                f"group {name!r} was started by another version of phalanx (protocol "
                f"{head[1].decode() if head else '1'}; here {PROTOCOL}); use the same version in both drivers"
            )
        return pickle.loads(memoryview(kept)[head.end() :])


def _key(name: str) -> str:
    return f"detached/{name}"


def publish_record(core: Group) -> None:
    """Publish the record that ``px.attach`` needs."""
    record = DetachedRecord(
        card=core.card,
        slots=tuple(endpoint.slot for endpoint in core.endpoints),
        facts=tuple(endpoint.facts for endpoint in core.endpoints),
        reservations={key: tuple(held.reservation.keys) for key, held in core.pool.holdings.items()},
    )
    core.backend.publish(_key(core.name), record.to_bytes())


def withdraw_record(core: Group) -> None:
    """Take the record back: the group is closed."""
    core.backend.publish(_key(core.name), None)


def read_record(backend: Backend, name: str) -> DetachedRecord | None:
    """Return the record of the detached group of that name, None if there is none.

    Raises:
        DeclarationError: another version of the library started the group.
    """
    published = backend.published(_key(name))
    return None if published is None else DetachedRecord.from_bytes(name, published)
