"""Weights that are loaded come to lie in one segment of the target, into which its sources write.

For a target that hands weights to a function there is a memory in between, kept from sync to sync. Where a source has
it mapped, each byte is copied once, by the source, instead of once on either side of a ring. A target says when it may
be written to, and its sources when they have written all.
"""

from __future__ import annotations

import json
import selectors
import socket
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from phalanx.errors import InternalError, WeightsTransferError
from phalanx.weights.planning.buckets import Bucket
from phalanx.weights.planning.tensors import Tensors, dtype_named, name_of, write_slot
from phalanx.weights.transports.deadline import Deadline, lost
from phalanx.weights.transports.message_socket import (
    GO,
    HELLO,
    SEGMENT,
    Message,
    MessageSocket,
    listen,
    reach,
    same_user,
)
from phalanx.weights.transports.segments import HostSegment, host_segments
from phalanx.weights.transports.transport_interface import Note, Read, Received, Write, silent
from phalanx.wire.memory import copy_all

__all__ = ["Layout", "PlacedSource", "PlacedTarget", "PlacedTensors", "SeenTensors"]

_ALIGNED = 64
"""Bytes at whose multiples tensors begin."""

_alive: weakref.WeakSet[PlacedTensors] = weakref.WeakSet()


class Layout(NamedTuple):
    """What there is to know of a segment from outside: its bytes, and where it says itself what is in it."""

    nbytes: int
    text: int


