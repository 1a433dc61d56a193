"""Ranks of different nodes: a torch process group that spans both sides, of NCCL or gloo, for this sync alone.

It is created next to the default group with the first sync, over a store that a rank of the source serves already:
no port is agreed on. All ranks work in rounds of the same order. In round ``n`` they exchange the buckets of
number ``n``: first the buckets with several readers, each by a broadcast in a subgroup, then the others as a group of
point-to-point operations. The last round has the notes. After an error or a timeout the group is aborted, and the next
sync creates another one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store, TCPStore

from phalanx.errors import WeightsTransferError
from phalanx.weights.buckets import Bucket, SlotView
from phalanx.weights.transport_interface import Deadline, Endpoint, Note, Side, lost
from phalanx.worker.collectives import collectives

_POLL_S = 0.0005
_Member = tuple[Side, int]
_Subgroup = tuple[int, tuple[int, ...]]


def _name(member: _Member) -> str:
    return f"{member[0]} rank {member[1]}"


@contextlib.contextmanager
def _losing(peer: str) -> Generator[None]:
    """Convert torch's errors to an error that names the peer. Operations on closed connections fail at their begin."""
    try:
        yield
    except RuntimeError as error:
        raise lost(
            peer, f"{peer} ended, or did not respond in time, while weights were sent ({error})"
        ) from error


