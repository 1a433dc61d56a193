"""Boxes of runs of indices."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.weights.boxes import local_boxes


@pytest.mark.parametrize(
    ("runs", "found"),
    [
        ([[range(2), range(4, 5)], [range(3, 5)]], [("[0:2, 3:5]", (0, 0)), ("[4:5, 3:5]", (2, 0))]),
        ([[range(2), range(2, 5)]], [("[0:5]", (0,))]),
        ([], [("[]", ())]),
    ],
    ids=["two", "adjacent", "no dims"],
)
def test_runs_become_boxes_with_places_in_the_local_tensor(runs: Any, found: Any) -> None:
    assert [(str(patch.box), patch.at) for patch in local_boxes(runs)] == found
