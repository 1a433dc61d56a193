"""Ranks of different nodes: a torch process group that spans both sides, of NCCL or gloo, for this sync alone.

It is created next to the default group with the first sync, over a store that a rank of the source serves already:
no port is agreed on. All ranks work in rounds of the same order. In round ``n`` they exchange the buckets of
number ``n``: first the buckets with several readers, each by a broadcast in a subgroup, then the others as a group of
point-to-point operations. After an error or a timeout the group is aborted, and the next sync creates another one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store, TCPStore

from phalanx.errors import WeightsTransferError
from phalanx.weights.bucket_packing import DeltaPacking, Packing, Read, Write
from phalanx.weights.buckets import Bucket
from phalanx.weights.transport import Deadline, Endpoint, Note, Received, lost
from phalanx.worker.collectives import collectives

_POLL_S = 0.0005
Member = tuple[str, int]
"""Side and rank."""


def _name(member: Member) -> str:
    return f"{member[0]} rank {member[1]}"


@contextlib.contextmanager
def _losing(peer: str) -> Generator[None]:
    """Raise torch's errors as one that names the peer. An operation on a closed connection fails as it begins."""
    try:
        yield
    except RuntimeError as error:
        raise lost(
            peer, f"{peer} ended, or did not respond in time, while weights were sent ({error})"
        ) from error


class GroupSpec(NamedTuple):
    """A process group to create.

    Attributes:
        store: address of the store, as "host:port".
        key: name of the group, never used twice.
        members: ranks of both sides that are in it. All of them must come.
        subgroups: (source, targets) of the buckets with several readers.
        capacity: bytes of the largest packed bucket.
        device: device of the buckets on this rank.
    """

    store: str
    key: str
    members: Sequence[Member]
    subgroups: Sequence[tuple[int, tuple[int, ...]]]
    capacity: int
    device: torch.device


