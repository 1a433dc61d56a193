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


def test_weights_are_torn_from_the_first_byte_to_the_last() -> None:
    noted = book()
    noted.begin(KEY, 1)
    assert (str(noted.weights(KEY)), "actor" in noted.unusable) == ("torn(1)", True)

    noted.finish(KEY, 1)
    assert (str(noted.weights(KEY)), noted.unusable, noted.declared.versions) == ("whole(1)", {}, {KEY: 1})


def test_weights_of_the_constructor_may_be_used() -> None:
    assert (str(book().weights(KEY)), book().unusable) == ("none", {})


def test_a_sync_that_does_not_end_is_told_until_the_next_one_ends() -> None:
    noted = book(had=1)
    noted.begin(KEY, 2)
    assert (
        "sync to version 2 did not end: its parameters may be mixed (version 1 before)"
        in (noted.unusable["actor"])
    )

    noted.begin(KEY, 2)  # a version that never arrived whole may come again
    noted.finish(KEY, 2)
    assert noted.unusable == {}


def test_only_the_version_that_began_can_end() -> None:
    noted = book()
    noted.begin(KEY, 2)

    with pytest.raises(InternalError, match="torn"):
        noted.finish(KEY, 3)


def test_a_version_that_failed_on_another_rank_is_torn_here_too() -> None:
    noted = book()
    noted.begin(KEY, 1)
    noted.finish(KEY, 1)
    noted.tear(KEY, 1)

    assert str(noted.weights(KEY)) == "torn(1)"


def test_only_the_role_whose_weights_are_torn_is_refused() -> None:
    noted = book()
    noted.begin(("rollout", "policy"), 1)

    assert list(noted.unusable) == ["rollout"] and "weights 'policy' of role" in noted.unusable["rollout"]


def test_weights_of_a_process_before_this_one_are_missed() -> None:
    noted = book(had=4)

    assert "version 4" in noted.unusable["actor"]
    assert noted.newest(KEY) == 4


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


def test_a_version_of_another_step_is_not_counted() -> None:
    noted = book()
    with pytest.raises(WeightsError, match="at step 3, but step 4 was asked for"):
        noted.publish(KEY, "one", 1, 3, 4)
    with pytest.raises(DeclarationError, match="step=function"):
        noted.publish(KEY, "one", 1, None, 4)

    assert noted.newest(KEY) == 0


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
