"""Meshes: named axes over the ranks of a group, and the sets of ranks that mesh dispatch needs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from operator import index
from typing import Any

from phalanx.config import is_whole
from phalanx.errors import DeclarationError, DispatchError

DP: tuple[str, ...] = ("dp",)
PP_AS_DP: tuple[str, ...] = ("dp", "pp")
"""Dp axes of the ``MEGATRON_PP_AS_DP`` modes: shard ``dp * pp_size + pp`` goes to (dp, pp)."""

_REST = -1

Coordinates = tuple[int, ...]


@dataclass(frozen=True, init=False, repr=False)
class Mesh:
    """Named axes over ranks ``0 .. world_size - 1``; the first axis is the slowest.

    ``Mesh(dp=2, pp=1, tp=2)`` has rank ``(dp * 1 + pp) * 2 + tp`` at coordinates (dp, pp, tp). The size of an axis may
    be -1 ("the rest"), which :meth:`resolve` fills in. An axis that a mesh lacks counts as an axis of size 1 with
    coordinate 0, so code for (dp, pp, cp, tp) also works for meshes with fewer axes.

    Raises:
        DeclarationError: if there are no axes, a size is neither a positive integer nor -1, or two sizes are -1.
    """

    sizes: tuple[tuple[str, int], ...]
    layout: tuple[Coordinates, ...] | None
    """Coordinates by rank; None: ranks are in coordinate order, with the first axis slowest."""

    def __init__(self, /, **axes: int) -> None:
        object.__setattr__(self, "sizes", _checked_axes(axes))
        object.__setattr__(self, "layout", None)

    @classmethod
    def from_coordinates(cls, reported: Sequence[Mapping[str, int]]) -> Mesh:
        """Return the mesh whose rank ``r`` has the coordinates ``reported[r]``, for any layout of ranks.

        It converts a torch DeviceMesh or Megatron's parallel state to a mesh: each rank reports its own coordinates.
        The size of an axis is its largest coordinate plus 1. The axes have the order of rank 0's report.

        Raises:
            DeclarationError: if a place of the mesh does not have exactly one rank; names the first conflict.
        """
        names = _agreed_names(reported)
        table = tuple(tuple(_coordinate(r, n, at[n]) for n in names) for r, at in enumerate(reported))
        sizes = (max(column) + 1 for column in zip(*table, strict=True))
        axes = dict(zip(names, sizes, strict=True))
        _check_tiling(axes, table)
        mesh = cls(**axes)
        if table != tuple(_row_major(axes.values())):
            object.__setattr__(mesh, "layout", table)
        return mesh

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes, slowest first."""
        return tuple(name for name, _ in self.sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes, slowest first; -1 for an axis that is not resolved yet."""
        return tuple(size for _, size in self.sizes)

    @property
    def is_resolved(self) -> bool:
        """True if no axis has the size -1."""
        return _REST not in self.shape

    @cached_property
    def world_size(self) -> int:
        """Number of ranks: the product of the sizes.

        Raises:
            DispatchError: if an axis has the size -1.
        """
        return math.prod(self._known_shape())

    def resolve(self, world_size: int) -> Mesh:
        """Return this mesh over exactly ``world_size`` ranks, with a size in place of -1.

        Raises:
            DeclarationError: if the sizes do not multiply to ``world_size``.
        """
        known = math.prod(size for size in self.shape if size != _REST)
        if self.is_resolved:
            if known != world_size:
                raise DeclarationError(
                    f"{self!r} has {known} ranks but the group has {world_size}; change the sizes so that "
                    f"they multiply to {world_size}, or write one axis as -1 ('the rest')"
                )
            return self
        if world_size < 1 or world_size % known:
            raise DeclarationError(
                f"{self!r} on {world_size} ranks: its other axes multiply to {known}, which does not divide "
                f"{world_size}; change them, or the size of the group to a multiple of {known}"
            )
        return Mesh(**{name: world_size // known if size == _REST else size for name, size in self.sizes})

    def size(self, axis: str | None = None) -> int:
        """Return the size of ``axis`` (1 if the mesh lacks the axis), or the number of ranks if ``axis`` is None."""
        if axis is None:
            return self.world_size
        size = dict(self.sizes).get(axis, 1)
        return self.world_size if size == _REST else size  # world_size raises an error with advice

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of ``rank`` by axis.

        Raises:
            DispatchError: if the rank is outside the mesh.
        """
        if not 0 <= rank < self.world_size:
            raise DispatchError(f"rank {rank} is not in {self!r}; expected 0 to {self.world_size - 1}")
        return dict(zip(self.axes, self._table[rank], strict=True))

    def coordinate(self, rank: int, axis: str) -> int:
        """Return the coordinate of ``rank`` along ``axis``; 0 if the mesh lacks the axis."""
        return self.coordinates(rank).get(axis, 0)

    def rank(self, /, **coordinates: int) -> int:
        """Return the rank at these coordinates; axes of size 1 may be left out.

        Raises:
            DispatchError: if another axis is missing, or a coordinate is out of range.
        """
        missing = [name for name, size in self.sizes if size != 1 and name not in coordinates]
        if missing:
            raise DispatchError(
                f"{self!r}.rank({axes_text(coordinates)}): no coordinate for {', '.join(missing)}; give one for "
                "each axis, or use mesh.ranks(...) for all ranks of a slice"
            )
        self._check_coordinates("rank", coordinates)
        return self._rank_at[tuple(index(coordinates.get(name, 0)) for name in self.axes)]

    def ranks(self, /, **fixed: int) -> tuple[int, ...]:
        """Return the ranks with the coordinates ``fixed``, in coordinate order (first axis slowest).

        Raises:
            DispatchError: if a coordinate is out of range.
        """
        self._check_coordinates("ranks", fixed)
        sizes = zip(self.axes, self._known_shape(), strict=True)
        choices = [(index(fixed[name]),) if name in fixed else range(size) for name, size in sizes]
        return tuple(self._rank_at[at] for at in itertools.product(*choices))

    def peers(self, rank: int, axis: str) -> tuple[int, ...]:
        """Return ``rank`` and the ranks that differ from it only along ``axis``, in the order of the axis."""
        others = {name: at for name, at in self.coordinates(rank).items() if name != axis}
        return self.ranks(**others)

    def dp_groups(self, dp_axes: Sequence[str] = DP) -> tuple[tuple[int, ...], ...]:
        """Return, for each dp coordinate in order, its ranks in order of their other coordinates.

        ``dp_axes`` are the axes that count as dp, slowest first. With :data:`PP_AS_DP`, shard ``dp * pp_size + pp``
        belongs to (dp, pp), the order of verl's ``MEGATRON_PP_AS_DP``. All ranks of a mesh that lacks these axes form a
        single dp coordinate.

        Raises:
            DispatchError: if ``dp_axes`` names an axis twice.
        """
        return self._groups(tuple(dp_axes))[0]

    def collectors(self, dp_axes: Sequence[str] = DP) -> tuple[int, ...]:
        """Return the rank of each dp coordinate whose output is collected: last pp stage, 0 along the other axes."""
        return self._groups(tuple(dp_axes))[1]

    def __repr__(self) -> str:
        inner = axes_text(dict(self.sizes))
        return f"Mesh({inner})" if self.layout is None else f"Mesh({inner}; ranks as reported)"

    def __getstate__(self) -> dict[str, Any]:
        return {"sizes": self.sizes, "layout": self.layout}  # not what follows from them

    @cached_property
    def _table(self) -> tuple[Coordinates, ...]:
        if self.layout is not None:
            return self.layout
        return tuple(_row_major(self._known_shape()))

    @cached_property
    def _rank_at(self) -> dict[Coordinates, int]:
        return {at: rank for rank, at in enumerate(self._table)}

    @cached_property
    def _groups(self) -> Callable[[tuple[str, ...]], tuple[Any, ...]]:
        """The function from dp axes to (groups, collectors). Cached for calls, since 4096 ranks take milliseconds."""
        return cache(self._compute_groups)

    def _compute_groups(self, dp_axes: tuple[str, ...]) -> tuple[Any, ...]:
        if len(set(dp_axes)) != len(dp_axes):
            raise DispatchError(
                f"dp_axes={dp_axes!r} names an axis twice; name each axis that counts as dp once"
            )
        kept = [name for name in dp_axes if name in self.axes]
        others = [name for name in self.axes if name not in kept]
        places = [[self.axes.index(name) for name in names] for names in (kept, others)]
        buckets: dict[Coordinates, dict[Coordinates, int]] = {}
        for at in _row_major(self._known_shape()):
            own, other = (tuple(at[i] for i in place) for place in places)
            buckets.setdefault(own, {})[other] = self._rank_at[at]
        ordered = [buckets[own] for own in sorted(buckets)]
        last = tuple(self.size("pp") - 1 if name == "pp" else 0 for name in others)
        return (
            tuple(tuple(bucket.values()) for bucket in ordered),
            tuple(bucket[last] for bucket in ordered),
        )

    def _known_shape(self) -> tuple[int, ...]:
        if not self.is_resolved:
            raise DispatchError(
                f"{self!r} has an axis of size -1 ('the rest'), so its number of ranks is not known; "
                "call mesh.resolve(world_size) first"
            )
        return self.shape

    def _check_coordinates(self, verb: str, coordinates: Mapping[str, int]) -> None:
        for name, at in coordinates.items():
            size = self.size(name)
            if not is_whole(at, 0) or at >= size:
                lacking = "" if name in self.axes else " (the mesh has no such axis)"
                raise DispatchError(
                    f"{self!r}.{verb}({axes_text(coordinates)}): {name}={at!r}; expected an integer "
                    f"from 0 to {size - 1}{lacking}; axes and sizes are {dict(self.sizes)}"
                )


def _checked_axes(axes: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    if not axes:
        raise DeclarationError("Mesh() has no axes; name at least one, such as px.Mesh(dp=-1)")
    checked = tuple((name, _axis_size(name, size)) for name, size in axes.items())
    rest = [name for name, size in checked if size == _REST]
    if len(rest) > 1:
        raise DeclarationError(
            f"Mesh({axes_text(axes)}): axes {', '.join(rest)} are all -1; only one axis can be 'the rest'"
        )
    return checked


def _axis_size(name: object, size: Any) -> int:
    if not isinstance(name, str) or not name.isidentifier():
        raise DeclarationError(f"mesh axis {name!r}: expected a name that is an identifier, such as 'dp'")
    if not is_whole(size, _REST) or size == 0:
        raise DeclarationError(
            f"mesh axis {name}={size!r}: expected a whole number from 1, or -1 for 'the rest'; leave the "
            "axis out where there is none"
        )
    return index(size)


def _coordinate(rank: int, axis: str, at: Any) -> int:
    if not is_whole(at, 0):
        raise DeclarationError(f"rank {rank} reports {axis}={at!r}; expected a whole number from 0")
    return index(at)


def _agreed_names(reported: Sequence[Mapping[str, int]]) -> tuple[str, ...]:
    if not reported or not reported[0]:
        raise DeclarationError(
            f"a mesh from coordinates {list(reported)!r}: expected one dict of axis names and coordinates "
            "for each rank, such as {'dp': 0, 'tp': 1}"
        )
    names = tuple(reported[0])
    for name in names:
        _axis_size(name, 1)
    for rank, at in enumerate(reported):
        if set(at) != set(names):
            raise _no_mesh(f"rank 0 reports the axes {list(names)}, rank {rank} {list(at)}")
    return names


def _check_tiling(axes: Mapping[str, int], table: Sequence[Coordinates]) -> None:
    """Check that every place in a mesh of ``axes`` belongs to exactly one rank of ``table``."""
    holders: dict[Coordinates, int] = {}
    for rank, at in enumerate(table):
        if holders.setdefault(at, rank) != rank:
            same = axes_text(dict(zip(axes, at, strict=True)))
            raise _no_mesh(f"ranks {holders[at]} and {rank} both report {same}")
    places = math.prod(axes.values())
    if places != len(table):
        raise _no_mesh(f"axes of the sizes ({axes_text(axes)}) have {places} places for {len(table)} ranks")


def _no_mesh(conflict: str) -> DeclarationError:
    return DeclarationError(
        f"the coordinates that the ranks report do not make a mesh: {conflict}. Each rank must report the same axes, "
        "and each place must be held by exactly one rank: report them from the same parallel state on every rank"
    )


def _row_major(shape: Iterable[int]) -> Iterable[Coordinates]:
    return itertools.product(*(range(size) for size in shape))


def axes_text(values: Mapping[str, Any]) -> str:
    """Return sizes or coordinates by axis as text: "dp=2, tp=4"."""
    return ", ".join(f"{name}={value}" for name, value in values.items())
