"""The image pipeline on a cluster of 2 cores, as a user runs it."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest

import phalanx as px

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "image_embeddings.py"


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the script printed, and the folder that it wrote to."""
    folder = tmp_path_factory.mktemp("images")
    command = [sys.executable, str(SCRIPT), "--num-cpus", "2", "--per-class", "6", "--out", "here"]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, folder / "here"


pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_it_says_that_the_weights_are_random(ended: tuple[str, Path]) -> None:
    assert "a small one with random weights is used" in ended[0]


def test_the_parquet_has_path_class_and_embedding_but_no_pixels(ended: tuple[str, Path]) -> None:
    table = pyarrow.parquet.read_table(ended[1] / "embeddings")
    assert (sorted(table.column_names), table.num_rows) == (["class", "embedding", "path"], 48)


def test_a_worker_group_gives_the_same_embeddings(ended: tuple[str, Path]) -> None:
    found = re.search(r"largest difference (\S+)", ended[0])
    assert found is not None
    assert float(found[1]) <= 1e-5


def test_even_random_weights_find_more_of_the_same_photograph_than_chance(ended: tuple[str, Path]) -> None:
    found = re.search(r"of (\d+) neighbours (\d+) are of their query's class", ended[0])
    assert found is not None
    assert int(found[2]) / int(found[1]) > 0.4  # by chance 5 / 47


def test_the_contact_sheet_is_a_png(ended: tuple[str, Path]) -> None:
    assert (ended[1] / "neighbours.png").read_bytes().startswith(b"\x89PNG")


def test_an_accelerator_that_no_node_has_is_an_error_and_no_endless_wait(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, "--accelerator-type", "T4"])
    monkeypatch.setattr(px, "init", lambda **_: None)  # on the cluster that is there
    with pytest.raises(SystemExit, match="--accelerator-type T4: the cluster has no accelerators"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
