"""The number of ranks of a group whose size changes. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from phalanx.errors import DeclarationError, PlacementError
from phalanx.topology.mesh import Mesh
from phalanx.wire.value import checked_number


def checked_size(group: str, wanted: object, slots: int, block: int = 1) -> int:
    """Return the number of ranks in ``wanted`` blocks of ``block`` ranks, for a pool of ``slots`` slots.

    Raises:
        DeclarationError: if ``wanted`` is not a whole number from 1.
        PlacementError: if the pool has fewer slots.
    """
    what = "ranks" if block == 1 else f"engines, of {block} ranks each"
    advice = f"expected a number of {what}, 1 or more; close() ends a group"
    size = checked_number(f"px.resize({group}): size", wanted, 1, advice) * block
    if size > slots:
        each = "" if block == 1 else f", and {wanted} engines of {block} ranks take {size}"
        raise PlacementError(
            f"px.resize({group}, {wanted}): its pool has {slots} slots{each}; pool.grow({size - slots}) reserves more, "
            "or give a smaller number"
        )
    return size


def block_of(group: str, meshes: Mapping[str, Mesh]) -> int:
    """Return the number of ranks that join and leave together: a dp coordinate, whose ranks meet in collectives.

    Raises:
        DeclarationError: if a mesh has no axis dp, or the ranks of a dp coordinate are not consecutive.
    """
    block = 1
    for name, mesh in meshes.items():
        groups = mesh.dp_groups()
        size = mesh.world_size // len(groups)
        in_a_row = all(
            sorted(ranks) == list(range(at * size, (at + 1) * size)) for at, ranks in enumerate(groups)
        )
        if "dp" not in mesh.axes or not in_a_row:
            raise DeclarationError(
                f"px.resize({group}): its mesh {name!r} is {mesh!r}; expected the axis dp, as the slowest one, so that "
                "engines are ranks in a row: px.Mesh(dp=-1, tp=2)"
            )
        block = math.lcm(block, size)
    return block


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
