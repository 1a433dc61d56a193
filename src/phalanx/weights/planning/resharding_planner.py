"""From the manifests of two groups to the plan of a sync. Pure: neither torch nor Ray, nothing moves.

The way of a plan: `take_census` (each side by itself) -> `match_names` (who feeds whom, by name) -> `overlaps` (boxes,
once per form of tensor) -> `choose` (replicas) -> `Plan`. Faults of all steps are one error.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from phalanx.errors import WeightsMismatch
from phalanx.weights.planning.box_overlap import Geometry, choose, overlaps
from phalanx.weights.planning.fused import BUILT_IN, Fused
from phalanx.weights.planning.layout_mismatch import Fault, refuse
from phalanx.weights.planning.locality import Places
from phalanx.weights.planning.matching import Feed, Match, Rename, match_names
from phalanx.weights.planning.resharding_plan import Lane, Pair, Piece, Plan
from phalanx.weights.planning.shard_index import ShardIndex, take_census
from phalanx.weights.planning.shard_manifest import DTYPE_BYTES, Manifest, digest_of

__all__ = ["Plans", "make_plan"]

_LANES = 8
"""Into how many lanes tensors of one form are divided at most, so that replicas share the work."""


def make_plan(
    sources: Sequence[Manifest],
    targets: Sequence[Manifest],
    *,
    places: Places | None = None,
    rename: Rename | None = None,
    fused: Sequence[Fused] = (),
) -> Plan:
    """Decide how every box that a target rank needs gets there, each exactly once.

    Args:
        sources: what each source rank holds, in rank order.
        targets: what each target rank needs, in rank order.
        places: where the ranks are; by default each on a node of its own.
        rename: from names of the source to names of the target.
        fused: rules beside the built-in ones.

    Raises:
        WeightsMismatch: a name, a type, a shape or a box of the two sides does not fit; has all faults.
    """
    places = places or Places.apart(len(sources), len(targets))
    if (len(places.sources), len(places.targets)) != (len(sources), len(targets)):
        raise WeightsMismatch(
            f"places of {len(places.sources)} sources and {len(places.targets)} targets were given for manifests of "
            f"{len(sources)} and {len(targets)} ranks; give one place per rank"
        )
    faults: list[Fault] = []
    source = take_census(sources, "source", faults)
    target = take_census(targets, "target", faults)
    match = match_names(source, target, rename, (*fused, *BUILT_IN), faults)
    geometries = _geometries(source, target, match, places, faults)
    refuse(faults)
    lanes = _lanes(source, target, match, geometries, places)
    return Plan(
        tuple(
            sorted(lanes, key=lambda lane: (lane.pairs[0].target, lane.pairs[0].source, lane.pieces[0].box))
        ),
        tuple(match.echoes),
        tuple(match.ties),
        tuple(match.surplus),
        len(sources),
        len(targets),
    )


def _geometries(
    source: ShardIndex, target: ShardIndex, match: Match, places: Places, faults: list[Fault]
) -> dict[Feed, Geometry]:
    found: dict[Feed, Geometry] = {}
    for feed, pairs in match.feeds.items():
        views = (feed.source_view, feed.target_view)
        found[feed], wrong = overlaps(source.table[feed.source], target.table[feed.target], views, places)
        faults += [fault._replace(name=name) for fault in wrong for _, name in pairs]
    return found


def _lanes(
    source: ShardIndex, target: ShardIndex, match: Match, geometries: Mapping[Feed, Geometry], places: Places
) -> list[Lane]:
    """Divide and choose, the heaviest tensors first, so that the loads come out even."""
    load = [0] * len(places.sources)
    lanes: list[Lane] = []

    def weight(feed: Feed) -> tuple[int, str]:
        shape = target.table[feed.target].shape
        elements = 1
        for size in shape:
            elements *= size
        return -elements * len(match.feeds[feed]), match.feeds[feed][0][1]

    for feed in sorted(match.feeds, key=weight):
        pairs = [Pair(*pair) for pair in match.feeds[feed]]
        dtypes = source.table[feed.source].dtype, target.table[feed.target].dtype
        count = min(geometries[feed].lanes, len(pairs), _LANES)
        for index in range(count):
            mine = tuple(pairs[index::count])
            pieces = choose(geometries[feed], places, load, DTYPE_BYTES[dtypes[1]] * len(mine))
            if pieces:
                lanes.append(Lane(*dtypes, mine, tuple(sorted(pieces, key=_order))))
    return lanes


def _order(piece: Piece) -> tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    return piece.source, piece.box.offsets, piece.targets, piece.target_at


class _Key(NamedTuple):
    sources: str
    targets: str
    places: Places | None
    rename: Hashable
    fused: tuple[Fused, ...]


class Plans:
    """Plans by what they were made of: the same manifests and places give the plan that is there.

    A function as ``rename`` counts as the same while it is the same object. The last ``keep`` plans stay.
    """

    def __init__(self, keep: int = 4) -> None:
        self._keep = keep
        self._made: OrderedDict[_Key, Plan] = OrderedDict()

    def get(
        self,
        sources: Sequence[Manifest],
        targets: Sequence[Manifest],
        *,
        places: Places | None = None,
        rename: Rename | None = None,
        fused: Sequence[Fused] = (),
    ) -> Plan:
        """As :func:`make_plan`."""
        named = tuple(sorted(rename.items())) if isinstance(rename, Mapping) else rename
        key = _Key(digest_of(sources), digest_of(targets), places, named, tuple(fused))
        plan = self._made.get(key)
        if plan is None:
            plan = make_plan(sources, targets, places=places, rename=rename, fused=fused)
        self._made[key] = plan
        self._made.move_to_end(key)
        while len(self._made) > self._keep:
            self._made.popitem(last=False)
        return plan
