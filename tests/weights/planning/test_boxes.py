"""Boxes, runs of indices and names."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.weights.boxes import local_boxes
from phalanx.weights.manifest import pack_names, unpack_names


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


def test_names_come_back_in_their_order() -> None:
    names = ["layers.1.w", "layers.0.w", "größe", "重み"]

    assert unpack_names(pack_names(names)) == names
