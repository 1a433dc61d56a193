"""The cluster that this driver uses: started or joined when first needed."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import weakref
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from phalanx.config import Shown, backend_name, running_cluster, settings, shown_ranks
from phalanx.errors import DeclarationError
from phalanx.show.sizes import size
from phalanx.show.tables import Table
from phalanx.transport.base import Transport

if TYPE_CHECKING:
    from phalanx.runtime.pools.pool import ResourcePool

#: Scopes the names of this run's placement groups and actors, so that two runs never meet.
RUN_ID = secrets.token_hex(3)


class _State:
    """What this process has started. One per process, because one process has one Ray connection."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.transports: dict[str, Transport] = {}
        self.inline_resources: dict[str, float] = {}
        self.started_ray = False
        self.show_ranks: Shown | None = None
        self.pools: weakref.WeakSet[ResourcePool] = weakref.WeakSet()


_state = _State()


def init(
    *,
    backend: str | None = None,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    address: str | None = None,
    show_ranks: str | int | Sequence[int] | None = None,
    **ray_options: Any,
) -> None:
    """Start or join the cluster with options of your own. Optional: the first pool does it with defaults.

    Args:
        backend: "ray" or "inline"; default ``PHALANX_BACKEND``, else "ray".
        num_cpus: cores that a local cluster is to have; default those of the machine.
        num_gpus: accelerators that it is to have. On a machine without any they are logical: pools and ranks get
            numbers for them and ``worker.device`` is the CPU.
        address: of a running cluster ("auto", "host:port"); default ``RAY_ADDRESS``, else one on this machine, else
            a new local one.
        show_ranks: whose output this driver shows, unless a group says otherwise: "all", "none", a rank or a list of
            ranks; default ``PHALANX_SHOW_RANKS``, else rank 0. Counts for groups that are made from now on.
        **ray_options: anything else that ``ray.init`` takes.

    Raises:
        DeclarationError: this process is connected already and options are given that cannot be applied any more.
    """
    chosen = backend_name(backend or settings().backend)
    counts = {
        key: value for key, value in (("num_cpus", num_cpus), ("num_gpus", num_gpus)) if value is not None
    }
    if show_ranks is not None:
        _state.show_ranks = shown_ranks(show_ranks)
    elif ray_options.get("log_to_driver") is False:
        _state.show_ranks = ()
    with _state.lock:
        _state.inline_resources = {
            name: float(counts[key])
            for key, name in (("num_cpus", "CPU"), ("num_gpus", "GPU"))
            if key in counts
        }
        if chosen == "inline":
            _state.transports.pop("inline", None)
            return
        from phalanx.transport.ray import cluster as ray_cluster

        given = {**counts, **({"address": address} if address else {}), **ray_options}
        if ray_cluster.is_running():
            if given:
                raise DeclarationError(
                    f"px.init({', '.join(given)}): this process is connected to a Ray cluster already, so these "
                    "options cannot be applied; call px.init before the first pool, or px.shutdown() first"
                )
            return
        ray_cluster.start(_with_address(given))
        _state.started_ray = True


def _with_address(given: Mapping[str, Any]) -> dict[str, Any]:
    """Counts are those of a new local cluster, even where another one is running on this machine.

    Raises:
        DeclarationError: counts for a cluster that is there already.
    """
    counts = [name for name in ("num_cpus", "num_gpus") if name in given]
    named = given.get("address") or running_cluster()
    if not counts or named == "local":
        return dict(given)
    if named:
        raise DeclarationError(
            f"px.init({', '.join(counts)}): these are the counts of a new local cluster, but address= or RAY_ADDRESS "
            f"names the cluster {named!r}; leave the counts out to join that one, or unset RAY_ADDRESS"
        )
    return {**given, "address": "local"}


def transport(backend: str | None = None) -> Transport:
    """The transport of that name, made when first asked for."""
    name = backend_name(backend or settings().backend)
    with _state.lock:
        if name == "ray":
            from phalanx.transport.ray import cluster as ray_cluster
            from phalanx.transport.ray.transport import RayTransport

            if not ray_cluster.is_running():
                init(backend="ray")
            return _state.transports.setdefault("ray", RayTransport())
        from phalanx.transport.inline import InlineTransport

        if "inline" not in _state.transports:
            _state.transports["inline"] = InlineTransport(_state.inline_resources or _own_accelerators())
        return _state.transports["inline"]


