"""``python docs/pictures.py`` makes ``assets/engines.svg``: what ``phalanx top`` shows of two engines under load."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "assets" / "engines.svg"
COLUMNS = 110


def llama() -> Any:
    """Small, and large enough for steps of some milliseconds."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=1024,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def work() -> None:
    """Two engines and a trainer; the picture is taken while the engines answer, after their third version."""
    import ray

    import phalanx as px
    from phalanx.engines import SamplingParams
    from phalanx.engines.transformers import TransformersRollout

    class Trainer(px.Worker):
        def __init__(self) -> None:
            self.model = llama()
            self.publish_weights("policy", self.model)

        @px.register
        def step(self) -> None:
            import torch

            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(0.99)

    px.init(num_cpus=8)
    with px.ResourcePool([1], use_gpu=False) as one, px.ResourcePool([2], use_gpu=False) as two:
        trainer = px.WorkerGroup(one, Trainer, name="trainer")
        engine = TransformersRollout.bind(llama, weights="policy", max_running=48)
        rollout = px.WorkerGroup(two, engine, name="rollout", env={"OMP_NUM_THREADS": "1"})
        sync = px.WeightSync(trainer, rollout, "policy")
        for _ in range(3):
            trainer.step()
            sync()
        prompts = [[1 + row % 4000, 2, 3] for row in range(160)]
        answers = rollout.generate.submit(prompts, SamplingParams(max_tokens=400))
        while min(one.running for one in rollout.engine_statistics()) < 48:
            time.sleep(0.1)
        time.sleep(4.0)
        address = ray.get_runtime_context().gcs_address
        subprocess.run([sys.executable, __file__, address], check=True)
        answers.cancel()
    px.shutdown()


def look(address: str) -> None:
    """What ``phalanx top`` shows now, as a picture without fonts from elsewhere."""
    from rich.console import Console

    from phalanx.backends.ray.node_agents import RankObserver
    from phalanx.cli.common import cluster_reader
    from phalanx.cli.top_command import overview, render

    cluster = cluster_reader(address)
    observer = RankObserver(cluster.address)
    try:
        with open(os.devnull, "w") as nowhere:
            console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
            console.print(render(overview(cluster, observer, None)))
    finally:
        observer.close()
    svg = console.export_svg(title="phalanx top")
    svg = re.sub(r"\s*@font-face \{.*?\}\n", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code, monospace", "'DejaVu Sans Mono', Menlo, Consolas, monospace")
    FILE.write_text(re.sub(r"\s*<!-- Generated with Rich.*?-->", "", svg, flags=re.DOTALL))


if __name__ == "__main__":
    look(sys.argv[1]) if sys.argv[1:] else work()
