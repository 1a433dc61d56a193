"""The Ray backend: actors in placement groups, object references, one ``ray.get`` per call."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray import exceptions as rayx

from phalanx.errors import PlacementError
from phalanx.topology.placement import Holder, NodeCapacity
from phalanx.topology.slots import Slot
from phalanx.transport.base import (
    Endpoint,
    FetchFailed,
    NotReady,
    Outcome,
    Ref,
    Reservation,
    ReserveRequest,
    SpawnRequest,
    Ticket,
)
from phalanx.transport.facade import facade_name
from phalanx.transport.ray import placement
from phalanx.transport.ray.errors import lost_of, outcome_of
from phalanx.transport.ray.shell import actor_class

NAMESPACE = "phalanx"
_DEAD = 4  # ray.core.generated.gcs_pb2.ActorTableData.DEAD, as ActorHandle._get_local_state gives it


class RayTransport:
    """Ranks as Ray actors."""

    name = "ray"
    immediate = False

    def nodes(self) -> list[NodeCapacity]:
        return placement.nodes()

    def holders(self) -> list[Holder]:
        return placement.holders()

    def reserve(self, request: ReserveRequest) -> Reservation:
        return placement.reserve(request)

    def release(self, reservation: Reservation) -> None:
        placement.release(reservation)  # pyright: ignore[reportArgumentType]

    def nodes_of(self, slots: Sequence[Slot], reservations: Mapping[str, Reservation]) -> list[str]:
        return placement.nodes_of(slots, reservations)

    def probe(
        self, slots: Sequence[Slot], reservations: Mapping[str, Reservation], bundle: Mapping[str, float]
    ) -> list[tuple[str, ...]]:
        return placement.probe(slots, reservations, bundle)

    def spawn(self, request: SpawnRequest) -> list[Endpoint]:
        handles = self._create(request)
        try:
            reports = ray.get([handle._px_report.remote() for handle in handles], timeout=request.timeout)
        except BaseException as error:
            for handle in handles:
                ray.kill(handle)
            if isinstance(error, rayx.GetTimeoutError):
                raise PlacementError(
                    f"{request.class_name}: {len(handles)} worker processes did not all start within "
                    f"{request.timeout:g} s; the node may be overloaded, or a runtime_env takes long to build: "
                    "raise start_timeout=, or look at `ray status`"
                ) from None
            if isinstance(error, rayx.RayError):
                raise PlacementError(
                    f"{request.class_name}: a worker process did not start: {lost_of(error).reason}"
                ) from error
            raise
        names = request.names or (None,) * len(handles)
        return [
            Endpoint(slot, handle, facts, name)
            for slot, handle, facts, name in zip(request.slots, handles, reports, names, strict=True)
        ]

    def _create(self, request: SpawnRequest) -> list[Any]:
        cls = actor_class(request.class_name, request.methods, request.max_concurrency is not None)
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0}
        custom: dict[str, float] = {}
        for resource, amount in request.resources.items():
            if resource == "CPU":
                options["num_cpus"] = amount
            elif resource == "GPU":
                options["num_gpus"] = amount
            else:
                custom[resource] = amount
        if custom:
            options["resources"] = custom
        if request.runtime_env:
            options["runtime_env"] = dict(request.runtime_env)
        if request.max_concurrency is not None:
            options["max_concurrency"] = request.max_concurrency
        if request.detached:
            options["lifetime"] = "detached"
        handles: list[Any] = []
        try:
            for index, slot in enumerate(request.slots):
                named = _named(request.names[index], request.namespace) if request.names else {}
                where = placement.strategy(slot, request.reservations)
                handles.append(
                    cls.options(**options, **named, scheduling_strategy=where).remote(request.factory)
                )
        except BaseException:
            for handle in handles:
                ray.kill(handle)
            raise
        return handles

    def setup(self, endpoint: Endpoint, data: bytes, refs: Sequence[Ref]) -> Ticket:
        return Ticket(endpoint.handle._px_setup.remote(data, list(refs)))

    def submit(
        self, endpoint: Endpoint, role: str, method: str, data: bytes, refs: Sequence[Ref], describe: bool
    ) -> Ticket:
        remote = endpoint.methods.get(role + "/" + method)
        if remote is None:
            handle = endpoint.handle
            remote = getattr(handle, facade_name(role, method), None) or handle._px_call
            endpoint.methods[role + "/" + method] = remote
        args = (data, list(refs)) if refs else (data,)
        if not describe:
            return Ticket(remote.remote(*args))
        info, value = remote.options(num_returns=2).remote(*args)
        return Ticket(value, info)

    def put(self, value: Any) -> Ref:
        return ray.put(value)

    def is_ref(self, value: Any) -> bool:
        return isinstance(value, ray.ObjectRef)

    def ref_types(self) -> tuple[type, ...]:
        return (ray.ObjectRef,)

    def fetch(self, refs: Sequence[Ref], timeout: float | None = None) -> list[Any]:
        try:
            return ray.get(list(refs), timeout=timeout)
        except rayx.GetTimeoutError as error:
            raise NotReady from error
        except rayx.RayError as error:
            raise FetchFailed from error

    def wait(self, refs: Sequence[Ref], count: int, timeout: float | None) -> tuple[list[int], list[int]]:
        positions = {ref: index for index, ref in enumerate(refs)}
        done, rest = ray.wait(list(refs), num_returns=count, timeout=timeout, fetch_local=False)
        return sorted(positions[ref] for ref in done), sorted(positions[ref] for ref in rest)

    def outcome(self, ref: Ref) -> Outcome:
        try:
            return Outcome(ray.get(ref))
        except rayx.RayError as error:
            return outcome_of(error)

    def find(self, name: str) -> Any | None:
        try:
            return ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            return None

    def reservation_keys(self, reservation: Reservation) -> tuple[str, ...]:
        return placement.keys_of(reservation)

    def release_keys(self, keys: Sequence[str]) -> None:
        placement.release_keys(keys)

    def alive(self, endpoint: Endpoint) -> bool:
        return endpoint.handle._get_local_state() != _DEAD

    def kill(self, endpoints: Sequence[Endpoint]) -> None:
        if not ray.is_initialized():
            return
        for endpoint in endpoints:
            with contextlib.suppress(rayx.RayError, ValueError):
                ray.kill(endpoint.handle)
        deadline = time.monotonic() + 5.0
        while any(self.alive(endpoint) for endpoint in endpoints) and time.monotonic() < deadline:
            time.sleep(0.002)


def _named(name: str, namespace: str | None) -> dict[str, str]:
    return {"name": name, "namespace": NAMESPACE if namespace is None else namespace}
