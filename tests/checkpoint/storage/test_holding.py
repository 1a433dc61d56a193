"""One driver writes a path: others are refused with who it is, and a dead one's lock is taken over."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import phalanx as px
from phalanx.checkpoint.storage import path_lock as holding
from phalanx.checkpoint.storage.retention import Holder, verdict
from phalanx.checkpoint.storage.steps import open_step
from phalanx.checkpoint.storage.storage import Place, place_at
from tests.checkpoint.storage.support import process

ME = Holder("here", 5, "boot 1", 100, 0.0, "mine")


@pytest.mark.parametrize(
    ("holder", "started", "what"),
    [
        (None, None, "free"),
        (replace(ME, pid=6, started=7), 7, "held"),
        (replace(ME, pid=6, started=7), None, "free"),
        (replace(ME, pid=6, started=7), 8, "free"),  # the pid was used again
        (replace(ME, host="there", pid=6), 7, "watch"),
        (replace(ME, machine="boot 2", pid=6), 7, "watch"),  # a container of the same name
    ],
)
def test_a_lock_is_taken_from_the_dead_only(holder: Holder | None, started: int | None, what: str) -> None:
    assert verdict(holder, ME, started) == what


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return place_at(tmp_path / "run")


@pytest.fixture
def other_driver(place: Place) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the place until its input ends."""
    code = (
        "import sys\nfrom phalanx.checkpoint.storage.path_lock import hold\nfrom "
        "phalanx.checkpoint.storage.storage import place_at\n"
        "held = hold(place_at(sys.argv[1]))\nprint('held', flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, place.root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "held\n"
        yield driver
        driver.kill()


def test_a_second_driver_is_refused_with_who_holds_it(
    place: Place, other_driver: subprocess.Popen[str]
) -> None:
    with pytest.raises(
        px.checkpoint.CheckpointLocked, match=f"held by pid {other_driver.pid} on host {socket.gethostname()}"
    ):
        open_step(place.root, 1)


def test_the_lock_of_a_killed_driver_is_taken_over(place: Place, other_driver: subprocess.Popen[str]) -> None:
    other_driver.kill()
    other_driver.wait()

    open_step(place.root, 1).commit()


def test_a_driver_that_ends_leaves_no_lock(place: Place, other_driver: subprocess.Popen[str]) -> None:
    other_driver.communicate("")

    assert holding.holder_of(place) is None


def test_the_lock_goes_with_the_last_who_wanted_it(place: Place) -> None:
    first, second = holding.hold(place), holding.hold(place)

    holding.let_go(first, place)
    held_still = holding.holder_of(place)
    holding.let_go(second, place)

    assert held_still is not None
    assert held_still.pid == os.getpid()
    assert holding.holder_of(place) is None


def elsewhere() -> Holder:
    return replace(holding.this_process(), host="elsewhere", token="theirs")


def test_a_driver_of_another_host_that_shows_life_is_not_passed_over(place: Place) -> None:
    place.make("")
    place.write(holding.LOCK, elsewhere().to_bytes())

    def beats(seconds: float) -> None:
        place.write(holding.LOCK, elsewhere().beats().to_bytes())

    with pytest.raises(px.checkpoint.CheckpointLocked, match="host elsewhere"):
        holding.hold(place, sleep=beats)


@pytest.mark.parametrize("clock", [-1e9, 1e9])  # of the other host: its time is shown, and never compared
def test_a_driver_of_another_host_that_is_silent_is_passed_over(
    place: Place, caplog: pytest.LogCaptureFixture, clock: float
) -> None:
    place.make("")
    place.write(holding.LOCK, replace(elsewhere(), since=holding.this_process().since + clock).to_bytes())

    with caplog.at_level(logging.WARNING, "phalanx"):
        held = holding.hold(place, sleep=lambda seconds: None)

    held.check()
    holding.let_go(held, place)
    assert caplog.text.count("on host elsewhere, which cannot be seen from here: waiting 15 s") == 1


def test_a_driver_that_was_passed_over_commits_nothing(place: Place) -> None:
    writer = open_step(place.root, 1)
    place.write(holding.LOCK, elsewhere().to_bytes())

    with pytest.raises(px.checkpoint.CheckpointLocked, match=r"taken over by pid .* on host elsewhere"):
        writer.commit()


def test_a_writer_of_another_process_that_died_is_cleaned_up_by_the_next(place: Place) -> None:
    with process(1):
        folder = Path(open_step(place.root, 1).folder)
    with process(2):
        open_step(place.root, 2).commit()

    assert not folder.exists()
