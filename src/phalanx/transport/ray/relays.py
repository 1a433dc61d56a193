"""The relays of a group as its driver has them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray import exceptions as rayx
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from phalanx.topology.relays import RelayTree
from phalanx.transport import waves
from phalanx.transport.ray.ray_values import DEAD, state_of_actors
from phalanx.transport.ray.relay import Below, Relay, first_line
from phalanx.transport.ray.sending import submit
from phalanx.transport.ray.streams import RayStream, stream
from phalanx.transport.relaying import Part
from phalanx.transport.values import Endpoint, FetchFailed, NotReady, Ref, Ticket
from phalanx.wire.outputs import OUTPUT
from phalanx.wire.relayed import Batch, Envelope, Gone, unpacked_outputs

_AT_ONCE = 10_000
_ENDED_WITHIN_S = 2.0
_THERE_WITHIN_S = 60.0


class RayRelays:
    """Relays as actors of this process on the ranks' nodes: they end with it, and take no CPU of the cluster's.

    They are started in waves, as ranks are.
    """

    def __init__(
        self,
        tree: RelayTree,
        endpoints: Sequence[Endpoint],
        connected: Callable[[], bool],
        actor: type[Relay] = Relay,
    ) -> None:
        self.tree = tree
        self._connected = connected
        self._names: list[str] = []
        self._handles: list[Any] = []
        self._under = {head: self._subtree(head) for head in tree.head_indices}
        self._sequences = [0] * tree.heads
        self._interrupted: set[int] = set()  # heads that may wait for ever for the number that they have next
        self._endpoints = endpoints
        # A head waits for each number: one that two threads took at once would be waited for without end.
        self._numbering = threading.Lock()
        made = ray.remote(actor)
        try:
            for index, relay in enumerate(tree.relays):
                if index >= waves.AT_ONCE:
                    self._await(index - waves.AT_ONCE)
                self._handles.append(self._start(made, relay.node, self._below(index, endpoints)))
        except BaseException:
            self.end()
            raise
        self._heads = [self._handles[index] for index in tree.head_indices]

    def _below(self, index: int, endpoints: Sequence[Endpoint]) -> Below:
        relay = self.tree.relays[index]
        self._names.append(f"relay {index} of ranks {_ranges(relay.ranks)}")
        own = [] if relay.below else [endpoints[rank] for rank in relay.ranks]
        fresh = [replace(endpoint, methods={}) for endpoint in own]
        relays = [(self._names[i], self._handles[i], self.tree.relays[i].ranks) for i in relay.below]
        return Below(self._names[index], relay.ranks, fresh, relays, os.getpriority(os.PRIO_PROCESS, 0))

    @staticmethod
    def _start(actor: Any, node: str, below: Below) -> Any:
        return actor.options(
            num_cpus=0,
            max_restarts=0,
            max_concurrency=_AT_ONCE,
            enable_task_events=False,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote(below)

    def _await(self, index: int) -> None:
        """Wait for a relay to be there, or for a while: one that never comes is told by the first call."""
        ray.wait([self._handles[index].whereabouts.remote()], timeout=_THERE_WITHIN_S, fetch_local=False)

    def _subtree(self, index: int) -> list[int]:
        return [index, *(under for below in self.tree.relays[index].below for under in self._subtree(below))]

    def send(self, head: int, envelope: Envelope, refs: Sequence[Ref]) -> Ref:
        args = (envelope.pack(), list(refs)) if refs else (envelope.pack(),)
        with self._numbered(head) as number:
            return self._heads[head].forward.remote(number, *args)

    def forget(self, head: int, serials: Sequence[int]) -> None:
        if self._connected():
            with self._numbered(head) as number:
                self._heads[head].forget.remote(number, list(serials))

    @contextlib.contextmanager
    def _numbered(self, head: int) -> Generator[int]:
        """The number of the message to a head that is sent meanwhile."""
        with self._numbering:
            try:
                yield self._sequences[head]
            except BaseException:  # Ctrl-C: nobody knows whether it was sent
                self._interrupted.add(head)
                raise
            self._sequences[head] += 1

    def batches(self, refs: Sequence[Ref], timeout: float | None) -> list[Batch]:
        return [Batch.unpack(packed) for packed in _got(refs, timeout)]

    def outputs(self, batches: Sequence[Batch], timeout: float | None) -> list[list[Any]]:
        large = [ref for batch in batches for ref in batch.refs]
        fetched = iter(_got(large, timeout) if large else ())
        return [_unpacked(batch, [next(fetched) for _ in batch.refs]) for batch in batches]

    def parts(self, head: int, serial: int, count: int, timeout: float) -> list[Part]:
        name = self._names[self.tree.head_indices[head]]
        try:
            found: list[Part] = ray.get(self._heads[head].parts.remote(serial), timeout=timeout)
            ended = [part.ticket.value for part in found if part.ended and part.ticket is not None]
            if ended:  # known to the relay; here too once their owner was asked
                ray.wait(ended, num_returns=len(ended), timeout=timeout, fetch_local=False)
            return found
        except rayx.GetTimeoutError:
            why = f"it has not answered within {timeout:g} s"
        except rayx.RayError as error:
            why = first_line(error)
        return [Part(None, True, Gone(name, why))] * count

    def after(self, calls: Sequence[tuple[int, int]]) -> Later:
        ended: dict[int, list[Any]] = {}
        for head, serial in calls:
            with self._numbered(head) as number:
                ended.setdefault(head, []).append(self._heads[head].ended.remote(number, serial))
        return Later(
            {
                self._endpoints[rank].handle: ended[head]
                for head in ended
                for rank in self.tree.relays[self.tree.head_indices[head]].ranks
            }
        )

    def gone(self, head: int | None = None) -> Gone | None:
        if not self._connected():
            return None
        for one in self._interrupted:
            if head in (None, one):
                return Gone(self._names[self.tree.head_indices[one]], "sending to it was interrupted")
        indices = range(len(self._handles)) if head is None else self._under[self.tree.head_indices[head]]
        state = state_of_actors()
        for index in indices:
            if state(self._handles[index]._ray_actor_id) == DEAD:
                return Gone(self._names[index], "its process has ended")
        return None

    def whereabouts(self) -> list[tuple[str, int, str, int]]:
        told = ray.get([handle.whereabouts.remote() for handle in self._handles])
        sizes = [len(relay.ranks) for relay in self.tree.relays]
        return [(name, size, *where) for name, size, where in zip(self._names, sizes, told, strict=True)]

    def end(self) -> None:
        handles, self._handles = self._handles, []
        if not self._connected():
            return
        for handle in handles:
            with contextlib.suppress(rayx.RayError, ValueError):
                ray.kill(handle)
        deadline = time.monotonic() + _ENDED_WITHIN_S
        while any(h._get_local_state() != DEAD for h in handles) and time.monotonic() < deadline:
            time.sleep(0.002)


class Later:
    """Calls ranks directly; each call begins once what is given for its actor is there: Ray waits as for an argument.

    The calls of this process that follow on the same rank wait behind that.
    """

    def __init__(self, after: Mapping[Any, Sequence[Any]]) -> None:
        self._after = after

    def submit(
        self,
        endpoint: Endpoint,
        role: str,
        method: str,
        data: bytes,
        refs: Sequence[Ref],
        returns: int = OUTPUT,
    ) -> Ticket:
        return submit(endpoint, role, method, data, refs, returns, after=self._after.get(endpoint.handle, ()))

    def stream(
        self, endpoint: Endpoint, role: str, method: str, data: bytes, refs: Sequence[Ref], buffer: int | None
    ) -> RayStream:
        return stream(endpoint, role, method, data, refs, buffer, self._after.get(endpoint.handle, ()))


def _got(refs: Sequence[Ref], timeout: float | None) -> list[Any]:
    try:
        return ray.get(list(refs), timeout=timeout)
    except rayx.GetTimeoutError as error:
        raise NotReady from error
    except rayx.RayError as error:
        raise FetchFailed from error


def _unpacked(batch: Batch, large: Sequence[Any]) -> list[Any]:
    """Raises FetchFailed where an output cannot be unpickled here: what the rank's own reference gives tells why."""
    try:
        return unpacked_outputs(batch, large)
    except Exception as error:
        raise FetchFailed from error


def _ranges(ranks: Sequence[int]) -> str:
    """``0-31``, or ``0-7, 16-23``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
