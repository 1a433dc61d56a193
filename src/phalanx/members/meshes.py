"""The meshes of a group: declared with the group, or registered by its ranks, each rank its own coordinates."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.calls.run_on import run_on
from phalanx.errors import DispatchError
from phalanx.group.group import Group
from phalanx.group.resize_plan import fitted
from phalanx.topology.mesh import Mesh
from phalanx.worker import handlers

#: Coordinates of a rank by axis, in each mesh that its workers registered, by mesh name.
Places = Mapping[str, Mapping[str, int]]


def mesh_of(core: Group, name: str = "default") -> Mesh:
    """Return a mesh that was declared for the group, or that its ranks registered (requested once per epoch).

    Raises:
        DispatchError: if there is no mesh of that name, or a rank has not registered its coordinates.
    """
    epoch, given = core.epoch, core.handle.meshes
    if name in given and given[name].world_size == epoch.size:
        return given[name]
    if name in given and name not in epoch.meshes:
        epoch.meshes[name] = fitted(given[name], epoch.size)
    if name not in epoch.meshes:
        epoch.meshes[name] = _registered_mesh(core, name)
    return epoch.meshes[name]


def known_meshes(core: Group) -> dict[str, Mesh]:
    """Return the declared meshes, and meshes that the ranks of this epoch have reported; calls no rank."""
    return {**core.epoch.meshes, **{name: mesh_of(core, name) for name in core.handle.meshes}}


def _registered_mesh(core: Group, name: str) -> Mesh:
    """Request the coordinates that ranks registered for a mesh, and return the mesh.

    Raises:
        DispatchError: if there is no mesh of that name, or a rank has not registered its coordinates.
    """
    places: list[Places] = run_on(core, handlers.meshes).result(None)
    registered = {key for meshes in places for key in meshes}
    if name not in registered:
        known = sorted({*core.handle.meshes, *registered})
        raise DispatchError(
            f"group {core.name!r} has no mesh {name!r} (it has: {', '.join(known) or 'none'}); pass "
            "mesh=px.Mesh(dp=..., tp=...) to px.WorkerGroup, or call self.register_mesh(name, ...) in the worker "
            "(a MegatronWorker: self.init_model_parallel(...))"
        )
    missing = [rank for rank, meshes in enumerate(places) if name not in meshes]
    if missing:
        raise DispatchError(
            f"mesh {name!r} of group {core.name!r}: ranks {missing} have not registered their place; every rank "
            "must call self.register_mesh(name, ...)"
        )
    return Mesh.from_coordinates([dict(meshes[name]) for meshes in places])