@contextlib.contextmanager
def replaced_transport(name: str, other: Transport) -> Generator[None]:
    """Let another transport stand for a backend meanwhile, for tests."""
    with _state.lock:
        before = _state.transports.get(name)
        _state.transports[name] = other
    try:
        yield
    finally:
        with _state.lock:
            _state.transports.pop(name, None)
            if before is not None:
                _state.transports[name] = before


def _own_accelerators() -> dict[str, float]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {"GPU": float(count)} if count else {}


def shutdown() -> None:
    """Close every pool of this process; end the local Ray cluster if ``phalanx`` started it. Idempotent."""
    from phalanx.runtime.life.notices import publisher
    from phalanx.runtime.tools.trace import save_environment_trace

    with _state.lock:
        for pool in list(_state.pools):
            pool.close()
        save_environment_trace()
        publisher.finish()
        _state.transports.clear()
        _state.inline_resources = {}
        _state.show_ranks = None
        if _state.started_ray:
            from phalanx.transport.ray import cluster as ray_cluster

            ray_cluster.stop()
            _state.started_ray = False


def show_ranks() -> Shown:
    """The ranks whose output this driver shows, of groups that say nothing of it."""
    return _state.show_ranks if _state.show_ranks is not None else settings().show_ranks


def remember(pool: ResourcePool) -> None:
    """Keep a pool in view of :func:`status` and :func:`shutdown` as long as it lives."""
    with _state.lock:
        _state.pools.add(pool)


def forget(pool: ResourcePool) -> None:
    """Take a closed pool out of view."""
    with _state.lock:
        _state.pools.discard(pool)


def status(backend: str | None = None) -> Table:
    """What the cluster has, what is free, and what pools and groups hold, node by node.

    Prints as a table; ``.to_dict()`` gives it as data.
    """
    backend_transport = transport(backend)
    rows: list[tuple[Any, ...]] = []
    held_by_node: dict[str, list[str]] = {}
    for holder in backend_transport.holders():
        amounts = ", ".join(f"{_amount(name, amount)} {name}" for name, amount in holder.resources.items())
        held_by_node.setdefault(holder.node_id, []).append(f"{holder.name} ({amounts})")
    for node in backend_transport.nodes():
        rows += [
            (node.host, node.node_id[:8], name, _amount(name, free), _amount(name, total), held)
            for name, total, free, held in _resource_rows(
                node.total, node.available, held_by_node.get(node.node_id, [])
            )
        ]
    with _state.lock:
        pools = list(_state.pools)
    notes = [_pool_line(pool) for pool in pools if not pool.closed] or ["no pools in this process"]
    if backend_transport.name == "ray":
        from phalanx.transport.ray import cluster as ray_cluster

        notes.append(f"address, for RAY_ADDRESS and `phalanx top --address`: {ray_cluster.address()}")
    return Table(
        f"cluster ({backend_transport.name} backend, run {RUN_ID}, driver pid {os.getpid()})",
        ("host", "node", "resource", "free", "total", "held by"),
        tuple(rows),
        tuple(notes),
    )


def _resource_rows(
    total: Mapping[str, float], free: Mapping[str, float], holders: list[str]
) -> list[tuple[str, float, float, str]]:
    shown = sorted(name for name in total if not name.startswith("accelerator_type:"))
    return [
        (name, total[name], free.get(name, 0.0), "; ".join(holders) if index == 0 else "")
        for index, name in enumerate(shown)
    ]


def _amount(name: str, amount: float) -> str:
    if "memory" in name:
        return size(amount)
    return f"{amount:g}"


def _pool_line(pool: ResourcePool) -> str:
    groups = ", ".join(f"{group.name} ({group.world_size} ranks, {group.state})" for group in pool.groups)
    return f"pool {pool.name}: {pool.world_size} slots; groups: {groups or 'none'}"
