"""How far apart the ranks of a group started."""

from __future__ import annotations

from phalanx.display.start_skew import apart, by_node


def test_the_last_to_begin_and_the_last_to_end_are_named() -> None:
    told = apart([(10.0, 11.0), (10.5, 15.0), (12.0, 12.5)])
    assert told == (
        "constructors: rank 2 began last, 2.0 s after the first; rank 1 ended last, 4.0 s after the first"
    )


def test_what_is_within_a_tenth_of_a_second_is_not_worth_a_word() -> None:
    assert apart([(1.0, 2.0), (1.01, 2.05)]) == ""
    assert apart([(1.0, 20.0)]) == ""


def test_one_node_needs_no_word_of_nodes() -> None:
    assert by_node(["a", "a"], [1]) == ""
