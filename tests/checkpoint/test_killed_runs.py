"""Drivers and ranks of a run are killed at random moments: it resumes from a complete step with equal rewards."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from phalanx.checkpoint.steps import listed
from tests.checkpoint import killed_script
from tests.checkpoint.killed_script import STEPS
from tests.support.scripts import BEGIN

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("ray_cluster")]
_LIVES = 4  # of which the last one is not killed
_LATER_S = 0.4  # a step with its save takes some 0.2 s


class Life:
    """One process of the script."""

    def __init__(self, path: Path) -> None:
        address = ray.get_runtime_context().gcs_address
        command = [sys.executable, "-m", killed_script.__name__, address, str(path)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.why = ""
        self.told: dict[str, Any] = {}

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield what the process has told after each of its messages, until it ends."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(BEGIN):
                self.told |= json.loads(line.removeprefix(BEGIN))
                yield self.told
        _, self.why = self._process.communicate()

    def kill(self, who: str) -> None:
        """Kill the driver or a rank, at once and by force; a driver without its rank ends by itself."""
        pid = self._process.pid if who == "driver" else self.told["ranks"][int(who)]
        with contextlib.suppress(ProcessLookupError):  # the process had ended
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def expected(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    """The rewards of an undisturbed run."""
    life = Life(tmp_path_factory.mktemp("whole") / "run")
    *_, told = life.messages()
    assert "over" in told, life.why
    assert len(told["rewards"]) == STEPS
    return told["rewards"]


SOAK = [pytest.mark.soak, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("seed", [0, 2, *(pytest.param(seed, marks=SOAK) for seed in (1, *range(3, 32)))])
def test_a_killed_run_has_the_rewards_of_an_undisturbed_run(
    seed: int, expected: list[list[float]], tmp_path: Path
) -> None:
    chance = random.Random(seed)  # seed 2 kills the driver and both ranks
    for number in range(_LIVES):
        life = Life(tmp_path)
        after, who = chance.randint(1, 4), chance.choice(["driver", "0", "1"])
        timer = threading.Timer(chance.uniform(0, _LATER_S), life.kill, [who])
        for count, _ in enumerate(life.messages()):
            if count == after and number < _LIVES - 1:
                timer.start()
        timer.cancel()
        for found in listed(str(tmp_path)):
            if found.whole:
                assert not found.storage.differing(found.files)
        if "over" in life.told:
            break

    assert "over" in life.told, life.why
    assert life.told["rewards"] == expected
