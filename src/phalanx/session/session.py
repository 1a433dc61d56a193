"""The cluster that this driver uses: started or joined when first needed, and let go of when it is left."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from enum import IntEnum
from typing import Any

from phalanx.backends.api import Backend
from phalanx.config import Shown, backend_name, running_cluster, settings, shown_ranks
from phalanx.declare.context import runs_inline
from phalanx.errors import DeclarationError
from phalanx.wire.value import Value

#: Scopes the names of this run's placement groups and actors, so that two runs never meet.
RUN_ID = secrets.token_hex(3)

LetGo = Callable[[Backend | None], None]


class LetGoStep(IntEnum):
    """Steps of letting a backend go, in order."""

    NOTE = 0  # record in open objects why they will be closed
    PART = 1  # close objects that join groups, so that none waits for another
    CLOSE = 2  # close objects that this process owns
    FORGET = 3  # forget objects of other owners


_log = logging.getLogger("phalanx")


class _Connections:
    """State of this process's connections. There is a single instance, since a process has a single Ray connection."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.backends: dict[str, Backend] = {}
        self.backend: str | None = None  # as px.init named it
        self.inline_resources: dict[str, float] = {}
        self.started_ray = False
        self.show_ranks: Shown | None = None
        self.letting_go: list[tuple[LetGoStep, LetGo]] = []
        self.ending: list[Callable[[], None]] = []


_state = _Connections()


def init(
    *,
    backend: str | None = None,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    address: str | None = None,
    show_ranks: str | int | Sequence[int] | None = None,
    **ray_options: Value,
) -> None:
    """Start or join the cluster with options of your own. Optional: the first pool does it with defaults.

    Args:
        backend: "ray" or "inline", from now on also the default of pools, groups, channels and stored values; default
            ``PHALANX_BACKEND``, else "ray".
        num_cpus: cores of a local cluster; default those of the machine.
        num_gpus: its accelerators. On a machine without any they are logical: pools and ranks get numbers for them and
            ``worker.device`` is the CPU.
        address: of a running cluster ("auto", "host:port"); default ``RAY_ADDRESS``, else a cluster on this machine,
            else a new local cluster.
        show_ranks: ranks whose output this driver shows, unless a group says otherwise: "all", "merged", "none", a rank
            or a list of ranks; default ``PHALANX_SHOW_RANKS``, else rank 0. Applies to groups that are made from now
            on.
        **ray_options: anything else that ``ray.init`` takes.

    Raises:
        DeclarationError: this process is connected already and options are given that cannot be applied any more.
    """
    chosen = backend_name(backend or _default_backend())
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
            _state.backends.pop("inline", None)
        else:
            _start_ray({**counts, **({"address": address} if address else {}), **ray_options})
        if backend is not None:
            _state.backend = chosen


def _default_backend() -> str:
    """Return the backend of an inline rank for its own code, else the backend that px.init or the environment names."""
    return "inline" if runs_inline() else _state.backend or settings().backend


def _start_ray(given: Mapping[str, Any]) -> None:
    from phalanx.backends.ray import cluster as ray_cluster  # loads Ray

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
    """Return the options with an address; counts request a new local cluster, even if another cluster is running here.

    Raises:
        DeclarationError: counts for a cluster that exists already.
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


def get_backend(name: str | None = None) -> Backend:
    """Return the backend of that name, else the default backend; created on first use."""
    name = backend_name(name or _default_backend())
    with _state.lock:
        if name == "ray":
            from phalanx.backends.ray import cluster as ray_cluster  # loads Ray
            from phalanx.backends.ray.backend import RayBackend  # loads Ray

            if not ray_cluster.is_running():
                _start_ray({})
            known = _state.backends.get("ray")
            if known is not None and not known.connected():
                lost(known)
            return _state.backends.get("ray") or _state.backends.setdefault("ray", RayBackend())
        from phalanx.backends.inline import InlineBackend  # not needed beside Ray

        if "inline" not in _state.backends:
            _state.backends["inline"] = InlineBackend(_state.inline_resources or _own_accelerators())
        return _state.backends["inline"]


@contextlib.contextmanager
def replaced_backend(name: str, other: Backend) -> Generator[None]:
    """Replace a backend by another for the duration of a context, for tests."""
    with _state.lock:
        before = _state.backends.get(name)
        _state.backends[name] = other
    try:
        yield
    finally:
        with _state.lock:
            _state.backends.pop(name, None)
            if before is not None:
                _state.backends[name] = before


def _own_accelerators() -> dict[str, float]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {"GPU": float(count)} if count else {}


def at_letting_go(step: LetGoStep, callback: LetGo) -> None:
    """Have a function called when a backend is let go of: with that backend, or with None for all of them.

    The cluster may be lost already (``connected()`` is False): then nothing is freed, only noted.
    """
    _state.letting_go.append((step, callback))


def at_shutdown(callback: Callable[[], None]) -> None:
    """Have a function called by :func:`shutdown`, after all groups are closed and before Ray is left."""
    _state.ending.append(callback)


def _let_go(backend: Backend | None) -> None:
    for _, callback in sorted(_state.letting_go, key=lambda entry: entry[0]):
        try:
            callback(backend)
        except Exception:  # the others are to be freed all the same
            _log.warning("not everything could be closed", exc_info=True)


def shutdown() -> None:
    """Close every pool of this process; end the local Ray cluster if ``phalanx`` started it. Idempotent."""
    with _state.lock:
        _let_go(None)
        for callback in _state.ending:
            callback()
        _state.backend = None
        _state.inline_resources = {}
        _state.show_ranks = None
        if _state.started_ray:
            from phalanx.backends.ray import cluster as ray_cluster  # loads Ray

            ray_cluster.stop()
        for backend in _state.backends.values():
            backend.leave()
        _state.backends.clear()


def lost(backend: Backend) -> None:
    """Note that a backend's cluster was left without a word to this library. Idempotent."""
    with _state.lock:
        if _state.backends.get(backend.name) is backend:
            del _state.backends[backend.name]
            _state.started_ray = False
    _let_go(backend)
    backend.leave()


def show_ranks() -> Shown:
    """The ranks whose output this driver shows, of groups that say nothing of it."""
    return _state.show_ranks if _state.show_ranks is not None else settings().show_ranks