class ProcessGroupEndpoint(Endpoint):
    """The end of a rank, ``me``, of either side."""

    def __init__(self, spec: GroupSpec, me: Member, packing: Packing) -> None:
        self._spec = spec
        self._me = me
        self._packing = packing
        self._group: ProcessGroup | None = None
        self._subgroups: dict[tuple[int, tuple[int, ...]], ProcessGroup] = {}
        self._buffers: list[torch.Tensor] = []
        self._sends_lengths = isinstance(packing, DeltaPacking)
        self._store: Any = None
        self._sync = 0
        self._is_closed = False

    def _create(self, deadline: Deadline) -> None:
        """Create the groups with the first sync, in which all members take part."""
        self._sync += 1
        if self._is_closed:
            raise WeightsTransferError("this process group was closed; sync again")
        if self._group is not None:
            return
        spec, peer = self._spec, "the other ranks of the sync"
        host, _, port = spec.store.rpartition(":")
        limit = timedelta(seconds=deadline.left(peer))
        try:
            # the sockets are noted, so that a cancelled call can close them
            with collectives.noting():
                store: Store = TCPStore(host, int(port), None, False, timeout=limit, wait_for_workers=False)
                store.set_timeout(limit)
                self._store = PrefixStore(f"weights/{spec.key}/notes", store)
                self._store.set(_name(self._me), "here")
                self._group = self._make(store, "all", spec.members, limit)
                for source, targets in spec.subgroups:
                    members = [("source", source), *(("target", target) for target in targets)]
                    if self._me in members:
                        name = f"{source}>{'+'.join(map(str, targets))}"
                        self._subgroups[source, targets] = self._make(store, name, members, limit)
        except (RuntimeError, ValueError) as error:  # torch's errors of stores and connections
            absent = self._absent()
            self.abort()
            raise lost(
                absent[0] if absent else peer,
                f"no process group of {len(spec.members)} ranks could be created over the store at {spec.store} "
                f"({error}); {', '.join(absent) or 'no rank'} did not come. Ranks of both groups must reach each "
                "other's ports (GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the network)",
            ) from error

    def _absent(self) -> list[str]:
        """Return the members that have not reached the store."""
        with contextlib.suppress(RuntimeError):
            if self._store is not None:
                return [_name(one) for one in self._spec.members if not self._store.check([_name(one)])]
        return []

    def _make(self, store: Store, name: str, members: Sequence[Member], limit: timedelta) -> ProcessGroup:
        prefix = PrefixStore(f"weights/{self._spec.key}/{name}", store)
        rank, size, device = members.index(self._me), len(members), self._spec.device
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

    def send(self, buckets: Sequence[Bucket], read: Read, note: Note, deadline: Deadline) -> int:
        self._create(deadline)
        sent = 0
        for bucket in buckets:
            memory = self._buffer(0)
            length = self._packing.pack(memory, bucket, read)
            if self._sends_lengths:
                self._exchange([(bucket, torch.tensor([length]))], deadline)
            self._exchange([(bucket, memory[:length])], deadline)
            sent += length
        for reader in sorted({reader for bucket in buckets for reader in bucket.readers}):
            message = note(reader)
            with _losing(f"the rank with the store at {self._spec.store}"):
                self._store.set(self._note_key(self._me[1], reader), message)
        return sent

    def receive(self, buckets: Mapping[int, Sequence[Bucket]], write: Write, deadline: Deadline) -> Received:
        self._create(deadline)
        rounds: dict[int, list[Bucket]] = {}
        for stream in buckets.values():
            for bucket in stream:
                rounds.setdefault(bucket.number, []).append(bucket)
        written = 0
        for _, arriving in sorted(rounds.items()):
            lengths = [torch.tensor([bucket.nbytes]) for bucket in arriving]
            if self._sends_lengths:
                self._exchange(list(zip(arriving, lengths, strict=True)), deadline)
            parts = [self._buffer(place)[: int(length)] for place, length in enumerate(lengths)]
            self._exchange(list(zip(arriving, parts, strict=True)), deadline)
            for bucket, memory in zip(arriving, parts, strict=True):
                written += self._packing.unpack(memory, bucket.slots, write)
        return Received(written, {source: self._receive_note(source, deadline) for source in buckets})

    def _buffer(self, place: int) -> torch.Tensor:
        """Return memory that is kept from bucket to bucket."""
        while len(self._buffers) <= place:
            spec = self._spec
            self._buffers.append(torch.empty(spec.capacity, dtype=torch.uint8, device=spec.device))
        return self._buffers[place]

    def _exchange(self, items: Sequence[tuple[Bucket, torch.Tensor]], deadline: Deadline) -> None:
        """Send or receive the buckets of a round."""
        single: list[tuple[Bucket, torch.Tensor]] = []
        for bucket, memory in items:
            if len(bucket.readers) == 1:
                single.append((bucket, memory))
                continue
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            group, peer = self._subgroups[bucket.source, bucket.readers], self._peer(bucket)
            with _losing(peer):
                self._wait([group.broadcast([memory], options)], peer, deadline)
        if not single or self._group is None:
            return
        peer = self._peer(single[0][0])
        with _losing(peer):
            self._wait(self._begin(self._group, single), peer, deadline)

    def _begin(self, group: ProcessGroup, single: Sequence[tuple[Bucket, torch.Tensor]]) -> list[Any]:
        """Begin the operations of buckets with one reader: for NCCL a single one, in the group's communicator."""
        coalesces, device = self._spec.device.type == "cuda", self._spec.device
        if coalesces:
            group._start_coalescing(device)
        works: list[Any] = []
        for bucket, memory in single:
            if self._me[0] == "source":
                place = self._spec.members.index(("target", bucket.readers[0]))
                works.append(group.send([memory], place, 0))
            else:
                place = self._spec.members.index(("source", bucket.source))
                works.append(group.recv([memory], place, 0))
        return [group._end_coalescing(device)] if coalesces else works

    def _peer(self, bucket: Bucket) -> str:
        is_source = self._me[0] == "source"
        return f"target rank {bucket.readers[0]}" if is_source else f"source rank {bucket.source}"

    def _wait(self, works: Sequence[Any], peer: str, deadline: Deadline) -> None:
        for work in works:
            if self._spec.device.type != "cuda":
                work.wait(timedelta(seconds=deadline.left(peer)))
                continue
            while not work.is_completed():  # a wait for NCCL has no timeout, and would not be interrupted
                deadline.left(peer)
                time.sleep(_POLL_S)
            work.wait()

    def _note_key(self, source: int, target: int) -> str:
        return f"{self._sync}/{source}>{target}"

    def _receive_note(self, source: int, deadline: Deadline) -> bytes:
        key, pause = self._note_key(source, self._me[1]), _POLL_S
        with _losing(f"the rank with the store at {self._spec.store}"):
            while not self._store.check([key]):  # a blocking read could not be interrupted
                time.sleep(min(pause, deadline.left(f"source rank {source}")))
                pause = min(2 * pause, 0.02)
            note = self._store.get(key)
            self._store.delete_key(key)
        return note

    def abort(self) -> None:
        for group in self._drop_groups():
            with contextlib.suppress(
                RuntimeError
            ):  # gloo has nothing to abort; its sockets close with the group
                group.abort()

    def close(self) -> None:
        for group in self._drop_groups():
            with contextlib.suppress(RuntimeError):  # a peer may have closed its end before
                group.shutdown()

    def _drop_groups(self) -> list[ProcessGroup]:
        groups = [*self._subgroups.values(), *([self._group] if self._group is not None else [])]
        self._group, self._subgroups, self._buffers = None, {}, []
        self._is_closed = True
        return groups
