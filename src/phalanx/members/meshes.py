"""The meshes of a group: those that it was given, and those of which its ranks told, every rank its own place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from phalanx.errors import DispatchError
from phalanx.group.epoch import GroupState
from phalanx.group.roster import fitted
from phalanx.topology.mesh import Mesh

#: Of one rank: the coordinates by axis in each mesh that its worker registered, by name.
Places = Mapping[str, Mapping[str, int]]


def mesh_of(life: GroupState, name: str, ask: Callable[[str], Sequence[Places]]) -> Mesh:
    """The mesh of that name, in the present epoch; ``ask`` gives the places of the ranks of a role.

    Raises:
        DispatchError: there is none of that name, or not every rank registered its place.
    """
    epoch, given = life.epoch, life.card.meshes
    if name in given and given[name].world_size == epoch.size:
        return given[name]
    if name in given and name not in epoch.meshes:
        epoch.meshes[name] = fitted(given[name], epoch.size)
    if name not in epoch.meshes:
        places = [ask(role) for role in life.card.methods]
        epoch.meshes[name] = told_mesh(life.name, name, places, given)
    return epoch.meshes[name]


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
