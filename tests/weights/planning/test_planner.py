"""What a plan decides: names, fused names, ties, replicas, and what does not fit."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from phalanx.errors import DeclarationError, WeightsMismatch
from phalanx.weights.boxes import Box, LocalBox, chunk, local_boxes, whole
from phalanx.weights.manifest import HeldTensor, Manifest, Names
from phalanx.weights.name_matching import Fused
from phalanx.weights.plan import Locality, Locations, Plan, RankLocation
from tests.weights.planning.layouts import one_node, plan_of


def full(*shape: int, dtype: str = "float32") -> HeldTensor:
    return HeldTensor(dtype, shape, (LocalBox(whole(shape), (0,) * len(shape)),))


def rows(shape: tuple[int, ...], rank: int, ranks: int) -> HeldTensor:
    runs = [chunk([(0, shape[0])], rank, ranks), *([(0, size)] for size in shape[1:])]
    return HeldTensor("float32", shape, local_boxes(runs))


def whole_on(ranks: int, **held: HeldTensor) -> list[Manifest]:
    return [Manifest.of({name.replace("__", "."): form for name, form in held.items()})] * ranks


def cut_over(ranks: int, name: str, *shape: int) -> list[Manifest]:
    return [Manifest.of({name: rows(shape, rank, ranks)}) for rank in range(ranks)]


def feeds(plan: Plan) -> set[tuple[str, str]]:
    return {(pair.source, pair.target) for lane in plan.batches for pair in lane.pairs}


def sent_by(plan: Plan) -> dict[int, int]:
    found: dict[int, int] = {}
    for lane, _, piece in plan.transfers():
        found[piece.source] = found.get(piece.source, 0) + lane.nbytes(piece)
    return found


def faults(sources: list[Manifest], targets: list[Manifest]) -> list[tuple[str, str, str, str]]:
    with pytest.raises(WeightsMismatch) as raised:
        plan_of(sources, targets)
    return list(raised.value.rows)


def test_a_missing_name_is_told_with_what_was_wanted_and_where() -> None:
    found = faults(whole_on(1, a=full(2)), whole_on(2, a=full(2), b=full(3, 4)))

    assert found == [("b", "float32 [3, 4]", "no such name at the source", "target ranks 0, 1")]


def test_all_that_does_not_fit_is_one_error() -> None:
    found = faults(
        whole_on(1, a=full(2), c=full(1)), whole_on(1, a=full(3), b=full(3), c=full(1, dtype="int8"))
    )

    assert sorted(row[0] for row in found) == ["a", "b", "c"]


def test_the_message_is_a_table_that_names_the_first_faults() -> None:
    wanted = {f"w{index}": full(1) for index in range(40)}

    with pytest.raises(
        WeightsMismatch, match=r"40 of the weights' tensors do not fit(.|\n)*and 10 more"
    ) as raised:
        plan_of(whole_on(1, a=full(1)), whole_on(1, **wanted))

    assert len(raised.value.rows) == 40


def test_a_mismatch_keeps_its_rows_when_it_travels() -> None:
    with pytest.raises(WeightsMismatch) as raised:
        plan_of(whole_on(1), whole_on(1, a=full(1)))

    assert pickle.loads(pickle.dumps(raised.value)).rows == raised.value.rows


def test_a_box_that_no_source_has_is_a_hole() -> None:
    sources = [Manifest.of({"w": rows((8, 2), rank, 4)}) for rank in (0, 1, 3)]

    assert faults(sources, whole_on(1, w=full(8, 2))) == [
        ("w", "[0:8, 0:2] at a source", "a hole: no source rank has [4:6, 0:2]", "target rank 0")
    ]


def test_boxes_of_two_sources_that_overlap_in_part_are_refused() -> None:
    held = [HeldTensor("float32", (8,), (LocalBox(Box((start,), (5,)), (0,)),)) for start in (0, 3)]

    found = faults([Manifest.of({"w": one}) for one in held], whole_on(1, w=full(8)))

    assert found == [("w", "boxes that are equal or disjoint", "[3:5], an overlap", "source ranks 0 and 1")]


def test_boxes_of_one_rank_that_overlap_are_refused() -> None:
    twice = HeldTensor("float32", (8,), (LocalBox(Box((0,), (5,)), (0,)), LocalBox(Box((4,), (4,)), (5,))))

    found = faults(whole_on(1, w=full(8)), whole_on(1, w=twice))

    assert found == [("w", "boxes that do not overlap", "[0:5] and [4:8], an overlap", "target rank 0")]


def test_boxes_outside_of_the_tensor_are_refused() -> None:
    beyond = HeldTensor("float32", (8,), (LocalBox(Box((4,), (5,)), (0,)),))

    assert faults(whole_on(1, w=full(8)), whole_on(1, w=beyond))[0][2] == "[4:9]"


def test_ranks_of_one_side_that_disagree_on_a_shape_are_refused() -> None:
    sources = [Manifest.of({"w": full(4)}), Manifest.of({"w": full(5)})]

    assert ("w", "float32 [4] as on rank 0", "float32 [5]", "source rank 1") in faults(
        sources, whole_on(1, w=full(4))
    )


@pytest.mark.parametrize(
    "rename",
    [
        {"old.w": "new.w"},
        {"old.*": "new.*"},
        lambda name: name.replace("old", "new"),
    ],
)
def test_names_are_mapped_from_source_to_target(rename: object) -> None:
    plan = plan_of(whole_on(1, old__w=full(2)), whole_on(1, new__w=full(2)), rename=rename)  # type: ignore[arg-type]

    assert feeds(plan) == {("old.w", "new.w")}


@pytest.mark.parametrize(
    ("rename", "why"),
    [
        ({"old.*": "new.*.*"}, r"no more \* in the new name"),
        ({"old.w": "new.*"}, r"no more \* in the new name"),
        ({"old.w": None}, "expected texts"),
        ([("old.w", "new.w")], "pass a mapping"),
        (lambda name: None, r"rename\('old.w'\) gave None"),
    ],
)
def test_a_rename_that_cannot_be_is_refused_with_what_it_says(rename: Any, why: str) -> None:
    with pytest.raises(DeclarationError, match=why):
        plan_of(whole_on(1, old__w=full(2)), whole_on(1, new__w=full(2)), rename=rename)


def test_braces_of_a_name_are_a_part_of_it() -> None:
    plan = plan_of(whole_on(1, old__w=full(2)), whole_on(1, **{"{x}__w": full(2)}), rename={"old.*": "{x}.*"})

    assert feeds(plan) == {("old.w", "{x}.w")}


def test_two_names_renamed_to_one_are_refused() -> None:
    with pytest.raises(WeightsMismatch, match="both renamed"):
        plan_of(whole_on(1, a=full(2), b=full(2)), whole_on(1, b=full(2)), rename={"a": "b"})


def test_names_that_no_target_takes_are_told_as_surplus() -> None:
    assert plan_of(whole_on(1, a=full(2), b=full(2)), whole_on(1, a=full(2))).surplus == ("b",)


def test_a_target_is_fused_from_parts_in_their_order() -> None:
    parts = whole_on(1, l__q_proj__w=full(4, 2), l__k_proj__w=full(2, 2), l__v_proj__w=full(2, 2))

    plan = plan_of(parts, whole_on(1, l__qkv_proj__w=full(8, 2)))

    placed = {pair.source: piece.target_at for _, pair, piece in plan.transfers()}
    assert placed == {"l.q_proj.w": (0, 0), "l.k_proj.w": (4, 0), "l.v_proj.w": (6, 0)}


def test_a_fused_source_gives_its_parts() -> None:
    parts = whole_on(1, l__gate_proj__w=full(3, 2), l__up_proj__w=full(3, 2))

    plan = plan_of(whole_on(1, l__gate_up_proj__w=full(6, 2)), parts)

    taken = {pair.target: piece.source_at for _, pair, piece in plan.transfers()}
    assert taken == {"l.gate_proj.w": (0, 0), "l.up_proj.w": (3, 0)} and plan.surplus == ()


def test_interleaved_queries_keys_and_values_feed_a_fused_target() -> None:
    source, target = whole_on(1, linear_qkv__w=full(16)), whole_on(1, qkv_proj__w=full(16))

    plan = plan_of(source, target, fused=[Fused.megatron_qkv(heads=4, query_groups=2)])

    cuts = sorted(
        (piece.target_at[0], piece.source_at[0], piece.box.sizes[0]) for _, _, piece in plan.transfers()
    )
    assert cuts == [(0, 0, 4), (4, 8, 4), (8, 4, 2), (10, 12, 2), (12, 6, 2), (14, 14, 2)]


def test_groups_of_queries_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(DeclarationError, match="num_query_groups"):
        Fused.megatron_qkv(heads=4, query_groups=3)


def test_rules_for_one_engine_and_another_meet_in_the_parts() -> None:
    source, target = whole_on(1, linear_fc1__w=full(6)), whole_on(1, gate_proj__w=full(3), up_proj__w=full(3))

    plan = plan_of(source, target, fused=[Fused.megatron_glu()])

    assert feeds(plan) == {("linear_fc1.w", "gate_proj.w"), ("linear_fc1.w", "up_proj.w")}


def test_a_fused_tensor_of_another_size_than_its_parts_is_refused() -> None:
    parts = whole_on(1, q_proj__w=full(4), k_proj__w=full(2), v_proj__w=full(2))

    assert faults(parts, whole_on(1, qkv_proj__w=full(9)))[0][:3] == (
        "qkv_proj.w",
        "9 along dim 0 from q_proj.w, k_proj.w, v_proj.w",
        "4 + 2 + 2",
    )


def test_names_tied_at_the_source_travel_once_and_arrive_under_both() -> None:
    tied = [Manifest.of({"embed": full(4)}, {"head": "embed"})]

    plan = plan_of(tied, whole_on(1, embed=full(4), head=full(4)))

    assert plan.nbytes == 16 and plan.copies == (("embed", "head"),)


def test_names_tied_at_both_ends_travel_once() -> None:
    tied = [Manifest.of({"embed": full(4)}, {"head": "embed"})]

    plan = plan_of(tied, tied)

    assert feeds(plan) == {("embed", "embed")} and plan.copies == () and plan.ties == (("head", "embed"),)


def test_a_name_tied_at_the_target_is_fed_under_its_other_name() -> None:
    tied = [Manifest.of({"embed": full(4)}, {"head": "embed"})]

    assert feeds(plan_of(whole_on(1, head=full(4)), tied)) == {("head", "embed")}


def test_two_tensors_for_one_storage_are_refused() -> None:
    tied = [Manifest.of({"embed": full(4)}, {"head": "embed"})]

    assert faults(whole_on(1, embed=full(4), head=full(4)), tied)[0][2] == "embed and head"


def test_a_replica_in_the_same_process_goes_before_one_on_the_node_and_one_elsewhere() -> None:
    here, near, far = RankLocation("a", "1"), RankLocation("a", "2"), RankLocation("b", "3")
    places = Locations((far, near, here), (here,))

    plan = plan_of(whole_on(3, w=full(4)), whole_on(1, w=full(4)), places=places)

    assert [(piece.source, piece.locality) for _, _, piece in plan.transfers()] == [(2, Locality.PROCESS)]


def test_a_replica_on_the_node_goes_before_one_elsewhere() -> None:
    places = Locations((RankLocation("b", "3"), RankLocation("a", "2")), (RankLocation("a", "1"),))

    plan = plan_of(whole_on(2, w=full(4)), whole_on(1, w=full(4)), places=places)

    assert [(piece.source, piece.locality) for _, _, piece in plan.transfers()] == [(1, Locality.NODE)]


def test_replicas_share_the_work() -> None:
    named = {f"layers.{index}.w": full(64) for index in range(12)}

    plan = plan_of(whole_on(4, **named), whole_on(1, **named), places=one_node(4, 1))

    assert set(sent_by(plan).values()) == {12 * 64 * 4 // 4}


def test_what_several_ranks_of_a_node_need_is_written_once() -> None:
    plan = plan_of(whole_on(1, w=full(4)), whole_on(3, w=full(4)), places=one_node(1, 3))

    assert [piece.targets for _, _, piece in plan.transfers()] == [(0, 1, 2)]


def test_a_rank_that_holds_nothing_takes_part() -> None:
    assert plan_of(cut_over(4, "w", 3), cut_over(8, "w", 3)).nbytes == 12


def experts(ranks: int) -> list[Manifest]:
    names = Names.of(f"layers.{layer}.experts.{expert}.w" for layer in range(94) for expert in range(384))
    return [Manifest(((rows((1536, 4096), rank, ranks), names),)) for rank in range(ranks)]


def test_the_manifest_of_a_large_model_is_small() -> None:
    assert len(pickle.dumps(experts(1)[0])) < 200_000


def test_pieces_are_listed_once_for_all_names_that_travel_alike() -> None:
    plan = plan_of(experts(64), experts(48))

    assert sum(len(lane.boxes) for lane in plan.batches) < 200 and len(feeds(plan)) == 94 * 384
