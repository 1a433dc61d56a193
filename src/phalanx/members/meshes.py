"""The meshes of a group, declared or registered by its ranks, and the ranks that they keep together in a resize."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping

from phalanx.calls.run_on import run_on
from phalanx.errors import DeclarationError, DispatchError
from phalanx.group.group import Group
from phalanx.topology.mesh import Mesh
from phalanx.worker import handlers


def mesh_of(core: Group, name: str = "default") -> Mesh:
    """Return a mesh that was declared for the group, or that its ranks registered (requested once per epoch).

    Raises:
        DispatchError: if there is no mesh of that name, or a rank has not registered its coordinates.
    """
    epoch, given = core.epoch, core.handle.meshes
    if name not in epoch.meshes:
        declared = given.get(name)
        epoch.meshes[name] = fitted(declared, epoch.size) if declared else _registered_mesh(core, name)
    return epoch.meshes[name]


def known_meshes(core: Group) -> dict[str, Mesh]:
    """Return the declared meshes, and meshes that the ranks of this epoch have reported; calls no rank."""
    return {name: mesh_of(core, name) for name in core.handle.meshes} | core.epoch.meshes


def _registered_mesh(core: Group, name: str) -> Mesh:
    """Request the coordinates that ranks registered for a mesh, and return the mesh.

    Raises:
        DispatchError: if there is no mesh of that name, or a rank has not registered its coordinates.
    """
    # By rank, the coordinates by axis in each mesh that it registered.
    places: list[Mapping[str, Mapping[str, int]]] = run_on(core, handlers.meshes).result(None)
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


def fitted(mesh: Mesh, world_size: int) -> Mesh:
    """Return a mesh for ``world_size`` ranks, which differs in the size of its axis dp.

    Raises:
        DeclarationError: if the mesh has no axis dp, its other axes do not divide ``world_size``, or its ranks reported
            their coordinates.
    """
    if mesh.world_size == world_size:
        return mesh
    rest = mesh.world_size // mesh.size("dp")
    if "dp" not in mesh.axes or mesh.layout is not None or world_size % rest:
        raise DeclarationError(
            f"{mesh!r} on {world_size} ranks: expected a mesh with an axis dp, in the order of the ranks, and a "
            f"multiple of {rest} ranks"
        )
    return Mesh(**{name: world_size // rest if name == "dp" else size for name, size in mesh.sizes})


def engine_ranks(core: Group) -> int:
    """Return the number of ranks per engine (dp coordinate) of a group of independent ranks.

    Raises:
        DeclarationError: if the ranks of an engine are not consecutive.
    """
    specs = [spec for methods in core.handle.methods.values() for spec in methods.values()]
    names = {*core.handle.meshes, *(spec.mode.mesh for spec in specs if spec.mode.mesh is not None)}
    meshes: dict[str, Mesh] = {}
    for name in sorted(names):
        with contextlib.suppress(DispatchError):  # no rank registered it: its methods cannot be called
            meshes[name] = mesh_of(core, name)
    return block_of(core.name, meshes)


def block_of(group: str, meshes: Mapping[str, Mesh]) -> int:
    """Return the number of ranks that join and leave together: a dp coordinate, whose ranks meet in collectives.

    Raises:
        DeclarationError: if a mesh has no axis dp, or the ranks of a dp coordinate are not consecutive.
    """
    block = 1
    for name, mesh in meshes.items():
        groups = mesh.dp_groups()
        size = mesh.world_size // len(groups)
        in_a_row = [rank for ranks in groups for rank in sorted(ranks)] == [*range(mesh.world_size)]
        if "dp" not in mesh.axes or not in_a_row:
            raise DeclarationError(
                f"px.resize({group}): its mesh {name!r} is {mesh!r}; expected the axis dp, as the slowest one, so that "
                "engines are ranks in a row: px.Mesh(dp=-1, tp=2)"
            )
        block = math.lcm(block, size)
    return block
