"""Detached groups: found again by name, from any driver of the cluster."""

from __future__ import annotations

import contextlib
import pickle
import re
from dataclasses import dataclass
from typing import Any

import cloudpickle

from phalanx.api.selection import Selection
from phalanx.api.view import GroupView
from phalanx.backends.backend_types import Endpoint
from phalanx.calls.run_on import gather_before_end, only_answer, run_on
from phalanx.calls.timeouts import bounded
from phalanx.debug.trace import from_environment
from phalanx.declare.bind import Colocation, WorkerClass, as_bound
from phalanx.errors import DeclarationError, GroupClosed, PlacementError
from phalanx.group.epoch import GroupCard
from phalanx.group.group import Group
from phalanx.pools.pool import ResourcePool
from phalanx.session import session as cluster
from phalanx.topology.slots import Slot
from phalanx.wire.messages import HOST, ProcessInfo, host_call
from phalanx.worker import handlers as questions

#: Of the record: raised where a driver could not read what another version has left.
PROTOCOL = 2
_HEADER = b"phalanx group, protocol %d\n"
_HEADER_READ = re.compile(rb"phalanx group, protocol (\d+)\n")
_GATHERED_WITHIN_S = 5.0


@dataclass(frozen=True)
class DetachedRecord:
    """What rank 0 of a detached group keeps for drivers to come; plain values only.

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


def leave_record(core: Group, pool: ResourcePool) -> None:
    """Store with rank 0 what ``px.attach`` needs."""
    record = DetachedRecord(
        card=core.card,
        slots=tuple(endpoint.slot for endpoint in core.endpoints),
        facts=tuple(endpoint.facts for endpoint in core.endpoints),
        reservations={
            key: core.transport.reservation_keys(held.reservation) for key, held in pool.holdings.items()
        },
    )
    kept = run_on(
        core, questions.keep_record, record.to_bytes(), ranks=(0,), title="keep_record", checked=False
    )
    only_answer(kept, None)


class AttachedGroup(GroupView):
    """A detached group as another driver sees it; calls go to the same processes."""

    def __init__(self, core: Group, reservations: dict[str, tuple[str, ...]]) -> None:
        super().__init__(Selection.whole(core))
        self.__dict__.update(
            {role: GroupView(Selection.whole(core, role)) for role in core.card.methods if role}
        )
        self._reservations = reservations

    @property
    def state(self) -> str:
        """ "ready", "broken" or "closed", as far as this driver knows."""
        return self.core.lifecycle.state.value

    def close(self, *, pool: bool = False) -> None:
        """End the group's processes; with ``pool=True`` also give back the slots of its detached pool. Idempotent."""
        if self.core.life.begin_close():
            gather_before_end(self.core, _GATHERED_WITHIN_S)
            self.core.transport.kill(self.core.endpoints)
            if pool:
                for keys in self._reservations.values():
                    self.core.transport.release_keys(keys)
            self.core.life.finish_close()


def attach(name: str, cls: WorkerClass | Colocation | None = None, *, timeout: float = 30.0) -> AttachedGroup:
    """The detached group of that name.

    Args:
        name: as given to ``px.WorkerGroup(..., name=..., detached=True)``.
        cls: the class, ``Cls.bind(...)`` or ``px.colocate({...})`` that it is expected to be made of; its methods
            are compared with the group's.
        timeout: seconds within which rank 0 must answer.

    Raises:
        PlacementError: there is no such group on this cluster.
        DeclarationError: its methods are not the expected ones, or another version of the library started it.
        GroupClosed: its processes are gone.
    """
    transport = cluster.transport()
    handle = transport.find(f"{name}:0")
    if handle is None:
        raise PlacementError(
            f"px.attach({name!r}): there is no detached group of that name on this cluster; make it with "
            f"px.WorkerGroup(pool, Cls, name={name!r}, detached=True) on a pool with detached=True"
        )
    record = _recall(name, handle, timeout)
    if cls is not None:
        _check_methods(name, record.card, cls)
    handles = [handle, *(transport.find(f"{name}:{rank}") for rank in range(1, len(record.slots)))]
    missing = [rank for rank, found in enumerate(handles) if found is None]
    if missing:
        raise GroupClosed(f"group {name!r}: ranks {missing} are gone; close it and make it anew", group=name)
    endpoints = [
        Endpoint(slot, found, facts, f"{name}:{rank}")
        for rank, (slot, found, facts) in enumerate(zip(record.slots, handles, record.facts, strict=True))
    ]
    from_environment()
    core = Group(record.card, transport, len(endpoints), owner=False)
    core.life.enter(endpoints)
    core.life.started()
    return AttachedGroup(core, record.reservations)


def _recall(name: str, handle: Any, timeout: float) -> DetachedRecord:
    transport = cluster.transport()
    endpoint = Endpoint(Slot(0, 0, ""), handle, None)  # pyright: ignore[reportArgumentType]
    data = host_call(questions.recall_record, call=0, epoch=0)
    ticket = transport.submit(endpoint, "", HOST, data, ())
    with contextlib.suppress(GroupClosed):
        done, _ = transport.wait([ticket.value], 1, bounded(timeout))
        kept = transport.outcome(ticket.value) if done else None
        if kept is not None and kept.failure is not None:  # its process has no such function
            raise _other_version(name, "unknown")
        if kept is not None and isinstance(kept.value, bytes):
            return DetachedRecord.from_bytes(name, kept.value)
    raise GroupClosed(
        f"px.attach({name!r}): rank 0 of the group did not answer within {timeout:g} s; it is busy or gone",
        group=name,
    )


def _check_methods(name: str, record: GroupCard, cls: WorkerClass | Colocation) -> None:
    bound = dict(cls.roles) if isinstance(cls, Colocation) else {"": as_bound(cls)}
    expected = {
        (role, method): (repr(spec.mode), str(spec.signature))
        for role, one in bound.items()
        for method, spec in one.spec.methods.items()
    }
    found = {
        (role, method): (repr(spec.mode), str(spec.signature))
        for role, methods in record.methods.items()
        for method, spec in methods.items()
    }
    if expected != found:
        differing = sorted(
            ".".join(filter(None, key))
            for key in expected.keys() | found.keys()
            if expected.get(key) != found.get(key)
        )
        raise DeclarationError(
            f"group {name!r} runs {', '.join(record.classes.values())}, whose registered methods are not those "
            f"expected: {', '.join(differing)} differ in name, signature or dispatch mode. Attach with the class that "
            "the group was made of, or close the group and make it anew"
        )
