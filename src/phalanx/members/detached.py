"""Record of a detached group, kept by rank 0 for later drivers."""

from __future__ import annotations

import contextlib
import pickle
import re
from dataclasses import dataclass
from typing import Any

import cloudpickle

from phalanx.backends.api import Backend
from phalanx.backends.backend_types import Endpoint
from phalanx.calls.run_on import run_on
from phalanx.calls.timeouts import bounded
from phalanx.errors import DeclarationError, GroupClosed
from phalanx.group.epoch import GroupCard
from phalanx.group.group import Group
from phalanx.topology.slots import Slot
from phalanx.wire.messages import ProcessInfo, host_call
from phalanx.worker import handlers as questions

#: Of the record: raised where a driver could not read what another version has left.
PROTOCOL = 2
_HEADER = b"phalanx group, protocol %d\n"
_HEADER_READ = re.compile(rb"phalanx group, protocol (\d+)\n")


@dataclass(frozen=True)
class DetachedRecord:
    """Record of a detached group for later drivers; plain values only.

    It is kept as a line of bytes, which every version reads, and the pickled record, which those of one protocol read.
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
            raise _other_version(name, head[1].decode() if head else "1")
        return pickle.loads(memoryview(kept)[head.end() :])


def _other_version(name: str, theirs: str) -> DeclarationError:
    return DeclarationError(
        f"group {name!r} was started by another version of phalanx (protocol {theirs}; here {PROTOCOL}); "
        "use the same version in both drivers"
    )


def leave_record(core: Group) -> None:
    """Store with rank 0 what ``px.attach`` needs."""
    record = DetachedRecord(
        card=core.card,
        slots=tuple(endpoint.slot for endpoint in core.endpoints),
        facts=tuple(endpoint.facts for endpoint in core.endpoints),
        reservations={
            key: core.backend.reservation_keys(held.reservation) for key, held in core.pool.holdings.items()
        },
    )
    kept = run_on(
        core, questions.keep_record, record.to_bytes(), ranks=(0,), title="keep_record", checked=False
    )
    kept.result(None)


def recall_record(backend: Backend, name: str, handle: Any, timeout: float) -> DetachedRecord:
    """Ask rank 0 for its record.

    Raises:
        DeclarationError: another version of the library started the group.
        GroupClosed: it does not answer in time, or is gone.
    """
    endpoint = Endpoint(Slot(0, 0, ""), handle, None)  # pyright: ignore[reportArgumentType]
    ticket = backend.submit(endpoint, host_call(questions.recall_record))
    with contextlib.suppress(GroupClosed):
        done, _ = backend.wait([ticket.value], 1, bounded(timeout))
        kept = backend.outcome(ticket.value) if done else None
        if kept is not None and kept.failure is not None:  # its process has no such function
            raise _other_version(name, "unknown")
        if kept is not None and isinstance(kept.value, bytes):
            return DetachedRecord.from_bytes(name, kept.value)
    raise GroupClosed(
        f"px.attach({name!r}): rank 0 of the group did not answer within {timeout:g} s; it is busy or gone",
        group=name,
    )
