"""Meshes as the ranks of a group told of them: every rank its own place. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from phalanx.errors import DispatchError
from phalanx.topology.mesh import Mesh

#: Of one rank: the coordinates by axis in each mesh that its worker registered, by name.
Places = Mapping[str, Mapping[str, int]]


def told_mesh(group: str, name: str, told: Iterable[Sequence[Places]], given: Collection[str]) -> Mesh:
    """The mesh of that name; ``told`` are the places by rank, of each role, ``given`` the names of other meshes.

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
