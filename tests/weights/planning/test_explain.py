"""A plan as people read it."""

from __future__ import annotations

from phalanx.weights.planning.boxes import Patch, whole
from phalanx.weights.planning.locality import Hop, Place, Places
from phalanx.weights.planning.plan_report import bytes_by_link, explain_plan
from phalanx.weights.planning.resharding_planner import make_plan
from phalanx.weights.planning.shard_manifest import Held, Manifest


def full(*shape: int, dtype: str = "float32") -> Held:
    return Held(dtype, shape, (Patch(whole(shape), (0,) * len(shape)),))


PLACES = Places((Place("a", "1"),), (Place("a", "1"), Place("a", "2"), Place("b", "3")))
SOURCE = Manifest.of({"embed": full(256), "old.w": full(256), "spare": full(1)}, {"head": "embed"})
TARGET = Manifest.of({"embed": full(256), "head": full(256), "new.w": full(256, dtype="bfloat16")})
PLAN = make_plan([SOURCE], [TARGET] * 3, places=PLACES, rename={"old.*": "new.*"})
TABLE = explain_plan(PLAN)
NOTES = "\n".join(TABLE.notes)


def test_bytes_are_told_by_pair_of_ranks_and_hop() -> None:
    assert bytes_by_link(PLAN) == {(0, 0, Hop.PROCESS): 1536, (0, 1, Hop.NODE): 1536, (0, 2, Hop.OTHER): 1536}


def test_a_row_says_how_bytes_travel() -> None:
    assert TABLE.rows[1] == ("rank 0", "rank 1", "same node", "segments", "1.5 KiB")


def test_the_title_says_how_much_arrives() -> None:
    assert TABLE.title == "weights: 4.5 KiB to 3 ranks, 2 tensors"


def test_notes_tell_bytes_by_hop() -> None:
    assert "same process 1.5 KiB, same node 1.5 KiB, other node 1.5 KiB" in NOTES


def test_notes_tell_casts_renames_ties_and_surplus() -> None:
    assert "cast at the source: float32 to bfloat16 (1 tensors)" in NOTES
    assert "renamed or fused: old.w -> new.w" in NOTES
    assert "tied, travels once: head = embed (copied there)" in NOTES
    assert "not taken by the target: spare" in NOTES


def test_notes_tell_what_deltas_cost() -> None:
    assert "one more copy of what they send, 3.0 KiB" in explain_plan(PLAN, delta_base=3072).notes[-1]
