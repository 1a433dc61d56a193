"""The README: its links lead to files, and its first example runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

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
def test_the_first_example_trains(tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    (tmp_path / "my_task.py").write_text(TASK)
    (tmp_path / "loop.py").write_text(code + "\n    print(policy.state, rollout.state)\n")

    ran = subprocess.run(
        [sys.executable, "loop.py"],
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": "local", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=170,
    )

    assert (ran.returncode, ran.stdout.splitlines()[-1:]) == (0, ["ready ready"]), ran.stdout + ran.stderr
