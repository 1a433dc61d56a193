"""The session of a driver: its connection to a cluster, and its open groups and pools."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx.backends.backend_types import CLUSTER_LEFT, Backend
from phalanx.config import Shown, backend_name, running_cluster, settings, shown_ranks
from phalanx.declare.context import runs_inline
from phalanx.errors import DeclarationError
from phalanx.session.background import Background, WorkQueue
from phalanx.session.output import Display
from phalanx.session.publisher import Publisher
from phalanx.session.wait_threads import WaitThreads
from phalanx.tracing.metric_buffer import meters
from phalanx.wire.unpack import Meter
from phalanx.wire.value import Value

_METRICS_AFTER_S = 5.0
_log = logging.getLogger("phalanx")


class Counts:
    """Counts of calls and bytes, since the start of a group or of the process.

    Attributes:
        calls: number of calls that were sent.
        failed: number of these calls that raised an error.
        sent_bytes: bytes of messages to all ranks together.
        stored_bytes: bytes of separately stored values and constructor arguments, once for any number of ranks.
        arrived: counter of bytes that arrived in this process as results. Values passed by reference from rank to rank
            are not counted.
    """

    def __init__(self, whole: Counts | None = None) -> None:
        self.calls = 0
        self.failed = 0
        self.sent_bytes = 0
        self.stored_bytes = 0
        self.arrived = Meter(None if whole is None else whole.arrived.add)

    def as_dict(self) -> dict[str, int]:
        return {
            "calls": self.calls,
            "failed": self.failed,
            "sent_bytes": self.sent_bytes,
            "stored_bytes": self.stored_bytes,
            "fetched_bytes": self.arrived.nbytes,
        }


class Session:
    """State of this process that outlives calls. A process has a single session, as it has a single Ray connection.

    Attributes:
        run_id: scopes the names of this run's placement groups and actors, so that two runs never meet.
        queue: work for the background thread.
        display: shows the output of ranks.
        publisher: publishes groups for the commands.
        waiters: threads that wait for calls.
        counts: calls and bytes of all groups, and of stored values.
        kept_pools: open pools that are kept alive, because other processes use their groups.
        before_groups_close: functions to call before the groups of a backend are closed: with the backend, or None for
            all. The cluster may be lost already (``connected()`` is False): there is nothing to free there then.
        at_shutdown: functions that :meth:`shutdown` calls after all groups are closed and before backends are left.
        pool_numbers, group_numbers: count the pools and groups made in this process.
    """

    def __init__(self) -> None:
        self.run_id = secrets.token_hex(3)
        self.queue = WorkQueue()
        self.display = Display()
        self.publisher = Publisher(self.queue)
        self.waiters = WaitThreads()
        self.counts = Counts()
        self._lock = threading.RLock()  # held while the session connects or ends
        self._open_lock = threading.Lock()
        self._backends: dict[str, Backend] = {}
        self._backend: str | None = None  # as px.init named it
        self._inline_resources: dict[str, float] = {}
        self._started_ray = False
        self.shown: Shown | None = None  # as px.init named it
        self.pool_numbers = itertools.count(1)
        self.group_numbers = itertools.count(1)
        self._used_names: set[str] = set()
        self._groups: weakref.WeakSet[Any] = weakref.WeakSet()
        self._pools: weakref.WeakSet[Any] = weakref.WeakSet()
        self.kept_pools: set[Any] = set()
        self.before_groups_close: list[Callable[[Backend | None], None]] = []
        self.at_shutdown: list[Callable[[], None]] = []

    # Connection

    def connect(self, backend: str | None, given: Mapping[str, Any]) -> None:
        """Start or join the cluster of a backend, with options for ``ray.init``; see :func:`init`."""
        chosen = backend_name(backend or self._default_backend())
        with self._lock:
            options = {"CPU": "num_cpus", "GPU": "num_gpus"}
            counts = {name: float(given[option]) for name, option in options.items() if option in given}
            self._inline_resources |= counts
            if chosen != "inline":
                self._start_ray(given)
            elif counts:
                self._backends.pop("inline", None)
            if backend is not None:
                self._backend = chosen

    def _default_backend(self) -> str:
        """Return the name of the default backend: "inline" on an inline rank, else as ``px.init`` or settings say."""
        return "inline" if runs_inline() else self._backend or settings().backend

    def _start_ray(self, given: Mapping[str, Any]) -> None:
        from phalanx.backends.ray import cluster as ray_cluster  # loads Ray

        if ray_cluster.is_running():
            if given:
                raise DeclarationError(
                    f"px.init({', '.join(given)}): this process is connected to a Ray cluster already, so these "
                    "options cannot be applied; call px.init before the first pool, or px.shutdown() first"
                )
            return
        ray_cluster.start(_with_address(given))
        self._started_ray = True

    def get_backend(self, name: str | None = None) -> Backend:
        """Return the backend of that name (None: the default backend), created on first use."""
        name = backend_name(name or self._default_backend())
        with self._lock:
            if name == "ray":
                from phalanx.backends.ray import cluster as ray_cluster  # loads Ray
                from phalanx.backends.ray.backend import RayBackend  # loads Ray

                if not ray_cluster.is_running():
                    self._start_ray({})
                known = self._backends.get("ray")
                if known is not None and not known.connected():
                    self.lost(known)
                if "ray" not in self._backends:
                    backend = self._backends["ray"] = RayBackend()
                    meters.on = settings().metrics
                    if meters.on:
                        Background(backend.export_metrics, first_after=_METRICS_AFTER_S).begin()
                return self._backends["ray"]
            from phalanx.backends.inline import InlineBackend  # not needed with Ray

            if "inline" not in self._backends:
                self._backends["inline"] = InlineBackend(_own_accelerators() | self._inline_resources)
            return self._backends["inline"]

    @property
    def show_ranks(self) -> Shown:
        """The ranks whose output this driver shows, for groups without an option ``show_ranks``."""
        return settings().show_ranks if self.shown is None else self.shown

    # Open groups and pools

    def unused(self, name: str) -> str:
        """Return a name that this session has not returned before: ``name``, if necessary with a number behind it."""
        with self._open_lock:
            numbered = (f"{name}.{number}" for number in itertools.count(2))
            found = next(one for one in itertools.chain([name], numbered) if one not in self._used_names)
            self._used_names.add(found)
            return found

    def add_group(self, group: Any) -> None:
        """Add a group or view of this process. If metrics are on, they include its counts."""
        if meters.on and not group.backend.immediate:
            meters.watch(group)
        with self._open_lock:
            self._groups.add(group)

    def groups(self) -> list[Any]:
        """Return the groups that are still referenced in this process, each a ``group.Group``."""
        with self._open_lock:
            return list(self._groups)

    def own_group(self, number: int) -> Any | None:
        """Return the group that this process made with that number; None if it was garbage-collected."""
        return next((one for one in self.groups() if one.owner and one.handle.number == number), None)

    def add_pool(self, pool: Any) -> None:
        """Add a pool that has reserved slots."""
        with self._open_lock:
            self._pools.add(pool)

    def forget_pool(self, pool: Any) -> None:
        """Remove a closed pool. Idempotent."""
        with self._open_lock:
            self._pools.discard(pool)
        self.kept_pools.discard(pool)

    def pools(self) -> list[Any]:
        """Return the pools that hold slots, each a ``ResourcePool``, in the order in which they were made."""
        with self._open_lock:
            there = list(self._pools)
        return sorted(there, key=lambda pool: pool.number)

    # End

    def shutdown(self) -> None:
        """Close everything that is open, detached pools too; leave a cluster that this session connected to.

        A local cluster that it started ends. Idempotent.
        """
        with self._lock:
            self._let_go(None)
            self._backend = self.shown = None
            self._inline_resources = {}
            for callback in (*self.at_shutdown, *(backend.leave for backend in self._backends.values())):
                _attempt(callback)
            if self._started_ray:
                from phalanx.backends.ray import cluster as ray_cluster  # loads Ray

                ray_cluster.stop()
                self._started_ray = False
            self._backends.clear()

    def lost(self, backend: Backend) -> None:
        """Note that this process left a backend's cluster, not by :meth:`shutdown`. Idempotent."""
        with self._lock:
            if self._backends.get(backend.name) is backend:
                del self._backends[backend.name]
                self._started_ray = False
        self._let_go(backend)
        backend.leave()

    def _let_go(self, backend: Backend | None) -> None:
        """Close everything on a backend (None: on any), channels first, so that no rank waits for another.

        If a cluster was left, views of other owners' groups are closed too.
        """
        groups = [one for one in self.groups() if backend in (None, one.backend) and not one.closed]
        for group in groups:
            if backend is not None or group.owner:
                group.lifecycle.closed_because = CLUSTER_LEFT
        for callback in self.before_groups_close:
            _attempt(callback, backend)
        for pool in self.pools():
            if backend in (None, pool.backend_api):
                _attempt(pool.let_go, backend is None)
        if backend is not None:
            for group in groups:
                if not group.closed:
                    _attempt(group.begin_close)
                    _attempt(group.finish_close)
        _attempt(self.publisher.finish, backend)


