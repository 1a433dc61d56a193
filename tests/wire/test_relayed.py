"""Envelopes and batches: what is divided among relays comes together as it was."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from phalanx.wire.codec import encode
from phalanx.wire.relayed import (
    BY_VALUE_BYTES,
    Batch,
    Envelope,
    Shares,
    batch_of,
    merged,
    packed_output,
    part_of,
)

BELOW = [(0, 1, 2), (3, 4), (5, 6, 7, 8)]


def values(batch: Batch) -> list[bytes | str]:
    return [[*batch.raw, *batch.refs][index] for index in batch.by_rank()]


@given(st.lists(st.sampled_from([b"a", b"b", b"c", None]), min_size=9, max_size=9), st.permutations(range(9)))
def test_outputs_come_together_in_the_order_of_the_call(
    outputs: list[bytes | None], ranks: Sequence[int]
) -> None:
    expected = [output if output is not None else f"ref {rank}" for rank, output in enumerate(outputs)]

    parts = [
        (
            positions,
            batch_of([outputs[ranks[p]] for p in positions], [f"ref {ranks[p]}" for p in positions]),
        )
        for _, positions, _ in Shares(BELOW).of(ranks)
    ]
    batch = merged(9, parts)

    assert values(batch) == [expected[rank] for rank in ranks]
    assert len(batch.raw) == len(set(batch.raw))


def test_equal_outputs_travel_once_whoever_returned_them() -> None:
    batch = merged(4, [(range(2), batch_of([b"x", b"x"], "ab")), (range(2, 4), batch_of([b"x", b"x"], "cd"))])

    assert (batch.raw, batch.which, batch.count) == ([b"x"], None, 4)


@given(
    st.lists(st.integers(0, 3), min_size=9, max_size=9),
    st.lists(st.integers(0, 8), min_size=1, max_size=9, unique=True),
)
def test_each_rank_gets_its_message_and_its_references(which: list[int], ranks: list[int]) -> None:
    messages = [(bytes([index]), [index, 4]) for index in range(4)]
    refs = ["r0", "r1", "r2", "r3", "all"]
    own = which[: len(ranks)]
    envelope = Envelope(7, "", "m", 1, ranks, messages, own, list(range(len(ranks))))
    got: dict[int, tuple[bytes, list[str], int]] = {}

    for index, positions, some in Shares(BELOW).of(ranks):
        part, used = part_of(envelope, positions, some)
        part = Envelope.unpack(part.pack())
        below = [refs[place] for place in used]
        for at, rank in enumerate(BELOW[index] if part.ranks is None else part.ranks):
            data, places = part.messages[part.which[at] if part.which else 0]
            got[rank] = data, [below[place] for place in places], part.bare[at]

    assert got == {rank: (bytes([own[at]]), [f"r{own[at]}", "all"], at) for at, rank in enumerate(ranks)}


def test_a_call_to_everyone_names_no_ranks() -> None:
    assert [ranks for _, _, ranks in Shares(BELOW).of(None)] == [None, None, None]
    assert [ranks for _, _, ranks in Shares(BELOW).of(range(9))] == [None, None, None]


def test_small_outputs_travel_by_value_and_large_ones_do_not() -> None:
    assert pickle.loads(packed_output(None) or b"") is None
    assert packed_output("x" * (BY_VALUE_BYTES + 1)) is None
    assert packed_output(encode(["x" * BY_VALUE_BYTES])) is None


def test_an_output_that_holds_references_travels_by_reference() -> None:
    encoded = encode([Path("a")], hoist={type(Path()): lambda _: "token"})

    assert packed_output(encoded) is None


def test_a_batch_comes_back_from_its_packed_form() -> None:
    batch = batch_of([packed_output(None), packed_output(3), packed_output(None)], [None] * 3)

    packed = batch.pack()

    assert isinstance(packed, bytes)
    assert Batch.unpack(packed) == batch


def test_a_batch_with_references_stays_an_object_whose_references_a_backend_counts() -> None:
    batch = batch_of([packed_output(None), None], ["ref 0", "ref 1"])

    assert batch.pack() is batch
    assert Batch.unpack(batch) is batch