class PlacedTensors:
    """Tensors by name, in a segment of their own that other processes can open.

    Args:
        like: what they are like; may be without memory.
    """

    def __init__(self, like: Tensors) -> None:
        places: dict[str, int] = {}
        end = 0
        for name, one in like.items():
            places[name] = end
            end += -(-one.numel() * one.element_size() // _ALIGNED) * _ALIGNED
        described = [(name, places[name], name_of(one.dtype), tuple(one.shape)) for name, one in like.items()]
        text = json.dumps(described).encode()
        self.layout = Layout(end + len(text), end)
        segment = host_segments.make(self.layout.nbytes)
        if not isinstance(segment, HostSegment):
            raise InternalError(f"host memory is {type(segment).__name__}")
        segment.memory[end:] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._segment = segment
        self.tensors: dict[str, torch.Tensor] = dict(_views(segment.memory, self.layout))
        _alive.add(self)

    @property
    def fd(self) -> int:
        """Of the segment; belongs to this."""
        _, (fd,) = self._segment.handle()
        return fd

    @staticmethod
    def holding(tensors: Tensors) -> PlacedTensors | None:
        """The one of this process whose tensors these are, all of them; None if there is none."""
        wanted = {name: one.data_ptr() for name, one in tensors.items()}
        return next((one for one in list(_alive) if one._addresses() == wanted), None)

    def _addresses(self) -> dict[str, int]:
        return {name: one.data_ptr() for name, one in self.tensors.items()}

    def close(self) -> None:
        """Let go of the memory, which stays until the last tensor does."""
        _alive.discard(self)
        self.tensors = {}
        self._segment.close()


class SeenTensors:
    """Another process's :class:`PlacedTensors`, not copied. Takes over ``fd``."""

    def __init__(self, layout: Layout, fd: int) -> None:
        self._segment = host_segments.open(layout.nbytes, b"", [fd])
        self.tensors = dict(_views(self._segment.memory, layout))

    def close(self) -> None:
        """Unmap it."""
        self.tensors = {}
        self._segment.close()


def _views(memory: torch.Tensor, layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
    for name, place, dtype, shape in json.loads(bytes(memory[layout.text :].numpy())):
        kind = dtype_named(dtype)
        nbytes = kind.itemsize
        for size in shape:
            nbytes *= size
        yield name, memory[place : place + nbytes].view(kind).view(tuple(shape))


class _Reader:
    """A target that is connected: its memory."""

    def __init__(self, wire: MessageSocket, seen: SeenTensors) -> None:
        self.wire, self.seen = wire, seen

    def close(self) -> None:
        self.wire.close()
        self.seen.close()


class PlacedSource:
    """A source's end; ``rank`` is its own, for messages."""

    def __init__(self, rank: int) -> None:
        self._name = f"source rank {rank}"
        self._waiting, self.address = listen()
        self._readers: dict[int, _Reader] = {}
        self._sync = 0

    def send(self, buckets: Sequence[Bucket], read: Read, *, timeout: float, note: Note = silent) -> int:
        """See :class:`phalanx.weights.transports.transport_interface.SourceEnd`."""
        deadline = Deadline(timeout)
        self._sync += 1
        readers = sorted({reader for bucket in buckets for reader in bucket.readers})
        try:
            self._gather(set(readers), deadline)
            for reader in readers:
                self._may_write(self._readers[reader].wire, deadline)
            copy_all(
                (write_slot(self._readers[reader].seen.tensors, slot), read(slot))
                for bucket in buckets
                for slot in bucket.slots
                for reader in slot.targets
            )
            for reader in readers:
                self._readers[reader].wire.tell_note(note(reader), deadline)
        except BaseException:
            self._hang_up()
            raise
        return sum(slot.nbytes * len(slot.targets) for bucket in buckets for slot in bucket.slots)

    def _may_write(self, wire: MessageSocket, deadline: Deadline) -> None:
        message = wire.ask(deadline)
        if message[:2] != (GO, self._sync):
            raise lost(wire.peer, f"{wire.peer} waits for another sync: {message}")

    def _gather(self, wanted: set[int], deadline: Deadline) -> None:
        """Wait for the readers that are not connected yet."""
        while missing := wanted - self._readers.keys():
            with selectors.DefaultSelector() as selector:
                selector.register(self._waiting, selectors.EVENT_READ)
                selector.select(deadline.left(f"target rank {min(missing)}"))
            connection, _ = self._waiting.accept()
            if same_user(connection):
                self._welcome(connection, deadline)
            else:
                connection.close()

    def _welcome(self, connection: socket.socket, deadline: Deadline) -> None:
        """Learn who it is, and where to write. Who went before saying that is forgotten."""
        wire = MessageSocket(connection, "a target rank")
        try:
            hello = wire.ask(deadline)
            wire.peer = f"target rank {hello.one}"
            told = wire.ask(deadline)
            _, fds = wire.ask_bytes(deadline)
        except WeightsTransferError:
            wire.close()
            return
        old = self._readers.pop(hello.one, None)
        if old is not None:
            old.close()
        self._readers[hello.one] = _Reader(wire, SeenTensors(Layout(told.one, told.two), fds[0]))

    def _hang_up(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers = {}

    def close(self) -> None:
        """See :class:`phalanx.weights.transports.transport_interface.SourceEnd`."""
        self._hang_up()
        self._waiting.close()


class PlacedTarget:
    """A target's end.

    Args:
        rank: of the target.
        addresses: of its sources' ends, by rank.
        placed: where they write.
    """

    def __init__(self, rank: int, addresses: Mapping[int, str], placed: PlacedTensors) -> None:
        self._rank = rank
        self._addresses = dict(addresses)
        self._placed = placed
        self._wires: dict[int, MessageSocket] = {}
        self._sync = 0

    def connect(self, sources: Iterable[int], *, timeout: float) -> None:
        """Connect to sources, and say where to write; from then on they hear when this end is closed."""
        deadline = Deadline(timeout)
        for source in sorted(set(sources)):
            wire = self._wires[source] = reach(self._addresses[source], f"source rank {source}", deadline)
            wire.tell(Message(HELLO, self._rank))
            wire.tell(Message(SEGMENT, *self._placed.layout))
            wire.tell_bytes(b"", [self._placed.fd])

    def receive(self, buckets: Mapping[int, Sequence[Bucket]], write: Write, *, timeout: float) -> Received:
        """See :class:`phalanx.weights.transports.transport_interface.TargetEnd`; ``write`` is not asked: sources
        know where to."""
        deadline = Deadline(timeout)
        self._sync += 1
        try:
            for source in buckets:
                self._wires[source].tell(Message(GO, self._sync))
            notes = {source: self._wires[source].ask_note(deadline) for source in buckets}
        except BaseException:
            self.close()
            raise
        return Received(sum(_bytes_of(stream) for stream in buckets.values()), notes)

    def close(self) -> None:
        """See :class:`phalanx.weights.transports.transport_interface.TargetEnd`."""
        wires, self._wires = self._wires, {}
        for wire in wires.values():
            wire.close()


def _bytes_of(stream: Sequence[Any]) -> int:
    return sum(slot.nbytes for bucket in stream for slot in bucket.slots)
