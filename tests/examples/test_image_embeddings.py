"""The image pipeline on a cluster of 2 cores, as a user runs it."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pyarrow.parquet
import pytest

import phalanx as px
from tests.examples.loading import FOLDER
from tests.support.scripts import run

SCRIPT = FOLDER / "image_embeddings.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_the_pipeline_writes_the_embeddings_of_a_worker_group_and_finds_similar_images(
    tmp_path: Path,
) -> None:
    few = ("--num-cpus", "2", "--per-class", "6", "--out", "here")
    printed = run(SCRIPT, *few, backend="ray", folder=tmp_path)

    assert "a small one with random weights is used" in printed
    table = pyarrow.parquet.read_table(tmp_path / "here" / "embeddings")
    assert (sorted(table.column_names), table.num_rows) == (["class", "embedding", "path"], 48)
    difference = re.search(r"largest difference (\S+)", printed)
    assert difference is not None
    assert float(difference[1]) <= 1e-5
    found = re.search(r"of (\d+) neighbors (\d+) are of their query's class", printed)
    assert found is not None
    assert int(found[2]) / int(found[1]) > 0.4  # by chance 5 / 47
    assert (tmp_path / "here" / "neighbors.png").read_bytes().startswith(b"\x89PNG")


def test_an_accelerator_type_that_no_node_has_is_an_error(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, "--accelerator-type", "T4"])
    monkeypatch.setattr(px, "init", lambda **_: None)  # use the running cluster
    with pytest.raises(SystemExit, match="--accelerator-type T4: the cluster has no accelerators"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
