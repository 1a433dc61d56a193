"""Library functions that a driver runs on ranks for its syncs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from phalanx.errors import WeightsTransferError
from phalanx.weights.plan import Locality, RankLocation, Side
from phalanx.weights.shared_memory import device_id
from phalanx.weights.transport_interface import ConnectRequest, Description, Sent, SyncRequest
from phalanx.weights.transports import CUDA_IPC, NCCL
from phalanx.weights.versions import Weights
from phalanx.wire.messages import STORE_VARIABLE, WeightsKey

if TYPE_CHECKING:  # a driver needs the names of these functions, not FSDP, which loads slowly
    from phalanx.weights.weight_ends import WeightSource, WeightTarget
    from phalanx.worker.worker_runtime import WorkerRuntime

_NAMESPACES = ("/proc/self/ns/net", "/proc/self/ns/pid")


def tear(runtime: WorkerRuntime, key: WeightsKey, number: int) -> None:
    """Note that the sync to a version failed on another rank."""
    runtime.weights.tear(key, number)


def state(runtime: WorkerRuntime, key: WeightsKey) -> Weights:
    """Return the state of accepted weights.

    Raises:
        DeclarationError: if the role accepts none of that name.
    """
    runtime.weights.accepted(key)
    return runtime.weights.weights(key)


def describe(runtime: WorkerRuntime, side: Side, key: WeightsKey) -> Description:
    """Return the layout and the location of this rank's weights."""
    from phalanx.weights.local_layout import read_layout  # FSDP: only on ranks with weights

    registry = runtime.weights
    accepted = registry.accepted(key) if side == "target" else None
    everything = accepted is not None and accepted.model is None
    layout = None if everything else read_layout(accepted or registry.published(key))
    # load= reads the tensors from host memory of this library
    on_host = accepted is not None and accepted.load is not None
    device = "" if layout is None or on_host else device_id(layout.device)
    return Description(
        manifest=None if layout is None else layout.manifest,
        location=_location(runtime, device),
        number=registry.newest(key),
        share=accepted is not None and accepted.share,
        store=os.environ.get(STORE_VARIABLE, ""),
    )


def _location(runtime: WorkerRuntime, device: str) -> RankLocation:
    """Return the location of this rank. Ranks can share memory if kernel, namespaces and user are the same."""
    namespaces = [os.stat(path).st_ino for path in _NAMESPACES if os.path.exists(path)]
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    node = f"{runtime.context.node_id}/{boot}/{namespaces}/{os.getuid()}"
    return RankLocation(node, f"{node}/{os.getpid()}", device)


def connect(runtime: WorkerRuntime, request: ConnectRequest) -> object:
    """Create this rank's endpoints. Return the address of a source, None for a target.

    A rank that cannot use a device path returns the error instead, and the driver chooses another transport.
    """
    from phalanx.weights.weight_ends import WeightSource, WeightTarget  # FSDP: only on ranks with weights

    registry, rank = runtime.weights, request.ranks.index(runtime.context.rank)
    ends = registry.ends.setdefault(request.connection, {})
    try:
        if request.side == "source":
            source = ends["source"] = WeightSource(registry, request, rank)
            return source.address
        ends["target"] = WeightTarget(registry, request, rank)
        return None
    except WeightsTransferError as error:
        if request.transports[Locality.NODE] not in (CUDA_IPC, NCCL):
            raise
        return error


def disconnect(runtime: WorkerRuntime, connection: str) -> None:
    """Release the endpoints of this rank for a connection."""
    for end in runtime.weights.ends.pop(connection, {}).values():
        end.close()


def sync(runtime: WorkerRuntime, request: SyncRequest, sides: Sequence[Side], *before: object) -> Sent | None:
    """Send or receive a version, or both, by the ``sides`` of this rank. Return the response of a source.

    ``before`` are results of earlier calls, for which an asynchronous rank had to wait. After an error the rank's
    endpoints are closed.
    """
    ends = runtime.weights.ends.get(request.connection, {})
    source, target = (ends.get(side) if side in sides else None for side in ("source", "target"))
    try:
        if source and target:
            return _sync_both(source, target, request)
        if source:
            return source.send(request)
        if target:
            return target.receive(request)
        raise WeightsTransferError(
            "this rank is not connected for this sync: an earlier sync failed, or another driver connected it; sync "
            f"again (version {request.number})"
        )
    except BaseException:
        disconnect(runtime, request.connection)
        raise


def _sync_both(source: WeightSource, target: WeightTarget, request: SyncRequest) -> Sent:
    """Send on a thread and receive on this thread: other ranks may wait for either."""
    with ThreadPoolExecutor(1, "phalanx-weights") as thread:
        sending = thread.submit(source.send, request)
        # else the target would wait for a source that failed
        sending.add_done_callback(lambda done: source.close() if done.exception() else None)
        try:
            target.receive(request)
            return sending.result()
        except BaseException as error:
            cause = sending.exception() if sending.done() else None
            source.close()  # ends a send that waits, with another error
            if cause and isinstance(error, WeightsTransferError):
                raise cause from None  # the reason why the target lost its source
            raise
