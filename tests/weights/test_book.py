"""None, whole or torn: what a rank notes of its weights after each thing that can happen to them."""

from __future__ import annotations

import pytest

from phalanx.declare.weight_declarations import Accepted, Published, WeightsDeclared
from phalanx.errors import DeclarationError, WeightsError
from phalanx.weights.versions import WeightRegistry

KEY = ("actor", "policy")


def book(had: int | None = None) -> WeightRegistry:
    declared = WeightsDeclared({KEY: Published({})}, {KEY: Accepted({})})
    return WeightRegistry(declared, {} if had is None else {KEY: had}, {})


def test_a_role_with_two_names_is_usable_when_both_are() -> None:
    noted = book(had=1)
    noted.begin(("actor", "other"), 1)
    noted.finish(("actor", "other"), 1)
    assert "actor" in noted.unusable

    noted.begin(KEY, 2)
    noted.finish(KEY, 2)
    assert noted.unusable == {}


def test_a_version_is_published_once_to_each_group_and_none_goes_back_or_to_another_role() -> None:
    noted = book(had=5)
    noted.publish(KEY, "one", 1, None, None)
    noted.publish(KEY, "other", 1, None, None)

    with pytest.raises(WeightsError, match="version 1 was published already"):
        noted.publish(KEY, "one", 1, None, None)
    with pytest.raises(WeightsError, match="never decrease"):
        noted.begin(KEY, 3)
    with pytest.raises(DeclarationError, match=r"role 'critic' .* none \(role 'actor' has them\)"):
        noted.published(("critic", "policy"))