def _attempt(close: Callable[..., object], *args: object) -> None:
    """Call a function that closes something. Its error is only logged, so that the rest is closed too."""
    try:
        close(*args)
    except Exception:
        _log.warning("not everything could be closed", exc_info=True)


def _with_address(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with an address: with counts, that of a new local cluster, even if another cluster runs here.

    Raises:
        DeclarationError: if counts are given for a cluster that exists already.
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


def _own_accelerators() -> dict[str, float]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {"GPU": float(count)} if count else {}


session = Session()


def _renew_waiters() -> None:
    session.waiters = WaitThreads()


os.register_at_fork(after_in_child=_renew_waiters)  # a fork has none of the threads


def init(
    *,
    backend: str | None = None,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    address: str | None = None,
    show_ranks: str | int | Sequence[int] | None = None,
    **ray_options: Value,
) -> None:
    """Start or join a cluster. Optional: the first pool does so with defaults.

    Args:
        backend: "ray" or "inline", from now on also the default of pools, groups, channels and stored values; default
            ``PHALANX_BACKEND``, else "ray".
        num_cpus: cores of a local cluster; default those of the machine.
        num_gpus: accelerators of a local cluster. On a machine without accelerators they are logical: pools and ranks
            get numbers for them, and ``worker.device`` is the CPU.
        address: address of a running cluster ("auto", "host:port"); default ``RAY_ADDRESS``, else a cluster on this
            machine, else a new local cluster.
        show_ranks: ranks whose output this driver shows, unless a group says otherwise: "all", "merged", "none", a rank
            or a list of ranks; default ``PHALANX_SHOW_RANKS``, else rank 0. Applies to groups that are made from now
            on.
        **ray_options: anything else that ``ray.init`` takes.

    Raises:
        DeclarationError: if options cannot be applied because the process is connected or the cluster exists already.
    """
    named = {"num_cpus": num_cpus, "num_gpus": num_gpus, "address": address or None}
    given = {name: value for name, value in named.items() if value is not None} | ray_options
    shown = None if show_ranks is None else shown_ranks(show_ranks)
    if shown is None and ray_options.get("log_to_driver") is False:
        shown = ()
    session.connect(backend, given)
    if shown is not None:
        session.shown = shown


def shutdown() -> None:
    """Close every channel, group and pool of this process, detached pools too, and leave the cluster.

    A local cluster that Phalanx started ends. A program that called ``ray.init()`` itself stays connected. Idempotent.
    """
    session.shutdown()


def statistics() -> dict[str, int]:
    """Return the counts of this process since its start, over all of its groups and ``px.put``.

    ``calls`` and ``failed`` count calls. ``sent_bytes`` went into messages to ranks, ``stored_bytes`` into the object
    store, and ``fetched_bytes`` of results were read. ``group.statistics()`` has the same for a single group.
    """
    return session.counts.as_dict()
