"""Through the whole link, from any layout to any other: every target rank has its part of the golden tensors."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import phalanx as px
from phalanx.weights.digests import Verify
from tests.weights.planning.layouts import Shape, Side, golden, sides
from tests.weights.weight_workers import NAME, Accepter, Publisher, arrived, groups, same


@st.composite
def syncs(draw: st.DrawFn) -> tuple[list[Shape], Side, Side]:
    shapes = draw(st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=3))
    return (
        shapes,
        draw(sides(shapes, [torch.float32])),
        draw(sides(shapes, [torch.float32, torch.bfloat16])),
    )


@given(syncs(), st.sampled_from(["sampled", "full"]))
@settings(max_examples=25)
def test_every_target_rank_gets_its_part_of_every_tensor_bit_for_bit(
    case: tuple[list[Shape], Side, Side], verify: Verify
) -> None:
    shapes, source, target = case
    full = golden(shapes)
    blank: dict[str, Any] = {name: torch.full_like(one, -1) for name, one in full.items()}
    publishing = Publisher.bind(
        lambda rank: source.tensors(full, rank), boxes=lambda rank: source.boxes(full, rank)
    )
    accepting = Accepter.bind(
        lambda rank: target.tensors(blank, rank), boxes=lambda rank: target.boxes(full, rank)
    )
    with groups(publishing, accepting, sizes=(source.ranks, target.ranks)) as (one, other):
        version = px.WeightSync(one, other, NAME, verify=verify, bucket_bytes=4096)()

        wanted = [target.tensors(full, rank) for rank in range(target.ranks)]
        assert all(same(arrived(other, rank), tensors) for rank, tensors in enumerate(wanted))
        assert version.nbytes == sum(one.nbytes for rank in wanted for one in rank.values())
