"""The meshes of a group: declared with the group, or registered by its ranks, each rank its own coordinates."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from phalanx.calls.run_on import run_on
from phalanx.errors import DispatchError
from phalanx.group.group import Group
from phalanx.group.resize_plan import fitted
from phalanx.topology.mesh import Mesh
from phalanx.worker import handlers

#: Of a rank: the coordinates by axis in each mesh that its worker registered, by name.
Places = Mapping[str, Mapping[str, int]]


def mesh_of(core: Group, name: str = "default") -> Mesh:
    """Return a mesh that was given to the group, or that its ranks registered (asked once per epoch).

    Raises:
        DispatchError: there is none of that name, or not every rank registered its place.
    """
    epoch, given = core.epoch, core.card.meshes
    if name in given and given[name].world_size == epoch.size:
        return given[name]
    if name in given and name not in epoch.meshes:
        epoch.meshes[name] = fitted(given[name], epoch.size)
    if name not in epoch.meshes:
        places = [run_on(core, handlers.meshes, role=role).result(None) for role in core.card.methods]
        epoch.meshes[name] = told_mesh(core.name, name, places, given)
    return epoch.meshes[name]


def known_meshes(core: Group) -> dict[str, Mesh]:
    """Return the declared meshes, and meshes that the ranks of this epoch reported already; calls no rank."""
    return {**core.epoch.meshes, **{name: mesh_of(core, name) for name in core.card.meshes}}


def told_mesh(group: str, name: str, told: Iterable[Sequence[Places]], given: Collection[str]) -> Mesh:
    """The mesh of that name; ``told`` are the places by rank, of each role, ``given`` the names of other meshes. Pure.

    Raises:
        DispatchError: there is none of that name, or not every rank registered its place.
    """
    found: dict[str, dict[int, Mapping[str, int]]] = {}
    ranks = range(0)
    for answers in told:
        ranks = range(len(answers))
        for rank, places in enumerate(answers):
            for key, coordinates in places.items():
                found.setdefault(key, {})[rank] = coordinates
    if name not in found:
        known = sorted({*given, *found})
        raise DispatchError(
            f"group {group!r} has no mesh {name!r} (it has: {', '.join(known) or 'none'}); pass "
            "mesh=px.Mesh(dp=..., tp=...) to px.WorkerGroup, or call self.register_mesh(name, ...) in the worker"
        )
    missing = [rank for rank in ranks if rank not in found[name]]
    if missing:
        raise DispatchError(
            f"mesh {name!r} of group {group!r}: ranks {missing} have not registered their place; every rank "
            "must call self.register_mesh(name, ...)"
        )
    return Mesh.from_coordinates([dict(found[name][rank]) for rank in ranks])
