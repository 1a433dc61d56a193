"""Ranks of one layout write files that ranks of another layout read, bit for bit; contradictions are named."""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch.distributed.checkpoint import FileSystemWriter, Metadata, TensorStorageMetadata

from phalanx.checkpoint.planners import LoadPlanner, SavePlanner, merge_plans, value_digest
from phalanx.checkpoint.step_files import read_items, write_items
from phalanx.checkpoint.stored_state import StoredState
from phalanx.errors import CheckpointError, CheckpointMismatch
from phalanx.weights.boxes import Box, LocalBox
from phalanx.worker.rank_state import LocalTensor, Path, SavedLeaf
from tests.weights.planning.layouts import Side, golden, read, sides
from tests.weights.weight_workers import same

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SHAPES = [(), (7,), (9, 5), (4, 6, 3)]
Leaves = Mapping[str, tuple[Path, Any]]


def planners(ranks: Sequence[Leaves]) -> list[SavePlanner]:
    return [SavePlanner(leaves, index, alone=len(ranks) == 1) for index, leaves in enumerate(ranks)]


def save(folder: str, ranks: Sequence[Leaves]) -> Metadata:
    """Plan, merge, write each element once, and return the metadata as the driver writes them."""
    made = planners(ranks)
    plans, metadata = merge_plans([one.create_local_plan() for one in made])
    chunks = [item.tensor_data.chunk for plan in plans for item in plan.items if item.tensor_data]
    tensors = [one for one in metadata.state_dict_metadata.values() if isinstance(one, TensorStorageMetadata)]
    assert sum(one.sizes.numel() for one in chunks) == sum(one.size.numel() for one in tensors)
    plans = FileSystemWriter(folder).prepare_global_plan(plans)
    places: dict[Any, Any] = {}
    for plan, planner in zip(plans, made, strict=True):
        results, _ = write_items(folder, plan, planner)
        places |= {result.index: result.storage_data for result in results}
    return dataclasses.replace(metadata, storage_data=places)


def leaves_of(side: Side, full: dict[str, torch.Tensor]) -> list[dict[str, tuple[Path, Any]]]:
    return [
        {
            name: ((name,), LocalTensor(one.tensors[name], held.shape, held.boxes, one.tensors[name]))
            for name, held in one.manifest.items()
        }
        for one in read(side, full)
    ]


@settings(max_examples=12)
@given(sides(SHAPES, [torch.float32]), sides(SHAPES, [torch.float32]))
def test_every_layout_loads_from_every_other_layout_with_each_element_written_once(
    source: Side, target: Side
) -> None:
    full = golden(SHAPES)
    with TemporaryDirectory() as folder:
        metadata = save(folder, leaves_of(source, full))
        for rank, leaves in enumerate(leaves_of(target, {name: one * 0 - 1 for name, one in full.items()})):
            targets = {name: tensor for name, (_, tensor) in leaves.items()}
            planner = LoadPlanner(metadata, targets)
            read_items(folder, planner)

            assert same({name: one.local for name, one in targets.items()}, target.tensors(full, rank))


def rows(start: int, count: int, of: int, key: str = "w") -> dict[str, tuple[Path, Any]]:
    patch = LocalBox(Box((start,), (count,)), (0,))
    return {key: ((key,), LocalTensor(zeros := torch.zeros(count), (of,), (patch,), zeros))}


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        ([rows(0, 4, 8)], r"4 of the 8 elements of w \[8\]"),
        ([rows(0, 8, 8), rows(0, 9, 9)], r"w is float32 \[8\] on rank 0 and float32 \[9\] on rank 1"),
        ([rows(0, 6, 8), rows(4, 2, 8)], "overlap"),
        ([rows(0, 6, 8), rows(0, 2, 8)], "overlap"),
        ([rows(0, 8, 8), {"w": (("w",), 3)}], "sharded tensor on ranks 0 and something else on ranks 1"),
    ],
)
def test_contradictory_plans_are_refused_with_their_contradiction(ranks: list[Leaves], why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        merge_plans([one.create_local_plan() for one in planners(ranks)])


def test_generators_saved_by_a_single_rank_are_loaded_on_rank_0_only() -> None:
    leaves = {"rng.random": SavedLeaf(("rng", "random")), "lr": SavedLeaf(("lr",))}

    found = StoredState(Metadata({}), leaves, 1, "step").for_ranks(3)

    assert [found.lacks_generators(rank) for rank in range(3)] == [False, True, True]


@pytest.mark.parametrize("size", [2, 3])
def test_a_tensor_pickled_by_rank_fills_only_a_tensor_of_its_shape(tmp_path: Any, size: int) -> None:
    metadata = save(str(tmp_path), [{"w": (("w",), torch.full((2,), float(rank)))} for rank in range(2)])
    target = torch.zeros(size)
    planner = LoadPlanner(metadata, {"w of rank 1": LocalTensor.of("w", target)})

    with pytest.raises(CheckpointMismatch, match=r"shape \[2\]") if size == 3 else nullcontext():
        read_items(str(tmp_path), planner)
    assert target.tolist() == [1.0] * size if size == 2 else [0.0] * size


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (1, True),
        ([1, 2], (1, 2)),
        (["a", "b"], ["ab"]),
        ({"a": 1}, {"a": 2}),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
    ],
)
def test_digests_of_different_values_differ(value: Any, other: Any) -> None:
    assert value_digest(value) == value_digest(pickle.loads(pickle.dumps(value)))
    assert value_digest(value) != value_digest(other)


def test_digests_do_not_depend_on_shared_memory_or_the_order_of_sets() -> None:
    text, itself = "ab" * 30, list[Any]([1])
    itself.append(itself)
    names = [os.urandom(8).hex() for _ in range(20)]

    assert value_digest([text, text]) == value_digest([text, "".join(text)])
    assert value_digest({*names}) == value_digest({*names[::-1]})
    assert value_digest(itself) == value_digest(pickle.loads(pickle.dumps(itself)))
