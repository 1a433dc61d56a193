"""Sides that do not fit, and roles that cannot be synced, are refused before any byte is sent."""

from __future__ import annotations

import re

import pytest
import torch

import phalanx as px
from tests.weights.weight_workers import (
    NAME,
    Accepter,
    Actor,
    Publisher,
    Rollout,
    arrived,
    groups,
    joined,
    linked,
)


@pytest.mark.parametrize(
    ("published", "accepted", "row"),
    [
        ({"w": torch.ones(3)}, {"w": torch.zeros(4)}, ("w", "float32 [4]", "float32 [3]", "target rank 0")),
        (
            {"a.w": torch.ones(3)},
            {"b.w": torch.zeros(3)},
            ("b.w", "float32 [3]", "no such name at the source (it has a.w, for example)", "target rank 0"),
        ),
        (
            {"w": torch.ones(3, dtype=torch.int64)},
            {"w": torch.zeros(3)},
            ("w", "float32 [3]", "int64 [3]", "target rank 0"),
        ),
    ],
    ids=["shape", "name", "type"],
)
def test_a_mismatch_is_an_error_with_a_table_and_changes_no_weights(
    published: object, accepted: object, row: tuple[str, ...]
) -> None:
    with joined(published, accepted) as (sync, target):
        with pytest.raises(px.weights.WeightsMismatch) as raised:
            sync()

        assert [tuple(one) for one in raised.value.rows] == [row]
        assert all(part in str(raised.value) for part in ("name", "wanted", "found", "rank", row[0]))
        assert str(px.weights.status(target, NAME)[0]) == "none"
        assert all(not one.any() for one in arrived(target).values())
        assert target.state == "ready"


@pytest.mark.parametrize(
    ("offsets", "words"), [((0, 0), r"w .*\[2:4, 0:2\]"), ((0, 1, 2), "overlap")], ids=["hole", "overlap"]
)
def test_holes_and_overlaps_of_source_boxes_are_found(offsets: tuple[int, ...], words: str) -> None:
    def two_of_four_rows(rank: int) -> dict[str, px.weights.ShardSpec]:
        return {"w": px.weights.ShardSpec((4, 2), (((offsets[rank], 0), (2, 2)),))}

    publishing = Publisher.bind(lambda _: {"w": torch.ones(2, 2)}, boxes=two_of_four_rows)
    accepting = Accepter.bind(lambda _: {"w": torch.zeros(4, 2)})
    sides = linked(publishing, accepting, sizes=(len(offsets), 1))
    with sides as (_, _, sync), pytest.raises(px.weights.WeightsMismatch) as raised:
        sync()

    (row,) = raised.value.rows
    assert re.search(words, " ".join(row))


@pytest.mark.parametrize(
    ("model", "boxes", "why"),
    [
        ([1], {}, r"an nn\.Module or a mapping"),
        ({"w": [1.0]}, {}, "are not tensors"),
        ({"w": torch.zeros(1, dtype=torch.complex128)}, {}, "w has type complex128"),
        ({"w": torch.eye(3).to_sparse()}, {}, "w has type float32 and layout torch.sparse_coo"),
        ({"w": torch.zeros(3)}, {"v": px.weights.ShardSpec((3,), ())}, "names tensors that do not exist: v"),
        (
            {"w": torch.zeros(3, 2)},
            {"w": px.weights.ShardSpec((8, 2), (((0, 0), (2, 2)),))},
            "w: the stated boxes",
        ),
        (
            {"w": torch.ones(4)},
            {"w": px.weights.ShardSpec((4, 2), (((0,), (4,)),))},
            r"w: the stated boxes .* global tensor of shape \[4, 2\]",
        ),
    ],
)
def test_weights_that_cannot_be_published_are_refused_by_name(model: object, boxes: object, why: str) -> None:
    publishing = Publisher.bind(lambda _: model, boxes=lambda _: boxes)
    with pytest.raises(px.DeclarationError, match=why), linked(publishing, Rollout) as (_, _, sync):
        sync()


@pytest.mark.parametrize("form", ["expanded", "meta"])
def test_a_target_tensor_without_memory_for_each_element_is_refused_by_name(form: str) -> None:
    def blank(_: int) -> dict[str, torch.Tensor]:
        return {"w": torch.zeros(1).expand(3) if form == "expanded" else torch.zeros(3, device="meta")}

    with linked(Publisher.bind(lambda _: {"w": torch.ones(3)}), Accepter.bind(blank)) as (_, target, sync):
        with pytest.raises(px.DeclarationError, match="w cannot be written by a sync"):
            sync()
        assert str(px.weights.status(target, NAME)[0]) == "none"


def test_unknown_names_of_weights_are_refused_with_the_known_names() -> None:
    with groups(Actor, Rollout) as (source, target):
        with pytest.raises(px.DeclarationError, match="published weights 'other'") as raised:
            px.WeightSync(source, target, NAME, source_name="other")()
        with pytest.raises(px.DeclarationError, match="accept_weights"):
            px.WeightSync(source, source, NAME)()
        with pytest.raises(px.DeclarationError, match=rf"typo.*{NAME}"):
            px.weights.status(target, "typo")

        assert f"it has: ['{NAME}']" in str(raised.value)
        assert source.name in str(raised.value)
    both = groups(px.colocate({"actor": Actor, "rollout": Rollout}))
    with both as (one,), pytest.raises(px.DeclarationError, match=r"\.actor, rank 0: .*accept_weights"):
        px.WeightSync(one.actor, one.actor, NAME)()
