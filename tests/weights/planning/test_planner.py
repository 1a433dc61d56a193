"""Plans of syncs: names, fused names, ties, replicas and mismatches."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from phalanx.errors import DeclarationError, WeightsMismatch
from phalanx.weights.boxes import Box, LocalBox, chunk, local_boxes, whole
from phalanx.weights.manifest import HeldTensor, Manifest, pack_names
from phalanx.weights.name_matching import Fused
from phalanx.weights.plan import Locality, Locations, Plan, RankLocation
from tests.weights.planning.layouts import one_node, plan_of


def full(*shape: int, dtype: str = "float32") -> HeldTensor:
    return HeldTensor(dtype, shape, (LocalBox(whole(shape), (0,) * len(shape)),))


def part(shape: tuple[int, ...], *boxes: tuple[int, int]) -> HeldTensor:
    """Return a tensor of one dim with boxes of (start, size), stored one after another."""
    starts = [sum(size for _, size in boxes[:index]) for index in range(len(boxes))]
    placed = [LocalBox(Box((box[0],), (box[1],)), (at,)) for box, at in zip(boxes, starts, strict=True)]
    return HeldTensor("float32", shape, tuple(placed))


def rows(shape: tuple[int, ...], rank: int, ranks: int) -> HeldTensor:
    runs = [chunk([range(shape[0])], rank, ranks), *([range(size)] for size in shape[1:])]
    return HeldTensor("float32", shape, local_boxes(runs))


def whole_on(ranks: int, **held: HeldTensor) -> list[Manifest]:
    return [Manifest.of({name.replace("__", "."): form for name, form in held.items()})] * ranks


def by_rank(*held: HeldTensor) -> list[Manifest]:
    """Return manifests of ranks that hold the tensor w."""
    return [Manifest.of({"w": one}) for one in held]


TIED = [Manifest.of({"embed": full(4)}, {"head": "embed"})]
QKV = whole_on(1, q_proj__w=full(4), k_proj__w=full(2), v_proj__w=full(2))


def feeds(plan: Plan) -> set[tuple[str, str]]:
    return {(pair.source, pair.target) for lane in plan.batches for pair in lane.pairs}


def senders(plan: Plan) -> list[tuple[int, Locality]]:
    return [(piece.source, piece.locality) for _, _, piece in plan.transfers()]


@pytest.mark.parametrize(
    ("sources", "targets", "fault"),
    [
        (
            by_rank(full(8)),
            by_rank(part((8,), (0, 5), (4, 4))),
            ("w", "boxes that do not overlap", "[0:5] and [4:8], an overlap", "target rank 0"),
        ),
        (by_rank(full(8)), by_rank(part((8,), (4, 5))), ("w", "boxes within [8]", "[4:9]", "target rank 0")),
        (
            by_rank(full(4), full(5)),
            by_rank(full(4)),
            ("w", "float32 [4] as on rank 0", "float32 [5]", "source rank 1"),
        ),
        (
            QKV,
            whole_on(1, qkv_proj__w=full(9)),
            ("qkv_proj.w", "9 along dim 0 from q_proj.w, k_proj.w, v_proj.w", "4 + 2 + 2", "target"),
        ),
        (
            whole_on(1, qkv_proj__w=full(9)),
            whole_on(1, q_proj__w=full(9)),
            (
                "qkv_proj.w",
                "9 along dim 0 from q_proj.w, k_proj.w, v_proj.w",
                "parts of unknown size",
                "source",
            ),
        ),
        (
            whole_on(1, embed=full(4), head=full(4)),
            TIED,
            ("embed", "one source: head is the same storage at the target", "embed and head", "source"),
        ),
    ],
)
def test_a_mismatch_names_the_tensor_with_the_wanted_and_found_value(
    sources: list[Manifest], targets: list[Manifest], fault: tuple[str, ...]
) -> None:
    with pytest.raises(WeightsMismatch) as raised:
        plan_of(sources, targets)

    assert raised.value.rows[0] == fault
    assert pickle.loads(pickle.dumps(raised.value)).rows == raised.value.rows


def test_all_mismatches_are_one_error_with_the_first_30_in_its_table() -> None:
    wanted = {f"w{index}": full(1) for index in range(38)}

    with pytest.raises(WeightsMismatch, match=r"40 tensors do not fit(.|\n)*and 10 more") as raised:
        plan_of(whole_on(1, a=full(2), c=full(1)), whole_on(1, a=full(3), c=full(1, dtype="int8"), **wanted))

    assert len(raised.value.rows) == 40


@pytest.mark.parametrize(
    ("rename", "why"),
    [
        ({"old.*": "new.*.*"}, r"no more \* in the new name"),
        ({"old.w": None}, "expected texts"),
        ([("old.w", "new.w")], "pass a mapping"),
        (lambda name: None, r"rename\('old.w'\) returned None"),
        ({"old.w": "b"}, "both renamed"),
    ],
)
def test_an_invalid_rename_is_refused_with_the_reason(rename: Any, why: str) -> None:
    with pytest.raises((DeclarationError, WeightsMismatch), match=why):
        plan_of(whole_on(1, old__w=full(2), b=full(2)), whole_on(1, b=full(2)), rename=rename)


def test_fused_tensors_are_split_into_their_parts() -> None:
    held = whole_on(1, linear_qkv__w=full(16), linear_fc1__w=full(6))
    wanted = whole_on(1, qkv_proj__w=full(16), gate_proj__w=full(3), up_proj__w=full(3))
    rules = [Fused.megatron_qkv(heads=4, query_groups=2), Fused.megatron_glu()]

    plan = plan_of(held, wanted, fused=rules)

    found = [
        (pair.target[:2], piece.target_at[0], piece.source_at[0], piece.box.sizes[0])
        for _, pair, piece in plan.transfers()
    ]
    interleaved = [(0, 0, 4), (4, 8, 4), (8, 4, 2), (10, 12, 2), (12, 6, 2), (14, 14, 2)]
    assert sorted(found) == [("ga", 0, 0, 3), *(("qk", *cut) for cut in interleaved), ("up", 0, 3, 3)]
    assert plan.surplus == ()
    with pytest.raises(DeclarationError, match="num_query_groups"):
        Fused.megatron_qkv(heads=4, query_groups=3)


def test_weights_tied_only_at_the_target_are_fed_by_any_of_their_names() -> None:
    plan = plan_of(whole_on(1, head=full(4)), TIED)

    assert (feeds(plan), plan.bytes_by_link()) == ({("head", "embed")}, {(0, 0, Locality.REMOTE): 16})
    assert (plan.copies, plan.ties) == ((), TIED[0].ties)


@pytest.mark.parametrize(
    ("places", "sender"),
    [
        ([("b", "3"), ("a", "2"), ("a", "1")], (2, Locality.PROCESS)),
        ([("b", "3"), ("a", "2")], (1, Locality.NODE)),
        ([("b", "3")], (0, Locality.REMOTE)),
    ],
)
def test_the_nearest_replica_sends(places: list[tuple[str, str]], sender: tuple[int, Locality]) -> None:
    locations = Locations(tuple(RankLocation(*place) for place in places), (RankLocation("a", "1"),))

    plan = plan_of(whole_on(len(places), w=full(4)), whole_on(1, w=full(4)), places=locations)

    assert senders(plan) == [sender]


def test_replicas_share_the_transfers_and_ranks_of_one_node_share_a_written_box() -> None:
    named = {f"layers.{index}.w": full(64) for index in range(12)}

    shared = plan_of(whole_on(4, **named), whole_on(1, **named), places=one_node(4, 1))
    once = plan_of(whole_on(1, w=full(4)), whole_on(3, w=full(4)), places=one_node(1, 3))

    assert sorted(source for source, _ in senders(shared)) == sorted([0, 1, 2, 3] * 3)
    assert [piece.targets for _, _, piece in once.transfers()] == [(0, 1, 2)]


def test_boxes_are_listed_once_for_all_tensors_with_equal_layouts() -> None:
    names = pack_names(f"layers.{layer}.experts.{expert}.w" for layer in range(94) for expert in range(384))

    def experts(ranks: int) -> list[Manifest]:
        return [Manifest(((rows((1536, 4096), rank, ranks), names),)) for rank in range(ranks)]

    plan = plan_of(experts(64), experts(48))

    assert sum(len(lane.boxes) for lane in plan.batches) < 200 and len(feeds(plan)) == 94 * 384
    assert len(pickle.dumps(experts(1)[0])) < 200_000
