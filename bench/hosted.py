"""Groups of thousands of ranks whose hosts are objects in the processes of their relays.

What the driver does, the relays, their messages and hops are real; what is left out is a process for each rank.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

import phalanx as px
from phalanx.topology.relays import RelayTree
from phalanx.topology.slots import SlotFacts
from phalanx.transport.inline import InlineRank, InlineTransport
from phalanx.transport.ray.relay import Below, Relay
from phalanx.transport.ray.relays import RayRelays
from phalanx.transport.ray.transport import RayTransport
from phalanx.transport.values import Endpoint, Ref, Sight, SpawnRequest, Ticket
from phalanx.wire.arrival import decoding
from phalanx.wire.messages import Facts
from phalanx.wire.outputs import OUTPUT
from phalanx.wire.relayed import Batch, Envelope, batch_of, packed_output

_OF_RAY = ("put", "store", "ref_types", "address_of", "at", "fetch", "wait", "outcome", "disregard")


class Light(px.Worker):
    """Does nothing."""

    @px.register(px.Dispatch.ONE_TO_ALL)
    def nothing(self) -> None: ...

    @px.register(px.Dispatch.ONE_TO_ALL)
    def take(self, value: float) -> float:
        return value


@dataclass(frozen=True)
class Counted:
    """What a relay has sent on: calls that it was sent, messages to ranks, and the hops that these were away."""

    calls: int = 0
    to_ranks: int = 0
    hops: int = 0


class OverHosts(Relay):
    """A relay with the hosts of its ranks in its own process, which it calls one after another."""

    def __init__(self, below: Below) -> None:
        super().__init__(below)
        self._counted = Counted()
        self._hosts: Sequence[Endpoint] = ()
        if below.endpoints:
            px.init(
                backend="inline", num_cpus=len(below.endpoints), num_gpus=0
            )  # else torch is asked for them
            pool = px.ResourcePool([len(below.endpoints)], use_gpu=False, backend="inline")
            self._group = px.WorkerGroup(pool, Light, show_ranks="none")
            self._transport, self._hosts = self._group.core.transport, self._group.core.endpoints

    async def counted(self) -> Counted:
        """What went through it so far."""
        return self._counted

    def _send(self, envelope: Envelope, refs: Sequence[Any]) -> Any:
        before, hops = self._counted, 1 + int(envelope.role or 0)
        self._counted = Counted(before.calls + 1, before.to_ranks, max(before.hops, hops))
        return super()._send(envelope._replace(role=str(hops)), refs)

    def _to_ranks(self, envelope: Envelope, refs: Sequence[Any]) -> Any:
        hosts = self._hosts
        if envelope.ranks is not None:
            hosts = [hosts[self._at[rank]] for rank in envelope.ranks]
        which = envelope.which or [0] * len(hosts)
        values: list[Ref] = []
        for position, host in enumerate(hosts):
            data, places = envelope.messages[which[position]]
            own = [refs[place] for place in places]
            values.append(self._transport.submit(host, "", envelope.method, data, own, OUTPUT).value)
        before, hops = self._counted, 1 + int(envelope.role)
        self._counted = Counted(before.calls, before.to_ranks + len(hosts), max(before.hops, hops))
        return _Answers(self._transport, values)


@dataclass
class _Answers:
    """A call to hosts of this process: it has ended."""

    transport: Any
    values: Sequence[Ref]

    def collect(self) -> Batch:
        """What they returned."""
        with decoding(kept_encoded=True):
            outputs = [packed_output(output) for output in self.transport.fetch(self.values)]
        return batch_of(outputs, [None] * len(outputs))


class HostedTransport(InlineTransport):
    """A driver's view of processes that are not there: only their relays are, and these answer for them."""

    name = "ray"
    immediate = False
    relay_from: int | None = 2

    def __init__(self) -> None:
        super().__init__()
        self.made: list[RayRelays] = []
        self._facts = SlotFacts(ray.get_runtime_context().get_node_id(), socket.gethostname(), "127.0.0.1")
        self._told = ray.put((time.time(), time.time()))
        of_ray = RayTransport()
        for name in _OF_RAY:
            setattr(self, name, getattr(of_ray, name))

    def spawn(self, request: SpawnRequest) -> list[Endpoint]:
        return [Endpoint(slot, InlineRank(None), Facts(self._facts, 0, 0.0, 0)) for slot in request.slots]

    def setup(self, endpoint: Endpoint, data: bytes, refs: Sequence[Ref]) -> Ticket:
        return Ticket(self._told)

    def kill(self, endpoints: Sequence[Endpoint]) -> tuple[int, ...]:
        return ()

    def sights(self, endpoints: Sequence[Endpoint], stacks: bool) -> list[Sight]:
        return [Sight(reachable=True)] * len(endpoints)

    def relays(self, tree: RelayTree, endpoints: Sequence[Endpoint]) -> RayRelays:
        self.made.append(RayRelays(tree, endpoints, lambda: True, actor=OverHosts))
        return self.made[-1]
