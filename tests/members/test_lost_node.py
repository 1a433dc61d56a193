"""A node is lost under a group that trains; the cluster is one of the test's own, in another process."""

from __future__ import annotations

import pytest

from tests.support.scripts import told_by

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("late",), id="its peers tell of it before Ray does", marks=pytest.mark.slow),
        pytest.param((), id="as it comes", marks=pytest.mark.soak),
    ],
)
def test_its_ranks_are_replaced_elsewhere_and_the_losses_are_those_of_a_run_without_a_fault(
    words: tuple[str, ...],
) -> None:
    (found,) = told_by("tests.members.node_script", *words, timeout=280)

    assert found["losses"] == found["expected"]
    assert found["holders"] == [2, 3, 0, 1]  # each on the other node
    assert found["stayed"] == [True, True, False, False]
    assert found["nodes"][2:] == [False, True]  # none on the lost one; the others are where they were
    assert found["epoch"] == 1
    assert found["error"]
    assert "node lost" in found["told"]  # whatever its peers said first
