"""The object store is full, or too small; the cluster is one of the test's own, in another process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.calls.full_store_script import FITS, STORE
from tests.support.scripts import told_by

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What the script saw."""
    (found,) = told_by("tests.calls.full_store_script", timeout=220)
    return found


def test_a_call_that_fits_beside_what_fills_the_store_is_made(found: dict[str, Any]) -> None:
    assert found["filled"] > 0.8 * STORE
    assert found["while full"] == [FITS, FITS]


def test_small_calls_need_no_store(found: dict[str, Any]) -> None:
    assert found["small while full"] == [10, 10]


def test_a_value_larger_than_the_store_is_refused_with_sizes_before_anything_is_sent(
    found: dict[str, Any],
) -> None:
    assert "take 286.1 MiB in the object store" in found["too large"]
    assert "holds 200.0 MiB on this node. Nothing was sent" in found["too large"]


def test_the_group_stays_ready_and_the_store_is_freed(found: dict[str, Any]) -> None:
    assert (found["state while full"], found["state"]) == ("ready", "ready")
    assert found["afterwards"] == [FITS, FITS]
