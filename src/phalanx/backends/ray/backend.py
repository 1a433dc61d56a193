"""The Ray backend: actors in placement groups, object references, one ``ray.get`` per call."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import cloudpickle
import ray
from ray import ObjectRef
from ray import exceptions as rayx
from ray.experimental import get_local_object_locations

from phalanx.backends.backend_types import (
    DrainingNode,
    Endpoint,
    FetchFailed,
    Lost,
    NotReady,
    ProcessStatus,
    RankOutcome,
    Ref,
    ResultHandle,
    SpawnRequest,
    Waited,
)
from phalanx.backends.ray import metrics, private
from phalanx.backends.ray import placement_groups as placement
from phalanx.backends.ray.cluster import Connection, address
from phalanx.backends.ray.node_agents import NOTHING_ANSWERS, NodeAgents, agent_on, content_of
from phalanx.backends.ray.rank_processes import NO_SIDE, ProcessHandle
from phalanx.backends.ray.ray_errors import (
    log_once,
    lost_of,
    node_is_gone,
    of_node,
    outcome_of,
    with_post_mortem,
)
from phalanx.backends.ray.worker_actor import actor_class, unpacked
from phalanx.errors import PlacementError
from phalanx.tracing.metric_buffer import meters
from phalanx.wire.messages import OUTPUT, Message
from phalanx.wire.value import Value

NAMESPACE = "phalanx"
#: Maximum number of processes that are started at once.
WAVE = 256
_STARTS_WITHIN_S = 60.0
_KILLED_WITHIN_S = 5.0
_INSPECTS_WITHIN_S = 0.9


def submit(endpoint: Endpoint, message: Message, returns: int = OUTPUT) -> ResultHandle:
    """Send a call to a rank, as ``Backend.submit`` describes."""
    handle, name = endpoint.handle, _task_name(endpoint, message)
    if not message.data:
        return ResultHandle(private.call(handle, "_px_named_call", name=name))
    sent = private.call(handle, "_px_call", *_arguments(message), name=name, returns=returns)
    if returns == OUTPUT:
        return ResultHandle(sent)
    info, value = sent
    return ResultHandle(value, info)


def _arguments(message: Message) -> tuple[Any, ...]:
    """Return the arguments of the task; none, if the name of the task describes the call completely."""
    if message.refs:
        return message.data, list(message.refs)
    return (message.data,) if message.data else ()


def _task_name(endpoint: Endpoint, message: Message) -> str:
    """Return the task name ``Class.method@epoch`` for dashboards; the rank reads the part after the first dot."""
    return f"{private.class_name(endpoint.handle).replace('.', '_')}.{message.name}"


class RayStream:
    """Items of a call on a rank. Ray pauses the rank while too many items wait to be taken.

    Dropping Ray's generator does not stop the rank. So an abandoned stream is cancelled, and then read to its end.
    """

    def __init__(self, generator: private.ObjectRefGenerator) -> None:
        self.coming = generator
        self.ended: ObjectRef = generator.completed()

    def take(self) -> Ref | None:
        return next(self.coming, None) if self.coming.next_ready() else None

    def leave(self) -> None:
        """Do nothing: the caller takes the remaining items, so that the rank can finish the call."""


def stream(endpoint: Endpoint, message: Message, buffer: int | None) -> RayStream:
    """Send a call of a method that yields, as ``Backend.stream`` describes."""
    items = private.call(
        endpoint.handle,
        "_px_stream",
        *_arguments(message),
        name=_task_name(endpoint, message),
        returns="streaming",
        buffer=buffer,
    )
    return RayStream(items)


def started(request: SpawnRequest, handles: list[Any]) -> list[Any]:
    """Start the processes in waves, add them to ``handles``, and return their reports.

    A wave begins once the processes of the wave before it have reported. This keeps the queue of the cluster's
    controller short.

    Raises:
        GetTimeoutError: if not all processes report within the timeout of the request.
        RayError: if a process does not start.
    """
    deadline = time.monotonic() + request.timeout
    reports: list[Any] = []
    for first in range(0, len(request.slots), WAVE):
        handles.extend(_create(request, index) for index in range(len(request.slots))[first : first + WAVE])
        asked = [private.call(handle, "_px_report") for handle in handles[first:]]
        reports += private.get(asked, timeout=max(0.0, deadline - time.monotonic()))
    return reports


def _create(request: SpawnRequest, index: int) -> Any:
    """Create the actor of slot number ``index`` and return its handle."""
    resources = dict(request.resources)
    namespace = NAMESPACE if request.namespace is None else request.namespace
    return private.create_actor(
        actor_class(request.class_name, request.methods, request.max_concurrency is not None),
        request.factory,
        num_cpus=resources.pop("CPU", 0),
        num_gpus=resources.pop("GPU", None),
        resources=resources or None,
        runtime_env=dict(request.runtime_env) if request.runtime_env else None,
        max_concurrency=request.max_concurrency,
        max_restarts=0,
        max_task_retries=0,
        lifetime="detached" if request.detached else None,
        name=request.names[index] if request.names else None,
        namespace=namespace if request.names else None,
        scheduling_strategy=placement.strategy(request.slots[index], request.reservations),
    )


class RayBackend:
    """Backend whose ranks are Ray actors."""

    name = "ray"
    immediate = False
    ref_types = (ray.ObjectRef,)

    def __init__(self) -> None:
        self._agents = NodeAgents()
        context = private.runtime_context()
        self._node, self.job = context.get_node_id(), context.get_job_id()
        log_once()
        if "__mp_main__" in sys.modules:  # the script of a spawned process, which ranks cannot import
            cloudpickle.register_pickle_by_value(sys.modules["__mp_main__"])
        self._connection = Connection()
        self._exporter: metrics.Exporter | None = None

    def connected(self) -> bool:
        return self._connection.open

    def leave(self) -> None:
        if meters.on:
            self.export_metrics()
        self._agents.leave()

    nodes = staticmethod(placement.nodes)
    holders = staticmethod(placement.holders)
    nodes_of = staticmethod(placement.nodes_of)
    store = staticmethod(placement.store_space)
    reserve = staticmethod(placement.reserve)
    repair = staticmethod(placement.repair)
    submit = staticmethod(submit)  # not wrapped in a method, because it is called once per rank and call
    stream = staticmethod(stream)
    call_id = staticmethod(private.call_id)
    address_of = staticmethod(private.address_of)
    put = staticmethod(private.put)
    now = staticmethod(time.monotonic)

    def probe(self, slots: Sequence[Any], reservations: Any, bundle: Any) -> list[tuple[str, ...]]:
        self._connection.check()  # without a connection, the task would start a cluster
        return placement.probe(slots, reservations, bundle)

    def release(self, keys: Sequence[str]) -> None:
        if self.connected():
            placement.release(keys)

    def spawn(self, request: SpawnRequest) -> list[Endpoint]:
        handles: list[Any] = []
        try:
            if not request.detached:
                self._agents.local.prepare()
            reports = started(request, handles)
        except BaseException as error:
            for handle in handles:
                with contextlib.suppress(Exception):  # must not replace the error of the start
                    private.kill(handle)
            self._agents.local.dismiss()
            if isinstance(error, rayx.GetTimeoutError):
                raise PlacementError(
                    f"{request.class_name}: {len(request.slots)} worker processes did not all start within "
                    f"{request.timeout:g} s; the node may be overloaded, or a runtime_env takes long to build: "
                    "raise start_timeout=, or look at `ray status`"
                ) from None
            if isinstance(error, rayx.RayError):
                where = f"at {address()}" if self.connected() else "that this process has left"
                raise PlacementError(
                    f"{request.class_name}: a worker process did not start on the cluster {where}: "
                    f"{lost_of(error).reason}. If that is not your cluster, RAY_ADDRESS=local starts one of your own"
                ) from error
            raise
        names = request.names or (None,) * len(handles)
        endpoints = list(map(Endpoint, request.slots, handles, reports, names))
        if not request.detached:  # detached processes outlive this process
            self._agents.watch(list(map(self._target, endpoints)))
        return endpoints

    def _target(self, endpoint: Endpoint) -> ProcessHandle:
        """Return the process handle of an endpoint, for the agent of its node."""
        facts = endpoint.facts
        own = (facts.log,) if facts.log and facts.files else ()
        node = "" if facts.slot.node_id == self._node else facts.slot.node_id
        return ProcessHandle(facts.pid, facts.side or NO_SIDE, (*own, *facts.log_paths), node)

    def _ask(self, endpoints: Sequence[Endpoint], verb: str, *args: Value, **options: float) -> list[Any]:
        return self._agents.ask(list(map(self._target, endpoints)), verb, *args, **options)

    def start_service(self, start: Callable[[str], Any]) -> tuple[Any, Any]:
        try:
            actor = agent_on(self._node)
            return actor, private.call(actor, "start", start).future().result(_STARTS_WITHIN_S)
        except Exception as error:
            late = f"it did not respond within {_STARTS_WITHIN_S:g} s"
            reason = lost_of(error).reason if isinstance(error, rayx.RayError) else str(error) or late
            raise PlacementError(
                f"the process for channels did not start on this node: {reason}; look at `ray status`"
            ) from error

    def stop_service(self, service: Any) -> None:
        if self.connected():
            with contextlib.suppress(rayx.RayError, ValueError):
                private.kill(service)

    def setup(self, endpoint: Endpoint, data: bytes, refs: Sequence[Ref]) -> ResultHandle:
        return ResultHandle(private.call(endpoint.handle, "_px_setup", data, list(refs)))

    def at(self, address: Any) -> Ref:
        self._connection.check()
        return private.reference_to(address)

    def fetch(self, refs: Sequence[Ref], timeout: float | None = None) -> list[Any]:
        self._connection.check()
        try:
            values = private.get(list(refs), timeout=timeout)
        except rayx.GetTimeoutError as error:
            raise NotReady from error
        except rayx.RayError as error:
            cause = getattr(error, "client_exc", None)  # an error of unpickling, which Ray wraps
            raise FetchFailed from cause if isinstance(cause, Exception) else error
        try:
            return unpacked(values)
        except Exception as error:
            raise FetchFailed from error

    def wait(self, refs: Sequence[Ref], count: int, timeout: float | None) -> Waited:
        self._connection.check()
        positions = {ref: index for index, ref in enumerate(refs)}
        done, rest = private.wait(list(refs), num_returns=count, timeout=timeout, fetch_local=False)
        return sorted(positions[ref] for ref in done), sorted(positions[ref] for ref in rest)

    def outcome(self, ref: Ref) -> RankOutcome:
        try:
            return RankOutcome(*self.fetch([ref]))
        except FetchFailed as error:
            return outcome_of(error.__cause__ or error)

    def disregard(self, refs: Sequence[Ref]) -> None:
        if not self.connected() or not refs:
            return
        stored = get_local_object_locations(list(refs))
        for ref in refs:
            if not stored.get(ref, {}).get("node_ids"):  # a stored output need not be fetched
                ref.future()  # otherwise Ray prints the error of a call whose outcome is never fetched

    def find(self, name: str) -> Any | None:
        try:
            return private.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            return None

    def dead_of(self, endpoints: Sequence[Endpoint]) -> list[int]:
        if not self.connected():
            return list(range(len(endpoints)))
        state = private.actor_states()
        ids = [private.actor_id(endpoint.handle) for endpoint in endpoints]
        return [position for position, actor in enumerate(ids) if state(actor) == private.DEAD]

    def kill(self, endpoints: Sequence[Endpoint]) -> tuple[int, ...]:
        if not self.connected() or not endpoints:
            return ()
        dead = self.dead_of(endpoints)
        answering = [endpoint for position, endpoint in enumerate(endpoints) if position not in dead]
        self._ask(answering, "look")
        for endpoint in endpoints:
            with contextlib.suppress(rayx.RayError, ValueError):
                private.kill(endpoint.handle)
        deadline = time.monotonic() + _KILLED_WITHIN_S
        while len(self.dead_of(endpoints)) < len(endpoints) and time.monotonic() < deadline:
            time.sleep(0.002)
        answers = self._ask(endpoints, "end")
        self._agents.release(list(map(self._target, endpoints)))
        return tuple(sorted({pid for answer in answers if answer for pid in answer}))

    def export_metrics(self) -> float | None:
        """Export counted calls and bytes to Ray. Return the seconds to the next export; None: the cluster was left."""
        if not self.connected():
            return None
        with contextlib.suppress(Exception):  # errors of monitoring must not end the driver
            self._exporter = self._exporter or metrics.Exporter(meters)
            self._exporter.flush()
        return metrics.EVERY_S

    def inspect(self, endpoints: Sequence[Endpoint], stacks: bool) -> list[ProcessStatus]:
        answers = self._ask(endpoints, "inspect", stacks, timeout=_INSPECTS_WITHIN_S)
        is_gone = functools.cache(node_is_gone)
        return [
            answer or replace(NOTHING_ANSWERS, gone=is_gone(endpoint.facts.slot.node_id))
            for endpoint, answer in zip(endpoints, answers, strict=True)
        ]

    def cancel(self, endpoints: Sequence[Endpoint], ids: Sequence[int]) -> list[bool]:
        targets = [
            self._target(endpoint)._replace(call=call) for endpoint, call in zip(endpoints, ids, strict=True)
        ]
        return list(map(bool, self._agents.ask(targets, "cancel", timeout=_INSPECTS_WITHIN_S)))

    def sever(self, endpoints: Sequence[Endpoint]) -> None:
        self._ask(endpoints, "sever", timeout=_INSPECTS_WITHIN_S)

    def signal(self, endpoints: Sequence[Endpoint], signum: int) -> None:
        self._ask(endpoints, "send_signal", signum)

    def read(self, endpoint: Endpoint, path: str, offset: int, limit: int) -> bytes:
        (content,) = self._ask([endpoint], "read", path, offset, limit)
        return content_of(content, path, endpoint.facts.slot.host)

    def publish(self, key: str, value: bytes | None) -> None:
        if self.connected():
            private.write_key(key, value)

    def published(self, key: str) -> bytes | None:
        return private.read_key(key) if self.connected() else None

    def draining_nodes(self, ended: bool = False) -> Sequence[DrainingNode]:
        return placement.draining_nodes(ended) if self.connected() else ()

    def post_mortem(self, endpoint: Endpoint, lost: Lost | None) -> Lost:
        slot = endpoint.facts.slot
        if lost is None and node_is_gone(slot.node_id):  # Ray may notice this only some seconds later
            return of_node(Lost(""), slot)
        found = lost or self._ask_ray(endpoint)
        if found.node_lost or (not found.intended and node_is_gone(slot.node_id)):
            return of_node(found, slot)
        if found.intended:
            return found
        left = self._ask([endpoint], "post_mortem", timeout=_INSPECTS_WITHIN_S)[0]
        return with_post_mortem(found, left, endpoint.facts.log)

    def _ask_ray(self, endpoint: Endpoint) -> Lost:
        """Return the cause of an actor's death, taken from the error of a call on the actor."""
        try:
            private.get(private.call(endpoint.handle, "_px_report"), timeout=_INSPECTS_WITHIN_S)
        except rayx.GetTimeoutError:
            pass  # Ray has not noticed the death yet
        except rayx.RayError as error:
            return lost_of(error)
        return Lost("its process has ended")
