"""Identity of a worker: its place in the group, and the state that it shares with other roles of its process."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from phalanx.errors import DeclarationError
from phalanx.topology.mesh import Mesh


class Siblings(dict[str, Any]):
    """The roles that live in this process, by name; filled while they are made, in the declared order."""

    def __missing__(self, role: str) -> Any:
        raise KeyError(
            f"no role {role!r} in this process yet; here are: {sorted(self)}. Roles are made in the "
            "order given to px.colocate, so a constructor sees only the ones before it"
        )

    def __getattr__(self, role: str) -> Any:
        if role.startswith("_"):
            raise AttributeError(role)
        try:
            return self[role]
        except KeyError as error:
            raise AttributeError(error.args[0]) from None


@dataclass
class WorkerContext:
    """Identity of a worker: its place in the group, and the state that it shares with other roles of its process.

    ``device_type`` is torch's name of the accelerator ("cuda", "npu", ...) or "cpu"; ``local_device`` the index that
    this process must use; ``meshes`` are the group's, ``registered`` the coordinates that workers declared, or
    functions that return them; ``in_driver`` says that calls run one after another in the driver's own process;
    ``tell`` shows a line about the rank's state in `phalanx top`, if there is a page for it. ``measure`` reports
    numbers to the cluster's own monitoring: their subject, the rank as text, values by name. ``shared`` is the state
    that the library keeps for all roles of the rank.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    group: str = ""
    role: str = ""
    epoch: int = 0
    host: str = ""
    node_id: str = ""
    accelerator_ids: tuple[str, ...] = ()
    device_type: str = "cpu"
    local_device: int = 0
    meshes: dict[str, Mesh] = field(default_factory=dict[str, Mesh])
    registered: dict[str, Any] = field(default_factory=dict[str, Any])
    roles: Siblings = field(default_factory=Siblings)
    in_driver: bool = False
    tell: Callable[[str], None] | None = None
    measure: Callable[[str, str, Mapping[str, float]], None] | None = None
    shared: dict[str, Any] = field(default_factory=dict[str, Any])

    def places(self) -> dict[str, dict[str, Any]]:
        """This rank's coordinates in each registered mesh that there is by now."""
        found = {name: mesh() if callable(mesh) else mesh for name, mesh in self.registered.items()}
        return {name: coordinates_of(mesh, self.rank) for name, mesh in found.items() if mesh is not None}


#: The context of the worker that is being made; read when a constructor asks for its rank.
being_made: ContextVar[WorkerContext | None] = ContextVar("phalanx_worker_being_made", default=None)


_others: dict[int, tuple[weakref.ref[Any], WorkerContext]] = {}
_of_process: list[WorkerContext] = []
_present: ContextVar[WorkerContext | None] = ContextVar("phalanx_present_worker", default=None)


def note_context(worker: object, context: WorkerContext) -> None:
    """Remember who a worker is whose class has no place for it."""
    key, others = id(worker), _others  # held by the callback, which also runs while the interpreter ends
    with contextlib.suppress(TypeError):  # objects without weak references are not remembered
        others[key] = weakref.ref(worker, lambda _: others.pop(key, None)), context


def context_of(worker: object) -> WorkerContext:
    """Return the context of a worker, also for a class that is no ``px.Worker``, and during its constructor."""
    context = getattr(worker, "_context", None)
    if isinstance(context, WorkerContext):
        return context
    known = _others.get(id(worker))
    if known is not None and known[0]() is worker:
        return known[1]
    context = current_context()  # also of an object without weak references
    if context is None:
        context = WorkerContext()
        note_context(worker, context)
    return context


def set_context_of_process(context: WorkerContext) -> None:
    """Store the context of the rank that this process runs, if it runs no other rank."""
    _of_process[:] = [context]


@contextlib.contextmanager
def present(context: WorkerContext) -> Generator[None]:
    """The time in which this thread runs code of that rank, where several share a process."""
    token = _present.set(context)
    try:
        yield
    finally:
        _present.reset(token)


def current_context() -> WorkerContext | None:
    """Return the context of the rank that runs this code, None outside of ranks."""
    return being_made.get() or _present.get() or next(iter(_of_process), None)


def runs_inline() -> bool:
    """Return whether this is the code of a rank that runs in the driver's process."""
    context = being_made.get() or _present.get()
    return context is not None and context.in_driver


def coordinates_of(mesh: Any, rank: int) -> dict[str, Any]:
    """This rank's coordinates by axis in a px.Mesh, a torch DeviceMesh, or a plain dict."""
    if isinstance(mesh, Mesh):
        return dict(mesh.coordinates(rank))
    if isinstance(mesh, Mapping):
        return {str(axis): int(place) for axis, place in mesh.items()}
    axes, place = getattr(mesh, "mesh_dim_names", None), getattr(mesh, "get_coordinate", None)
    coordinate = place() if callable(place) else None
    if axes and coordinate is not None:
        return dict(zip(axes, (int(c) for c in coordinate), strict=True))  # type: ignore[union-attr]
    raise DeclarationError(
        f"register_mesh: got {type(mesh).__name__}; expected a px.Mesh, a dict of coordinates such as "
        '{"dp": 0, "tp": 1}, or a torch DeviceMesh made with mesh_dim_names=(...) that contains this rank'
    )
