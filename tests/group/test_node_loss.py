"""Loss of a node under a group, on the test's own cluster in another process."""

from __future__ import annotations

import time
from typing import Any

import pytest

import phalanx as px
from phalanx.testing import faults
from tests.support.fault_workers import Trouble
from tests.support.own_cluster import several_nodes
from tests.support.scripts import tell, told_by

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def failed(call: Any) -> tuple[px.PhalanxError, float]:
    began = time.monotonic()
    try:
        call()
    except px.PhalanxError as error:
        return error, time.monotonic() - began
    raise AssertionError("it did not fail")


def main() -> None:
    """Run the driver, in its own process."""
    with several_nodes(3, resources={"seat": 2}) as cluster:
        found: dict[str, Any] = {}
        pool = px.ResourcePool([2, 2], use_gpu=False, timeout=60)
        group = px.WorkerGroup(pool, Trouble, resources={"seat": 1}, start_timeout=60)
        group.load(7)
        before = group.core.epoch.nodes

        call = group.nap.submit(120.0)
        lost = faults.drop_node(cluster, group, 3)
        error, found["took"] = failed(call.result)
        found["lost"] = lost
        found["kind"] = type(error).__name__
        found["text"] = str(error)
        found["causes"] = list(error.cause_ranks) if isinstance(error, px.CallError) else []
        found["hint"] = error.causes[0].hint if isinstance(error, px.CallError) else None

        group.restart()
        after = group.core.epoch.nodes
        found["stayed"] = before[:2] == after[:2]
        found["moved"] = lost not in after and len(set(after)) == 2
        found["loaded"] = group.what_is_loaded()

        faults.drop_node(cluster, group, 2)
        failed(lambda: group.nap(60.0))
        error, _ = failed(group.restart)
        found["no_room"] = [type(error).__name__, str(error), group.state]
        tell(found)
        pool.close()


def test_a_lost_node_raises_one_error_and_a_restart_moves_its_ranks_or_lacks_capacity() -> None:
    (found,) = told_by(__name__, timeout=220)

    assert found["took"] < 20.0
    assert (found["kind"], found["causes"]) == ("WorkerDiedError", [2, 3])
    assert found["lost"][:8] in found["text"]
    assert "health_check_period_ms" in found["hint"], "how the detection is tuned"
    assert (found["stayed"], found["moved"]) == (True, True)
    assert found["loaded"] == [7, 7, 7, 7]
    kind, text, state = found["no_room"]
    assert (kind, state) == ("PlacementError", "broken")
    assert "slots ever/now" in text


if __name__ == "__main__":
    main()
