"""The README: its links lead to files, and its first example runs, also with the wheel."""

from __future__ import annotations

import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.support.scripts import run

README = (ROOT / "README.md").read_text(encoding="utf-8")
TASK = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

def make_model():
    torch.manual_seed(0)
    sizes = dict(vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=None))

def prompt_batches():
    for _ in range(2):
        yield torch.randint(2, 16, (8, 3))

def score(prompts, answers):
    assert [len(answer.tokens) for answer in answers] == [4] * 8
    return torch.tensor([float(answer.tokens[0] == prompt[0]) for prompt, answer in zip(prompts, answers)])
"""


def test_the_readme_has_at_most_160_lines_and_its_links_lead_to_files() -> None:
    targets = [target for target in re.findall(r"\]\(([^)#]+)", README) if not re.match(r"https?:", target)]

    assert len(README.splitlines()) <= 160
    assert len(targets) > 10
    assert [target for target in targets if not (ROOT / target).exists()] == []


@pytest.mark.slow
def test_the_first_example_of_the_readme_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")

    assert run_example(tmp_path, example(), backend="ray")[-1:] == ["ready ready"]


@pytest.mark.slow
def test_the_wheel_has_all_modules_and_runs_the_first_example_inline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["make", "wheel"], cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = (ROOT / "dist").glob("phalanx-*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    source = ROOT / "src"
    files = {
        path.relative_to(source) for path in source.rglob("phalanx/**/*") if path.suffix not in ("", ".pyc")
    }
    assert {path for path in files if not (installed / path).is_file()} == set()

    # inline ranks cannot form a process group of two
    code = example().replace("ResourcePool([2])", "ResourcePool([1])") + "    print(px.__file__)\n"
    monkeypatch.setenv("PYTHONPATH", str(installed))

    last = ["ready ready", str(installed / "phalanx" / "__init__.py")]
    assert run_example(tmp_path, code, backend="inline")[-2:] == last


def example() -> str:
    """Return the first example, which prints the states of its groups at its end."""
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    return f"{code}\n    print(policy.state, rollout.state)\n"


def run_example(folder: Path, code: str, *, backend: str) -> list[str]:
    """Run an example, and return the lines of its output."""
    (folder / "my_task.py").write_text(TASK)
    (folder / "loop.py").write_text(code)
    return run(folder / "loop.py", backend=backend, folder=folder).splitlines()
