"""None, whole or torn: what a rank's weights are after each thing that can happen to them."""

from __future__ import annotations

import pytest

from phalanx.errors import DeclarationError, InternalError, WeightsError
from phalanx.weights.planning.version_table import Counter, Stillness, VersionTable, Weights

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
    with pytest.raises(WeightsError, match="version 1 was to follow version 2"):
        FIRST.begin(2).finish(2).begin(1)


def test_only_the_version_that_began_can_end() -> None:
    with pytest.raises(InternalError, match="torn"):
        FIRST.begin(2).finish(3)


def test_a_restarted_group_that_had_a_version_is_refused() -> None:
    assert "restarted since it had version 1" in str(FIRST.restarted().refusal())


def test_a_group_that_was_torn_and_restarted_is_refused() -> None:
    assert NEW.begin(1).restarted().refusal() is not None


def test_a_restarted_group_that_had_none_may_be_used() -> None:
    assert NEW.restarted().refusal() is None


def test_a_restarted_group_is_healed_by_a_sync() -> None:
    assert FIRST.restarted().begin(2).finish(2).refusal() is None


def test_only_the_role_whose_weights_are_torn_is_refused() -> None:
    ledger = VersionTable().put("rollout", "policy", FIRST.begin(2)).put("actor", "policy", FIRST)

    assert ledger.refusal("actor") is None
    assert "weights 'policy' of role 'rollout'" in str(ledger.refusal("rollout"))


def test_each_name_of_a_role_counts() -> None:
    ledger = VersionTable().put("r", "policy", FIRST).put("r", "adapter", NEW.begin(1))

    assert "'adapter'" in str(ledger.refusal("r")) and ledger.of("r", "policy") == FIRST


def test_a_ledger_knows_after_a_restart_what_was_had() -> None:
    assert VersionTable().put("r", "policy", FIRST).restarted().refusal("r") is not None


def test_a_name_that_was_never_synced_is_none() -> None:
    assert VersionTable().of("r", "policy") == NEW


def test_a_source_counts_on() -> None:
    assert Counter(4).next().number == 5


def test_a_restarted_source_counts_on_from_what_its_targets_have() -> None:
    assert Counter().next(at_least=7).number == 8


def test_weights_of_another_step_than_asked_for_are_refused() -> None:
    with pytest.raises(WeightsError, match="at step 3, but step 4"):
        Counter(1, step=3).check_step(4)


def test_a_step_can_only_be_asked_of_a_source_that_tells_it() -> None:
    with pytest.raises(DeclarationError, match="step=function"):
        Counter(1).check_step(4)


@pytest.mark.parametrize(("step", "wanted"), [(3, 3), (3, None), (None, None)])
def test_the_step_that_is_meant_may_be_synced(step: int | None, wanted: int | None) -> None:
    Counter(1, step).check_step(wanted)


def test_a_sync_without_change_warns_the_second_time() -> None:
    once = Stillness().after(0)

    assert once.warning() is None and "2 syncs in a row changed nothing" in str(once.after(0).warning())


def test_a_sync_that_should_have_changed_something_warns_at_once() -> None:
    assert "the sync changed nothing" in str(Stillness().after(0).warning(expect_change=True))


def test_a_change_begins_the_count_anew() -> None:
    assert Stillness().after(0).after(5).after(0).warning() is None
