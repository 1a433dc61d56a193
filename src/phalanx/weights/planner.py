"""The planner: from the manifests of two groups to the plan of a sync. Pure.

Steps: ``make_index`` (each side alone), ``NameMatcher`` (names), ``find_overlaps`` (boxes, once per layout),
``choose_senders`` (replicas), ``Plan``. Faults of all steps are raised as a single error.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from phalanx.weights.box_overlap import choose_senders, find_overlaps
from phalanx.weights.fused import BUILT_IN, Fused
from phalanx.weights.manifest import DTYPE_BYTES, Manifest
from phalanx.weights.name_matching import NameMapping, NameMatcher, Rename
from phalanx.weights.plan import Locations, Pair, Plan, TensorBatch
from phalanx.weights.shard_index import LayoutFault, make_index, refuse

_MOST_SHARES = 8
"""Maximum number of batches into which tensors of one layout are divided, so that replicas share the work."""


def make_plan(
    sources: Sequence[Manifest],
    targets: Sequence[Manifest],
    locations: Locations,
    *,
    rename: Rename | None = None,
    fused: Sequence[Fused] = (),
) -> Plan:
    """Return the plan that sends every box that a target rank needs exactly once.

    Args:
        sources, targets: manifests of both sides, in rank order.
        locations: locations of the ranks.
        rename: map from source names to target names.
        fused: rules in addition to the built-in rules.

    Raises:
        WeightsMismatch: if a name, type, shape or box of the two sides does not fit; it has all faults.
    """
    faults: list[LayoutFault] = []
    source, target = make_index(sources, "source", faults), make_index(targets, "target", faults)
    match = NameMatcher(source, target, rename, (*fused, *BUILT_IN), faults).run()
    geometries = {}
    for mapping, pairs in match.mappings.items():
        views = (mapping.source_view, mapping.target_view)
        layouts = source.table[mapping.source], target.table[mapping.target]
        geometries[mapping], mismatches = find_overlaps(*layouts, views, locations)
        faults += [fault._replace(name=name) for fault in mismatches for _, name in pairs]
    refuse(faults)

    def weight(mapping: NameMapping) -> tuple[int, str]:
        pairs = match.mappings[mapping]
        return -math.prod(target.table[mapping.target].shape) * len(pairs), pairs[0][1]

    load = [0] * len(sources)
    batches: list[TensorBatch] = []
    for mapping in sorted(match.mappings, key=weight):  # heavy tensors first: loads become even
        pairs = [Pair(*pair) for pair in match.mappings[mapping]]
        dtypes = source.table[mapping.source].dtype, target.table[mapping.target].dtype
        count = min(geometries[mapping].shares, len(pairs), _MOST_SHARES)
        for index in range(count):
            share = tuple(pairs[index::count])
            nbytes = DTYPE_BYTES[dtypes[1]] * len(share)
            boxes = choose_senders(geometries[mapping], locations, load, nbytes)
            if boxes:
                boxes.sort(key=lambda box: (box.source, box.box.offsets, box.targets, box.target_at))
                batches.append(TensorBatch(*dtypes, share, tuple(boxes)))
    batches.sort(key=lambda batch: (batch.pairs[0].target, batch.pairs[0].source, batch.boxes[0].box))
    findings = tuple(match.copies), tuple(match.ties), tuple(match.surplus)
    return Plan(tuple(batches), *findings, len(sources), len(targets))


class PlanCache:
    """The last ``keep`` plans, by manifests, locations and rules.

    A function as ``rename`` is the same rule only if it is the same object.
    """

    def __init__(self, keep: int = 4) -> None:
        self._keep = keep
        self._plans: OrderedDict[object, Plan] = OrderedDict()

    def get(
        self,
        sources: Sequence[Manifest],
        targets: Sequence[Manifest],
        locations: Locations,
        *,
        rename: Rename | None = None,
        fused: Sequence[Fused] = (),
    ) -> Plan:
        """Return the plan; see :func:`make_plan`."""
        renames = tuple(sorted(rename.items())) if isinstance(rename, Mapping) else rename
        digests = [tuple(manifest.digest for manifest in side) for side in (sources, targets)]
        key = (*digests, locations, renames, tuple(fused))
        if key not in self._plans:
            self._plans[key] = make_plan(sources, targets, locations, rename=rename, fused=fused)
        self._plans.move_to_end(key)
        while len(self._plans) > self._keep:
            self._plans.popitem(last=False)
        return self._plans[key]