@dataclass(eq=False)
class ProcessGroupEndpoint(Endpoint):
    """The end of a rank of either side.

    Attributes:
        me: side and rank.
        store: address of the store over which the group is created, as "host:port".
        key: name of the group, never used twice.
        members: ranks of both sides that are in it. All of them must come.
        subgroups: (source, targets) of the buckets with several readers.
        device: device of the buckets on this rank.
    """

    me: _Member
    store: str
    key: str
    members: Sequence[_Member]
    subgroups: Sequence[_Subgroup]
    device: torch.device

    def __post_init__(self) -> None:
        #: The group of all members under None, and the subgroups.
        self._groups: dict[_Subgroup | None, ProcessGroup] = {}
        self._buffers: list[torch.Tensor] = []
        self._is_closed = False

    def _create(self, deadline: Deadline) -> None:
        """Create the groups with the first sync, in which all members take part."""
        if self._is_closed:
            raise WeightsTransferError("this process group was closed; sync again")
        if self._groups:
            return
        peer = "the other ranks of the sync"
        host, _, port = self.store.rpartition(":")
        limit = timedelta(seconds=deadline.left(peer))
        arrivals: PrefixStore | None = None
        try:
            # the sockets are noted, so that a cancelled call can close them
            with collectives.noting():
                store = TCPStore(host, int(port), None, False, timeout=limit, wait_for_workers=False)
                store.set_timeout(limit)
                arrivals = PrefixStore(f"weights/{self.key}/members", store)
                arrivals.set(_name(self.me), "here")
                self._groups[None] = self._make(store, "all", self.members, limit)
                for source, targets in self.subgroups:
                    members: list[_Member] = [("source", source), *(("target", target) for target in targets)]
                    if self.me in members:
                        name = f"{source}>{'+'.join(map(str, targets))}"
                        self._groups[source, targets] = self._make(store, name, members, limit)
        except (RuntimeError, ValueError) as error:  # torch's errors of stores and connections
            absent: list[str] = []
            with contextlib.suppress(RuntimeError):
                if arrivals is not None:
                    absent = [name for name in map(_name, self.members) if not arrivals.check([name])]
            self.close()
            raise lost(
                absent[0] if absent else peer,
                f"no process group of {len(self.members)} ranks could be created over the store at {self.store} "
                f"({error}); {', '.join(absent) or 'no rank'} did not come. Ranks of both groups must reach each "
                "other's ports (GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the network)",
            ) from error

    def _make(self, store: Store, name: str, members: Sequence[_Member], limit: timedelta) -> ProcessGroup:
        prefix = PrefixStore(f"weights/{self.key}/{name}", store)
        rank, size, device = members.index(self.me), len(members), self.device
        group = ProcessGroup(prefix, rank, size)
        backend: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            backend, kind = dist.ProcessGroupNCCL(prefix, rank, size, options), ProcessGroup.BackendType.NCCL
        else:
            backend = dist.ProcessGroupGloo(prefix, rank, size, timeout=limit)
            kind = ProcessGroup.BackendType.GLOO
        group._set_default_backend(kind)
        backend._set_sequence_number_for_group()
        group._register_backend(device, kind, backend)
        # Creates the communicator while all ranks are here: later operations involve some of them.
        group.allreduce([torch.zeros(1, device=device)]).wait()
        return group

    def send(self, read: SlotView, note: Note, deadline: Deadline) -> int:
        self._create(deadline)
        sent = 0
        for bucket in self.buckets:
            memory = self._buffer(0)
            length = self.packing.pack(memory, bucket, read)
            if self.packing.varies:
                self._send_lengths([bucket], [length], deadline)
            self._exchange([(bucket, memory[:length])], deadline)
            sent += length
        notes = {reader: note(reader) for bucket in self.buckets for reader in bucket.readers}
        buckets = [Bucket(self.me[1], 0, len(notes[reader]), (reader,), ()) for reader in sorted(notes)]
        self._send_lengths(buckets, [bucket.nbytes for bucket in buckets], deadline)
        contents = [torch.frombuffer(bytearray(notes[reader]), dtype=torch.uint8) for reader in sorted(notes)]
        on_device = [content.to(self.device) for content in contents]
        self._exchange(list(zip(buckets, on_device, strict=True)), deadline)
        return sent

    def _send_lengths(self, buckets: Sequence[Bucket], lengths: Iterable[int], deadline: Deadline) -> None:
        tensors = [torch.tensor([length], device=self.device) for length in lengths]
        self._exchange(list(zip(buckets, tensors, strict=True)), deadline)

    def receive(self, write: SlotView, deadline: Deadline) -> dict[int, bytes]:
        self._create(deadline)
        rounds: dict[int, list[Bucket]] = {}
        for bucket in self.buckets:
            rounds.setdefault(bucket.number, []).append(bucket)
        for _, arriving in sorted(rounds.items()):
            lengths = [bucket.nbytes for bucket in arriving]
            if self.packing.varies:
                lengths = self._receive_lengths(arriving, deadline)
            parts = [self._buffer(place)[:length] for place, length in enumerate(lengths)]
            self._exchange(list(zip(arriving, parts, strict=True)), deadline)
            for bucket, memory in zip(arriving, parts, strict=True):
                self.packing.unpack(memory, bucket.slots, write)
        buckets = [Bucket(source, 0, 0, (self.me[1],), ()) for source in self.streams]
        lengths = self._receive_lengths(buckets, deadline)
        notes = [torch.empty(length, dtype=torch.uint8, device=self.device) for length in lengths]
        self._exchange(list(zip(buckets, notes, strict=True)), deadline)
        contents: list[Any] = [note.cpu().numpy() for note in notes]
        return {source: bytes(content) for source, content in zip(self.streams, contents, strict=True)}

    def _receive_lengths(self, buckets: Sequence[Bucket], deadline: Deadline) -> list[int]:
        tensors = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in buckets]
        self._exchange(list(zip(buckets, tensors, strict=True)), deadline)
        return [int(length) for length in tensors]

    def _buffer(self, place: int) -> torch.Tensor:
        """Return memory that is kept from bucket to bucket."""
        while len(self._buffers) <= place:
            self._buffers.append(torch.empty(self.capacity, dtype=torch.uint8, device=self.device))
        return self._buffers[place]

    def _exchange(self, items: Sequence[tuple[Bucket, torch.Tensor]], deadline: Deadline) -> None:
        """Send or receive the buckets of a round."""
        for bucket, memory in items:
            if len(bucket.readers) > 1:
                options = dist.BroadcastOptions()
                options.rootRank, options.rootTensor = 0, 0
                with _losing(self._peer(bucket)):
                    work = self._groups[bucket.source, bucket.readers].broadcast([memory], options)
                    self._wait(work, self._peer(bucket), deadline)
        single = [item for item in items if len(item[0].readers) == 1]
        if not single:
            return
        with _losing(self._peer(single[0][0])):
            works = self._begin(single)
        for (bucket, _), work in zip(single, works, strict=False):
            with _losing(self._peer(bucket)):
                self._wait(work, self._peer(bucket), deadline)

    def _begin(self, single: Sequence[tuple[Bucket, torch.Tensor]]) -> list[Any]:
        """Begin the operations of buckets with a single reader. For NCCL they are coalesced into one operation."""
        group, device = self._groups[None], self.device
        coalesces = device.type == "cuda"
        if coalesces:
            group._start_coalescing(device)
        works: list[Any] = []
        for bucket, memory in single:
            if self.me[0] == "source":
                place = self.members.index(("target", bucket.readers[0]))
                works.append(group.send([memory], place, 0))
            else:
                place = self.members.index(("source", bucket.source))
                works.append(group.recv([memory], place, 0))
        return [group._end_coalescing(device)] if coalesces else works

    def _peer(self, bucket: Bucket) -> str:
        is_source = self.me[0] == "source"
        return f"target rank {bucket.readers[0]}" if is_source else f"source rank {bucket.source}"

    def _wait(self, work: Any, peer: str, deadline: Deadline) -> None:
        if self.device.type != "cuda":
            work.wait(timedelta(seconds=deadline.left(peer)))
            return
        while not work.is_completed():  # a wait for NCCL has no timeout, and would not be interrupted
            deadline.left(peer)
            time.sleep(_POLL_S)
        work.wait()

    def close(self) -> None:
        groups = [*self._groups.values()][::-1]
        self._groups, self._buffers = {}, []
        self._is_closed = True
        for group in groups:
            with contextlib.suppress(RuntimeError):  # gloo has no abort: its sockets close with the group
                group.abort()
