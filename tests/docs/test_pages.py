"""The Python code of every page runs, block after block, and prints the output that the page shows."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

import phalanx as px
from phalanx.dispatch import shardable
from tests.docs.pages import DOCS, ROOT, Block, backend_of, blocks, name_of, pages, same_output
from tests.support.scripts import run as run_script

OUTPUT = "Output"

#: Pages whose code is run by another test.
ELSEWHERE = {
    "quick-start": "test_quick_start.py",
    "how-to/vllm": "tests/engines/vllm/test_page.py",
    "migrating-from-verl": "test_the_page_about_verl_runs_in_a_process_of_its_own",
    **{name_of(page): "tests/examples" for page in (DOCS / "tutorial").glob("*.md")},
}


def written_in(*languages: str) -> list[Block]:
    return [block for page in pages() for block in blocks(page) if block.language in languages]


def runnable(backend: str) -> list[Any]:
    with_python = {block.page for block in written_in("python")}
    chosen = [p for p in sorted(with_python) if name_of(p) not in ELSEWHERE and backend_of(p) == backend]
    marks = [pytest.mark.slow] if backend == "ray" else []
    return [pytest.param(page, id=name_of(page), marks=marks) for page in chosen]


def run(page: Path) -> None:
    """Run the page's Python blocks in one namespace, each checked against the output that follows it."""
    # Classes of "__main__" are pickled by value, like those of a reader's script.
    namespace: dict[str, Any] = {"__name__": "__main__", "__file__": str(page)}
    found = [block for block in blocks(page) if block.language in ("python", "text")]
    for block, following in zip(found, [*found[1:], None], strict=True):
        if block.language == "python":
            code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec")
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(code, namespace)
            if following is not None and following.language == "text" and following.title == OUTPUT:
                shown, printed = following.text, output.getvalue()
                assert same_output(shown, printed), (
                    f"{following.where} shows\n{shown}\nprinted was\n{printed}"
                )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, for pages that write files."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def own_row_types() -> Iterator[None]:
    """Remove the row types that a page registers, such as pandas' frames, after the page."""
    before = dict(shardable._BY_TYPE)
    yield
    shardable._BY_TYPE.clear()
    shardable._BY_TYPE.update(before)
    shardable._ops_of_type.cache_clear()


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_BACKEND", "inline")
    px.init(num_gpus=8)


@pytest.mark.parametrize("page", runnable("inline"))
def test_the_code_of_a_page_runs(page: Path, folder: Path, inline: None) -> None:
    run(page)


@pytest.mark.parametrize("page", runnable("ray"))
def test_the_code_of_a_page_runs_on_ray(
    page: Path, folder: Path, ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_BACKEND", "ray")
    run(page)


def test_the_page_about_verl_runs_in_a_process_of_its_own(
    tmp_path: Path, ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page replaces ``import verl`` for the rest of its process."""
    code = [block.text for block in blocks(DOCS / "migrating-from-verl.md") if block.language == "python"]
    script = tmp_path / "page.py"
    script.write_text("\n".join(code))
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)

    assert code
    run_script(script, backend="ray", folder=tmp_path)


def test_every_code_block_has_a_known_language_and_python_is_marked_as_python() -> None:
    known = {"python", "text", "sh", "yaml", "toml", "console", "slurm"}
    every = [block for page in pages() for block in blocks(page)]

    assert not [block.where for block in every if block.language not in known]
    assert not [block.where for block in written_in("text", "console") if "import phalanx" in block.text]


def test_the_tests_named_on_the_reliability_page_exist() -> None:
    tests = {path.as_posix(): path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}
    page = (DOCS / "reliability.md").read_text(encoding="utf-8")
    file, missing = "", list[str]()
    for named, function in re.findall(r"`(…|[\w/…]+\.py)(?:::(test_\w+))?`", page):
        file = file if named == "…" else f"/{named.removeprefix('…/')}"
        if not any(path.endswith(file) and f"def {function}" in text for path, text in tests.items()):
            missing.append(f"{file}::{function}")
    assert missing == []


def test_the_output_shown_on_a_page_may_leave_out_parts() -> None:
    assert same_output("rank 2 (host ..., pid ...)", "rank 2 (host a, pid 17)\n")
    assert not same_output("rank 2 (host ..., pid ...)", "rank 3 (host a, pid 17)\n")
    assert not same_output("rank 2", "rank 2 and more")


def titled(title: str) -> Block:
    return next(block for page in pages() for block in blocks(page) if block.title == title)


@pytest.mark.parametrize("block", written_in("sh", "slurm", "yaml"), ids=lambda block: block.where)
def test_shell_blocks_are_valid_and_yaml_blocks_can_be_parsed(block: Block) -> None:
    if block.language == "yaml":
        assert isinstance(yaml.safe_load(block.text), dict)
    else:
        command = ["bash", "-n"]
        checked = subprocess.run(command, input=block.text, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stderr


def test_ray_accepts_the_cluster_file_and_workers_of_the_kuberay_job_have_shared_memory() -> None:
    cluster = yaml.safe_load(titled("job.yaml").text)["spec"]["rayClusterSpec"]
    workers = cluster["workerGroupSpecs"][0]["template"]["spec"]

    (volume,) = workers["volumes"]
    assert volume["emptyDir"]["medium"] == "Memory"
    assert {"name": volume["name"], "mountPath": "/dev/shm"} in workers["containers"][0]["volumeMounts"]

    launcher = pytest.importorskip("ray.autoscaler._private.util")
    launcher.validate_config(launcher.prepare_config(yaml.safe_load(titled("cluster.yaml").text)))


SCRIPTS = sorted((ROOT / "examples" / "tutorial").glob("*.py"))
CHAPTERS = sorted((DOCS / "tutorial").glob("[0-9]*.md"))


@pytest.mark.parametrize(("page", "script"), zip(CHAPTERS, SCRIPTS, strict=True), ids=map(name_of, CHAPTERS))
def test_the_code_of_a_chapter_is_part_of_its_script(page: Path, script: Path) -> None:
    source = script.read_text(encoding="utf-8")
    code = [block for block in blocks(page) if block.language == "python"]

    assert f"`examples/tutorial/{script.name}`" in page.read_text(encoding="utf-8")
    assert code
    assert [block.where for block in code if block.raw not in source] == []
