"""The transport over a torch process group (NCCL or gloo) that spans both sides, mostly for ranks of several nodes.

The first sync creates the group next to the default group, over a store that a rank of the source serves already, so
that no port has to be agreed on. All ranks work in rounds of the same order. In round ``n`` they exchange the buckets
of number ``n``: first the buckets with several readers, each by a broadcast in a subgroup, then the others by
point-to-point operations. The last round exchanges the notes. After an error or a timeout the group is aborted, and the
next sync creates another.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store, TCPStore

from phalanx.errors import WeightsTransferError
from phalanx.topology.environment import variables_set
from phalanx.weights.buckets import Bucket, SlotView
from phalanx.weights.plan import Side
from phalanx.weights.transport_interface import Deadline, Endpoint, Outgoing, lost
from phalanx.worker.rendezvous import abort_groups, collectives

_POLL_S = 0.0005
_NOT_WATCHED = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
"""Variables that keep a group from torch's watchdog, which blocks the release of a group that lost a peer for a minute,
and then ends the process. Torch reads the variables when it creates a group."""
_environment_lock = threading.Lock()
_Member = tuple[Side, int]
_Subgroup = tuple[int, tuple[int, ...]]


def _name(member: _Member) -> str:
    return f"{member[0]} rank {member[1]}"


class ProcessGroupEndpoint(Endpoint):
    """The endpoint of a rank of either side, in a group of all ranks that send or receive."""

    def __post_init__(self) -> None:
        plan = self.request.part(self.transport)
        self._me: _Member = self.request.side, self.rank
        #: All ranks under None, and the ranks of the buckets with several readers by (source, readers).
        self._members: dict[_Subgroup | None, Sequence[_Member]] = {None: plan.members}
        for source, targets in sorted(
            {(box.source, box.targets) for box in plan.boxes if len(box.targets) > 1}
        ):
            self._members[source, targets] = [("source", source), *(("target", rank) for rank in targets)]
        self._groups: dict[_Subgroup | None, ProcessGroup] = {}
        self._buffers: list[torch.Tensor] = []
        self._is_closed = False
        #: Of the current sync.
        self._deadline = Deadline(0)

    def _create(self, deadline: Deadline) -> None:
        """Create the groups at the first sync, in which all members must take part."""
        if self._is_closed:
            raise WeightsTransferError("this process group was closed; sync again")
        if self._groups:
            return
        peer, names = "the other ranks of the sync", list(map(_name, self._members[None]))
        limit = timedelta(seconds=deadline.left(peer))
        try:
            # the sockets are noted, so that a cancelled call can close them
            with collectives.noting():
                store = self._open_store(limit)
                store.set(_name(self._me), "here")
                with contextlib.suppress(RuntimeError):  # NCCL waits for its ranks without a limit
                    store.wait(names, limit)
                absent = [name for name in names if not store.check([name]) or store.get(name) != b"here"]
                if absent:
                    peer = absent[0]
                    raise RuntimeError(f"absent ranks: {', '.join(absent)}")
                for number, (subgroup, members) in enumerate(self._members.items()):
                    if self._me in members:
                        own_store = PrefixStore(str(number), store)
                        self._groups[subgroup] = self._make(own_store, members, limit)
        except (RuntimeError, ValueError) as error:  # torch's errors of stores and connections
            self.close()
            raise lost(
                peer,
                f"no process group of {len(names)} ranks could be created over the store at {self.request.store} "
                f"({error}). Ranks of both groups must reach each other's ports "
                "(GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the network)",
            ) from error
        if self._is_closed:  # by another thread, during the creation
            self.close()
            raise WeightsTransferError("this process group was closed; sync again")

        # Memory for a bucket of each source, kept from sync to sync.
        self._buffers = [
            torch.empty(self.capacity, dtype=torch.uint8, device=self.device) for _ in self.streams
        ]

    def _open_store(self, limit: timedelta) -> Store:
        """Return the store of this connection. A rank is "here", or "closed", under its name."""
        host, _, port = self.request.store.rpartition(":")
        store = TCPStore(host, int(port), None, False, timeout=limit, wait_for_workers=False)
        return PrefixStore(f"weights/{self.request.connection}", store)

    def _make(self, store: Store, members: Sequence[_Member], limit: timedelta) -> ProcessGroup:
        rank, size, device = members.index(self._me), len(members), self.device
        group = ProcessGroup(store, rank, size)
        backend: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            with _environment_lock, variables_set(_NOT_WATCHED):
                backend = dist.ProcessGroupNCCL(store, rank, size, options)
            kind = ProcessGroup.BackendType.NCCL
        else:
            backend = dist.ProcessGroupGloo(store, rank, size, timeout=limit)
            kind = ProcessGroup.BackendType.GLOO
        group._set_default_backend(kind)
        backend._set_sequence_number_for_group()
        group._register_backend(device, kind, backend)
        # Creates the communicator while all ranks take part: later operations involve only some of them.
        group.allreduce([torch.zeros(1, device=device)]).wait()
        return group

    @property
    def _links(self) -> list[Bucket]:
        """An empty bucket for each peer."""
        return [Bucket(source, 0, 0, (reader,), ()) for source, reader in self.links]

    def _agree(self, deadline: Deadline) -> None:
        """Create the groups, and report the targets' versions to the sources."""
        self._deadline = deadline
        self._create(deadline)
        versions = [self.packing.known] * len(self._links)
        self.packing.agree(self._exchange_numbers(self._links, versions, to_source=True))

    def send(self, version: Outgoing, deadline: Deadline) -> int:
        self._agree(deadline)
        sent = 0
        for bucket in self.buckets:
            memory = self._buffers[0]
            length = self.packing.pack(memory, bucket, version.read)
            if self.packing.varies:
                self._exchange_numbers([bucket], [length])
            self._exchange([bucket], [memory[:length]])
            sent += length
        notes = [version.note(reader) for reader in self.readers]
        self._exchange_numbers(self._links, [len(note) for note in notes])
        contents = [torch.frombuffer(bytearray(note), dtype=torch.uint8).to(self.device) for note in notes]
        self._exchange(self._links, contents)
        return sent

    def receive(self, write: SlotView, deadline: Deadline) -> dict[int, bytes]:
        self._agree(deadline)
        rounds: dict[int, list[Bucket]] = {}
        for bucket in self.buckets:
            rounds.setdefault(bucket.number, []).append(bucket)
        for _, arriving in sorted(rounds.items()):
            lengths = [bucket.nbytes for bucket in arriving]
            if self.packing.varies:
                lengths = self._exchange_numbers(arriving, lengths)
            parts = [memory[:length] for memory, length in zip(self._buffers, lengths, strict=False)]
            self._exchange(arriving, parts)
            for bucket, memory in zip(arriving, parts, strict=True):
                self.packing.unpack(memory, bucket.slots, write)
        lengths = self._exchange_numbers(self._links, [0] * len(self.streams))
        notes = [torch.empty(length, dtype=torch.uint8, device=self.device) for length in lengths]
        self._exchange(self._links, notes)
        return {
            source: note.cpu().numpy().tobytes() for source, note in zip(self.streams, notes, strict=True)
        }

    def _exchange_numbers(
        self, buckets: Sequence[Bucket], numbers: Sequence[int], *, to_source: bool = False
    ) -> list[int]:
        """Send a number for each bucket, and return the numbers sent. A receiver passes any ``numbers``."""
        tensors = [torch.tensor([number], device=self.device) for number in numbers]
        self._exchange(buckets, tensors, to_source=to_source)
        return [int(tensor) for tensor in tensors]

    def _exchange(
        self, buckets: Sequence[Bucket], tensors: Sequence[torch.Tensor], *, to_source: bool = False
    ) -> None:
        """Send or receive the buckets of a round, in the other direction if ``to_source``."""
        single: list[tuple[Bucket, torch.Tensor]] = []
        peer = ""
        try:  # operations on closed connections fail when they begin
            for bucket, memory in zip(buckets, tensors, strict=True):
                peer = _name(self._peer(bucket))
                if len(bucket.readers) == 1:
                    single.append((bucket, memory))
                    continue
                group = self._groups[bucket.source, bucket.readers]
                work = group.broadcast([memory], dist.BroadcastOptions())  # from rank 0, the source
                self._wait(work, peer)
            for peer, work in self._begin(single, to_source):
                self._wait(work, peer)
        except (RuntimeError, KeyError) as error:  # KeyError: another thread has closed the groups
            problem = f"{peer} ended, or did not respond in time, while weights were sent ({error})"
            raise lost(peer, problem) from error

    def _begin(self, single: Sequence[tuple[Bucket, torch.Tensor]], to_source: bool) -> list[tuple[str, Any]]:
        """Begin the operations of buckets with a single reader. Return (peers, operation): NCCL has one for all."""
        group, everyone, device = self._groups[None], self._members[None], self.device
        coalesces = device.type == "cuda" and len(single) > 0
        if coalesces:
            group._start_coalescing(device)
        works: list[tuple[str, Any]] = []
        for bucket, memory in single:
            peer = self._peer(bucket)
            transfer = group.recv if (peer[0] == "source") != to_source else group.send
            works.append((_name(peer), transfer([memory], everyone.index(peer), 0)))
        if coalesces:
            return [(" or ".join(name for name, _ in works), group._end_coalescing(device))]
        return works

    def _peer(self, bucket: Bucket) -> _Member:
        return ("target", bucket.readers[0]) if self._me[0] == "source" else ("source", bucket.source)

    def _wait(self, work: Any, peer: str) -> None:
        if self.device.type != "cuda":
            work.wait(timedelta(seconds=self._deadline.left(peer)))
            return
        while not work.is_completed():  # a wait for operations of NCCL cannot be interrupted
            self._deadline.left(peer)
            time.sleep(_POLL_S)
        work.wait()  # raises the error of an operation that failed

    def close(self) -> None:
        groups, self._groups = [*self._groups.values()], {}
        if not groups and not self._is_closed:
            with contextlib.suppress(RuntimeError, ValueError):  # the other ranks would wait for this rank
                self._open_store(timedelta(seconds=1)).set(_name(self._me), "closed")
        self._is_closed = True
        abort_groups(groups)
        self._buffers = []  # until then, a kernel may be writing to them
