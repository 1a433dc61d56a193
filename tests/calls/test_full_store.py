"""The object store is full, or too small; the cluster is one of the test's own, in another process."""

from __future__ import annotations

import pytest

from tests.calls.full_store_script import FITS, STORE
from tests.support.scripts import told_by

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_calls_that_fit_are_made_beside_what_fills_the_store_and_others_are_refused() -> None:
    (found,) = told_by("tests.calls.full_store_script", timeout=220)

    assert found["filled"] > 0.8 * STORE
    assert found["while full"] == [FITS, FITS]
    assert found["small while full"] == [10, 10]
    assert "take 286.1 MiB in the object store" in found["too large"]
    assert "holds 200.0 MiB on this node. Nothing was sent" in found["too large"]
    assert (found["state while full"], found["state"]) == ("ready", "ready")
    assert found["afterwards"] == [FITS, FITS]
