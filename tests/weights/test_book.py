"""None, whole or torn: what a rank notes of its weights after each thing that can happen to them."""

from __future__ import annotations

import pytest

from phalanx.declare.weight_declarations import Accepted, Published, WeightsDeclared
from phalanx.errors import DeclarationError, InternalError, WeightsError
from phalanx.weights.versions import WeightRegistry

KEY = ("actor", "policy")


def book(had: int | None = None, published: int | None = None) -> WeightRegistry:
    declared = WeightsDeclared({KEY: Published({})}, {KEY: Accepted({})})
    return WeightRegistry(
        declared, {} if had is None else {KEY: had}, {} if published is None else {KEY: published}
    )


def test_only_the_version_that_began_can_end() -> None:
    noted = book()
    noted.begin(KEY, 2)

    with pytest.raises(InternalError, match="torn"):
        noted.finish(KEY, 3)


def test_a_role_with_two_names_is_usable_when_both_are() -> None:
    noted = book(had=1)
    noted.begin(("actor", "other"), 1)
    noted.finish(("actor", "other"), 1)
    assert "actor" in noted.unusable

    noted.begin(KEY, 2)
    noted.finish(KEY, 2)
    assert noted.unusable == {}


def test_a_version_is_published_once_to_each_group_of_targets() -> None:
    noted = book()
    noted.publish(KEY, "one", 1, None, None)
    noted.publish(KEY, "other", 1, None, None)

    with pytest.raises(WeightsError, match="version 1 was published already"):
        noted.publish(KEY, "one", 1, None, None)


def test_a_version_that_is_not_new_is_not_published() -> None:
    with pytest.raises(WeightsError, match="version 7 was published already, so this cannot be version 7"):
        book(published=7).publish(KEY, "one", 7, None, None)


def test_versions_of_a_target_never_go_back() -> None:
    noted = book(had=5)

    with pytest.raises(WeightsError, match="never decrease"):
        noted.begin(KEY, 3)


def test_weights_that_nobody_declared_are_refused_with_those_that_there_are() -> None:
    with pytest.raises(
        DeclarationError, match=r"role 'actor' has not accepted weights 'polcy'; it has: \['policy'\]"
    ):
        book().accepted(("actor", "polcy"))
    with pytest.raises(DeclarationError, match=r"role 'critic' .* none \(role 'actor' has them\)"):
        book().published(("critic", "policy"))
