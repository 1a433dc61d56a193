"""None, whole or torn: what a rank's weights are after each thing that can happen to them."""

from __future__ import annotations

import pytest

from phalanx.errors import DeclarationError, InternalError, WeightsError
from phalanx.weights.versions import UnchangedCounter, Weights, check_step, refusal_of

NEW = Weights()
FIRST = NEW.begin(1).finish(1)


def test_weights_of_the_constructor_may_be_used() -> None:
    assert NEW.refusal() is None and str(NEW) == "none"


def test_a_sync_that_ends_makes_weights_whole() -> None:
    assert str(FIRST) == "whole(1)" and FIRST.refusal() is None


def test_a_sync_that_does_not_end_leaves_them_torn() -> None:
    torn = FIRST.begin(2)

    assert str(torn) == "torn(2)"
    assert torn.refusal() == "a sync to version 2 did not end: its parameters may be mixed (version 1 before)"


def test_the_next_sync_heals_them() -> None:
    assert str(FIRST.begin(2).begin(3).finish(3)) == "whole(3)"


def test_a_version_that_never_arrived_whole_may_come_again() -> None:
    assert str(FIRST.begin(2).begin(2).finish(2)) == "whole(2)"


def test_versions_never_go_back() -> None:
    with pytest.raises(WeightsError, match="version 1 cannot follow version 2"):
        FIRST.begin(2).finish(2).begin(1)


def test_only_the_version_that_began_can_end() -> None:
    with pytest.raises(InternalError, match="torn"):
        FIRST.begin(2).finish(3)


def test_a_restarted_group_that_had_a_version_is_refused() -> None:
    assert "restarted since it had version 1" in str(Weights(had=1).refusal())


def test_only_the_role_whose_weights_are_torn_is_refused() -> None:
    entries = {("rollout", "policy"): FIRST.begin(2), ("actor", "policy"): FIRST}

    assert refusal_of("actor", entries) is None
    assert "weights 'policy' of role 'rollout'" in str(refusal_of("rollout", entries))


def test_each_name_of_a_role_counts() -> None:
    entries = {("r", "policy"): FIRST, ("r", "adapter"): NEW.begin(1)}

    assert "'adapter'" in str(refusal_of("r", entries))


def test_weights_of_another_step_than_asked_for_are_refused() -> None:
    with pytest.raises(WeightsError, match="at step 3, but step 4"):
        check_step(3, 4)


def test_a_step_can_only_be_asked_of_a_source_that_tells_it() -> None:
    with pytest.raises(DeclarationError, match="step=function"):
        check_step(None, 4)


@pytest.mark.parametrize(("step", "wanted"), [(3, 3), (3, None), (None, None)])
def test_the_step_that_is_meant_may_be_synced(step: int | None, wanted: int | None) -> None:
    check_step(step, wanted)


def test_a_sync_without_change_warns_the_second_time() -> None:
    once = UnchangedCounter().after(0)

    assert once.warning(expect_change=False) is None and "2 syncs in a row changed nothing" in str(
        once.after(0).warning(expect_change=False)
    )


def test_a_sync_that_should_have_changed_something_warns_at_once() -> None:
    assert "the sync changed nothing" in str(UnchangedCounter().after(0).warning(expect_change=True))


def test_a_change_begins_the_count_anew() -> None:
    assert UnchangedCounter().after(0).after(5).after(0).warning(expect_change=False) is None
