"""How many a second, on a clock that the test moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.channels.item_accounting import Ledger
from phalanx.channels.rates import Rate
from phalanx.errors import InternalError


def test_a_rate_counts_from_the_first_until_the_window_is_full() -> None:
    rate = Rate(window=10.0)
    rate.add(8, 100.0)

    assert rate.per_second(104.0) == 2.0


def test_what_is_older_than_the_window_counts_no_more() -> None:
    rate = Rate(window=10.0)
    rate.add(8, 0.0)
    rate.add(5, 20.0)

    assert rate.per_second(20.0) == 0.5
    assert rate.per_second(31.0) == 0.0


def test_nothing_yet_is_a_rate_of_0() -> None:
    assert Rate().per_second(5.0) == 0.0


@given(st.integers(1, 50), st.integers(1, 5))
def test_an_even_flow_has_its_own_rate(per_second: int, minutes: int) -> None:
    rate = Rate(window=10.0)
    seconds = minutes * 60

    for second in range(seconds):
        rate.add(per_second, float(second))

    assert rate.per_second(seconds - 1.0) == per_second


def test_a_ledger_refuses_to_end_what_nobody_took() -> None:
    ledger = Ledger()
    item = ledger.accept("p", "p", "ref", nbytes=8, rows=2, at=0.0)

    with pytest.raises(InternalError, match="rows 0 to 2 of item 0 are not taken"):
        ledger.settle([item.whole], "delivered")
