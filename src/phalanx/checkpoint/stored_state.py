"""The saved state of a role: the leaf of each key in the files, and the ranks that had it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint import Metadata, TensorStorageMetadata

from phalanx.checkpoint.planners import LoadPlanner, rank_key
from phalanx.checkpoint.step_files import METADATA, read_items
from phalanx.checkpoint.steps import Step
from phalanx.errors import CheckpointMismatch
from phalanx.worker.rank_state import GENERATORS, Path, SavedLeaf, key_of

_CATALOGUE = "catalogue.json"
"""File of format 1 with the paths of the leaves and the ranks that had them."""

_Place = tuple[str, Path, frozenset[int] | None]
"""Key in the files, path and ranks of a leaf; None: all ranks."""


@dataclass(frozen=True)
class StoredState:
    """The state of a role in the files.

    Attributes:
        metadata: metadata by which torch's distributed checkpoint reads the files.
        leaves: leaves by key in the files.
        world_size: number of ranks that saved.
        where: folder of the files.
        read: function of folder and planner that reads the items of a rank's plan.
        parts: outermost keys to load; None: all.
        resized: True if another number of ranks loads the state.
    """

    metadata: Metadata
    leaves: Mapping[str, SavedLeaf]
    world_size: int
    where: str
    read: Callable[[str, LoadPlanner], None] = read_items
    parts: Sequence[str] | None = None
    resized: bool = False

    def names(self) -> list[str]:
        """Return the outermost keys of the state."""
        return sorted({leaf.part for leaf in self.leaves.values()} - {""})

    def select(self, parts: Sequence[str] | None) -> StoredState:
        """Return the state with these outermost keys only; None: all.

        Raises:
            CheckpointMismatch: if there is no such key.
        """
        if parts is None:
            return self
        unknown = sorted(set(parts) - set(self.names()))
        if unknown:
            raise CheckpointMismatch(
                f"{self.where} has no part {unknown[0]!r}; it has {', '.join(self.names())}"
            )
        leaves = {name: leaf for name, leaf in self.leaves.items() if leaf.part in parts}
        return replace(self, leaves=leaves, parts=tuple(parts))

    def for_ranks(self, world_size: int) -> StoredState:
        """Return the state for a number of ranks.

        On another number, each rank takes the generators of its own number, and keys of ranks that do not exist are
        left out.

        Raises:
            CheckpointMismatch: if other leaves differed by rank, and the world size differs.
        """
        if world_size == self.world_size:
            return self
        by_rank = [
            leaf for leaf in self.leaves.values() if leaf.ranks is not None and leaf.part != GENERATORS
        ]
        differing = {key_of(leaf.path): leaf.part for leaf in by_rank}
        if differing:
            rest = [name for name in self.names() if name not in (*differing.values(), GENERATORS)]
            advice = f"load the parts without them (parts={rest!r}), or " if rest else ""
            raise CheckpointMismatch(
                f"{len(differing)} values differed by rank on the {self.world_size} ranks that saved, and nothing "
                f"says what they are on {world_size}: {', '.join(sorted(differing)[:8])}; {advice}declare how tensors "
                "are sharded (DTensor, px.register_state(boxes=...)), or load on as many ranks"
            )
        here = frozenset(range(world_size))
        leaves = {name: leaf for name, leaf in self.leaves.items() if leaf.ranks is None or leaf.ranks & here}
        return replace(self, leaves=leaves, resized=True)

    def keys_for(self, rank: int) -> dict[str, str]:
        """Return the key in the files of each leaf of a rank."""
        found = self.leaves.items()
        return {key_of(leaf.path): name for name, leaf in found if leaf.ranks is None or rank in leaf.ranks}

    def lacks_generators(self, rank: int) -> bool:
        """Return whether a random generator of a rank is missing because the rank is not among the ranks that saved."""
        generators = {key_of(leaf.path) for leaf in self.leaves.values() if leaf.part == GENERATORS}
        # A lone rank saves its generators as it saves values that are equal on all ranks.
        held = set[str]() if self.world_size == 1 and rank > 0 else self.keys_for(rank).keys()
        return self.resized and not generators <= held

    def as_model(self) -> StoredState:
        """Return the state as the model of a larger state, to be loaded alone."""
        leaves = {name: leaf._replace(path=("model", *leaf.path)) for name, leaf in self.leaves.items()}
        return replace(self, leaves=leaves, parts=("model",))


def stored_leaf(metadata: Metadata, name: str, path: Path, ranks: frozenset[int] | None = None) -> SavedLeaf:
    """Return the leaf of a key in the files."""
    stored = metadata.state_dict_metadata[name]
    if not isinstance(stored, TensorStorageMetadata):
        return SavedLeaf(path, ranks=ranks)
    sharded = any(chunk.sizes != stored.size for chunk in stored.chunks)
    return SavedLeaf(path, stored.properties.dtype, tuple(stored.size), sharded, ranks)


def read_stored(step: Step, part: str) -> StoredState:
    """Read the state of a role, a part of a step.

    Raises:
        CheckpointCorrupted: if the metadata are missing or differ.
    """
    metadata: Metadata = pickle.loads(step.read(f"{part}/{METADATA}"))
    catalogue = f"{part}/{_CATALOGUE}"
    places = _places(metadata)
    if catalogue in step.files:
        places = _places_of_format_1(json.loads(step.read(catalogue)))
    leaves = {place[0]: stored_leaf(metadata, *place) for place in places}
    return StoredState(metadata, leaves, int(step.parts[part]["world_size"]), step.path(part))


def _places(metadata: Metadata) -> Iterator[_Place]:
    for name, path in metadata.planner_data.items():
        if name not in metadata.state_dict_metadata:
            continue
        if name == key_of(path):
            yield name, path, None
        else:  # the last part of the path is the rank
            yield name, path[:-1], frozenset([int(path[-1].removeprefix("of rank "))])


def _places_of_format_1(catalogue: Mapping[str, Any]) -> Iterator[_Place]:
    for leaf, steps in catalogue["paths"].items():
        path: Path = tuple((str(step[0]), int(step[1])) if isinstance(step, list) else step for step in steps)
        by_rank, ranks, _ = catalogue["values"].get(leaf, (False, None, None))
        if by_rank:
            for rank in range(catalogue["world_size"]) if ranks is None else ranks:
                yield rank_key(leaf, rank), path, frozenset([rank])
        else:
            named = path[:1] in (("model",), ("optimizer",))  # found by the names of parameters, on any rank
            yield leaf, path, None if ranks is None or named else frozenset(ranks)
