"""What ranks of one layout wrote into plain files is, bit for bit, what ranks of another layout read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from phalanx.checkpoint.storage.read_plan import check_forms, check_values, fetches
from phalanx.checkpoint.storage.tensor_index import Catalogue
from phalanx.checkpoint.storage.write_plan import Offer, PlainTensor, catalogue_of, spread
from phalanx.checkpoint.worker.checkpoint_requests import file_of
from phalanx.checkpoint.worker.read import Files
from phalanx.checkpoint.worker.write import write_file
from phalanx.errors import CheckpointCorrupted, CheckpointError, CheckpointMismatch
from phalanx.weights.planning.boxes import Box, Patch, volume
from phalanx.weights.planning.shard_manifest import Held
from phalanx.weights.planning.tensors import cut
from tests.weights.planning.layouts import Layout, blank, layouts, locals_of, manifests, model, shapes

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
slow_to_draw = settings(
    max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def save(
    folder: str, ranks: Sequence[Mapping[str, torch.Tensor]], held: Sequence[Mapping[str, Held]]
) -> Catalogue:
    """Plan, and write what each rank is to write."""
    plan = spread([Offer(dict(one), paths={name: (name,) for name in one}) for one in held])
    written = [
        write_file(
            f"{folder}/{file_of(index)}",
            (cut(rank[one.key], one.at, one.box.sizes) for one in orders if one.box is not None),
        )[0]
        for index, (rank, orders) in enumerate(zip(ranks, plan.orders, strict=True))
    ]
    made = catalogue_of(plan, [file_of(index) for index in range(len(ranks))], written)
    return Catalogue.from_bytes(made.to_bytes())


def load(
    folder: str, catalogue: Catalogue, rank: Mapping[str, torch.Tensor], held: Mapping[str, Held]
) -> None:
    """Fill the tensors of a rank."""
    check_forms(catalogue, held)
    with Files(folder) as files:
        files.fill(catalogue, fetches(catalogue, held), rank)


def forms(layout: Layout, named: dict[str, torch.Tensor]) -> list[dict[str, Held]]:
    return [dict(one.items()) for one in manifests(layout, named)]


@slow_to_draw
@given(layouts, layouts, shapes)
def test_every_layout_is_loaded_from_every_other(
    source: Layout, target: Layout, sizes: list[list[int]]
) -> None:
    named = model(sizes)
    wanted = locals_of(target, named)
    arrived = blank(wanted)

    with TemporaryDirectory() as folder:
        catalogue = save(folder, locals_of(source, named), forms(source, named))
        for rank, held in zip(arrived, forms(target, named), strict=True):
            load(folder, catalogue, rank, held)

    assert all(
        torch.equal(rank[name], one)
        for rank, mine in zip(arrived, wanted, strict=True)
        for name, one in mine.items()
    )


@slow_to_draw
@given(layouts, shapes)
def test_every_element_is_written_once(source: Layout, sizes: list[list[int]]) -> None:
    named = model(sizes)

    plan = spread([Offer(one, paths={}) for one in forms(source, named)])

    written = sum(volume(one.box) for orders in plan.orders for one in orders if one.box is not None)
    assert written == sum(full.numel() for full in named.values())


def row(start: int, count: int, of: int) -> Held:
    return Held("float32", (of,), (Patch(Box((start,), (count,)), (0,)),))


def test_replicas_are_written_by_the_rank_that_has_least_to_write() -> None:
    both = {"a": row(0, 8, 8), "b": row(0, 8, 8)}

    plan = spread([Offer(both), Offer(both)])

    assert [len(orders) for orders in plan.orders] == [1, 1]


def test_boxes_that_overlap_are_written_apart() -> None:
    plan = spread([Offer({"a": row(0, 6, 8)}), Offer({"a": row(4, 4, 8)})])

    assert [one.box for orders in plan.orders for one in orders] == [Box((0,), (6,)), Box((6,), (2,))]
    assert plan.orders[1][0].at == (2,)


def test_a_tensor_of_which_a_part_is_nowhere_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"4 of the 8 elements of w \[8\]"):
        spread([Offer({"w": row(0, 4, 8)})])


def test_ranks_that_mean_other_tensors_by_one_name_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"w is float32 \[8\] on rank 0 and float32 \[9\] on rank 1"):
        spread([Offer({"w": row(0, 8, 8)}), Offer({"w": row(0, 9, 9)})])


def test_plain_tensors_are_written_once_where_equal_and_by_rank_where_not() -> None:
    equal, one, other = (PlainTensor("float32", (4,), digest) for digest in ("e", "1", "2"))

    plan = spread([Offer(plain={"same": equal, "own": one}), Offer(plain={"same": equal, "own": other})])

    assert sorted(order.key for orders in plan.orders for order in orders) == ["own", "own", "same"]
    assert plan.by_rank == {"own"}


def test_values_that_differ_by_rank_are_refused_by_name_in_another_world_size() -> None:
    offers = [
        Offer(values={"seed": str(rank), "lr": "1"}, paths={"seed": ("seed",), "lr": ("lr",)})
        for rank in (0, 1)
    ]
    plan = spread(offers)
    with TemporaryDirectory() as folder:
        written = [
            write_file(f"{folder}/{index}", [b"x"] * len(one))[0] for index, one in enumerate(plan.orders)
        ]
    catalogue = catalogue_of(plan, ["0", "1"], written)

    check_values(catalogue, 2)
    with pytest.raises(
        CheckpointMismatch, match=r"1 values differed by rank on the 2 ranks.*seed.*parts=\['lr'\]"
    ):
        check_values(catalogue, 4)


@pytest.mark.parametrize("damage", ["bit", "short", "missing"])
def test_a_damaged_file_is_found_by_name(tmp_path: Path, damage: str) -> None:
    full = torch.arange(4096.0)
    held = Held("float32", (4096,), (Patch(Box((0,), (4096,)), (0,)),))
    catalogue = save(str(tmp_path), [{"w": full}], [{"w": held}])
    file = tmp_path / file_of(0)
    if damage == "missing":
        file.unlink()
    elif damage == "short":
        os.truncate(file, 9000)
    else:
        data = bytearray(file.read_bytes())
        data[9000] ^= 1
        file.write_bytes(data)

    with pytest.raises(CheckpointCorrupted, match=file_of(0)) as caught:
        load(str(tmp_path), catalogue, {"w": torch.zeros(4096)}, {"w": held})

    assert caught.value.files == (str(file),)


def test_a_tensor_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    catalogue = save(str(tmp_path), [{"w": torch.zeros(8)}], [{"w": row(0, 8, 8)}])

    with pytest.raises(CheckpointMismatch, match=r"w was saved as float32 \[8\] and is float32 \[9\] here"):
        check_forms(catalogue, {"w": row(0, 9, 9)})


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex64]
)
def test_every_type_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    full = torch.arange(512).view(16, 32).to(torch.float32).to(dtype)
    held = Held(str(dtype).removeprefix("torch."), (16, 32), (Patch(Box((0, 0), (16, 32)), (0, 0)),))
    catalogue = save(str(tmp_path), [{"w": full}], [{"w": held}])
    arrived = torch.zeros_like(full)

    load(str(tmp_path), catalogue, {"w": arrived}, {"w": held})

    assert torch.equal(arrived.view(torch.uint8), full.view(torch.uint8))
