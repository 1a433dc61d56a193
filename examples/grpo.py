"""GRPO on a small language model: it learns to copy digits, from its own samples and a reward alone.

    python examples/grpo.py                                # two ranks, a minute or two on two cores
    python examples/grpo.py --ranks 4 --steps 800 --device cpu
    python examples/grpo.py --save out/run                 # save some steps; Ctrl-C, and then:
    python examples/grpo.py --save out/run --resume        # continue with the same numbers
    python examples/grpo.py --replace                      # `kill -9` a rank meanwhile: it gets a new process

``grpo`` is the algorithm of the paper (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, algorithm 1, with a reward per
answer): sample a group of answers to each question, score them, take each reward relative to its group, and step on the
clipped objective with a penalty for leaving the reference. It is ordinary Python on the driver; each call runs on every
rank. Actor and reference share a process per rank. An engine generates the answers: a group of its own on the same
slots, which has the actor's weights after each ``sync()``. The reward is a group on a CPU.

The script ends with a picture of the reward curve, an HTML report of the run (the curve and each rank's calls) and, as
its last line, the mean reward on questions sampled after the training.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from around import Saving, add_saving, save_curve, shown, wants_gpu
from rich.console import Console
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import phalanx as px
from phalanx.engines import Completion, SamplingParams
from phalanx.engines.transformers import TransformersRollout

VOCABULARY = 16  # ten digits, a mark before and after the question, and four tokens that are always wrong
BEGIN, END = 10, 11


@dataclass(frozen=True)
class Settings:
    """Hyperparameters; letters are the paper's."""

    digits: int = 4
    questions: int = 16  # per step
    group_size: int = 8  # G, answers to each question
    steps: int = 600  # 400 suffice for most seeds and processors
    learning_rate: float = 2e-3
    clip: float = 0.2  # epsilon
    kl_weight: float = 1e-3  # beta
    entropy_weight: float = 0.05  # not in the paper: a model that starts from noise has to keep trying
    seed: int = 0


@dataclass(frozen=True)
class Groups:
    """The groups of the roles."""

    policy: px.WorkerGroup
    rollout: px.WorkerGroup
    judge: px.WorkerGroup


def grpo(
    groups: Groups, sync: px.WeightSync, settings: Settings, random: torch.Generator, done: int = 0
) -> Iterator[float]:
    """Train the policy by the steps that are not ``done``. Yield the mean reward of each step's answers."""
    for _ in range(done, settings.steps):
        yield train_on(ask(settings.questions, settings.digits, random), groups, sync, settings)


def train_on(questions: Tensor, groups: Groups, sync: px.WeightSync, settings: Settings) -> float:
    """Train one step and return the mean reward of the answers to these questions."""
    policy, rollout, judge = groups.policy, groups.rollout, groups.judge
    sync()
    questions = questions.repeat_interleave(settings.group_size, dim=0)
    answers = rollout.generate.submit(questions, SamplingParams(settings.digits))
    reference = policy.reference.log_probs.submit(questions, answers)
    rewards = judge.score(questions, answers)
    advantages = group_advantages(rewards, settings.group_size)
    policy.actor.update(questions, answers, reference, advantages)
    return rewards.mean().item()


def grpo_with_losses(
    groups: Groups, sync: px.WeightSync, settings: Settings, random: torch.Generator, done: int = 0
) -> Iterator[float]:
    """Run :func:`grpo`, and repeat a step in which ranks were lost from its start."""
    px.snapshot(groups.policy, groups.rollout)  # the judge has nothing to lose
    for _ in range(done, settings.steps):
        questions, reward = ask(settings.questions, settings.digits, random), None
        while reward is None:
            try:
                made = train_on(questions, groups, sync, settings)
                px.snapshot(groups.policy, groups.rollout)
                reward = made
            except px.PhalanxError as error:
                if not error.lost:
                    raise  # a bug would come back each time
                print(f"the step is made again, since {str(error).partition(chr(10))[0]}", file=sys.stderr)
                px.restore(groups.policy, groups.rollout)  # which gives lost ranks new processes first
        yield reward


def group_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Return each answer's reward relative to the other answers to its question, in standard deviations."""
    groups = rewards.view(-1, group_size)
    centered = groups - groups.mean(dim=1, keepdim=True)
    return (centered / (groups.std(dim=1, keepdim=True) + 1e-4)).flatten()


def ask(count: int, digits: int, random: torch.Generator) -> Tensor:
    """Return questions as tokens, (count, digits + 2)."""
    body = torch.randint(0, 10, (count, digits), generator=random)
    return torch.cat([torch.full((count, 1), BEGIN), body, torch.full((count, 1), END)], dim=1)


def evaluate(groups: Groups, sync: px.WeightSync, settings: Settings, count: int = 512) -> float:
    """Return the mean reward of a sampled answer to each of ``count`` new questions."""
    sync()
    questions = ask(count, settings.digits, torch.Generator().manual_seed(settings.seed + 1_000_000))
    answers = groups.rollout.generate.submit(questions, SamplingParams(settings.digits))
    return groups.judge.score(questions, answers).mean().item()


class Actor(px.Worker):
    """The policy: a copy on each rank, kept equal by summing gradients over the ranks."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        torch.manual_seed(settings.seed)
        self.model = small_llama().to(self.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.publish_weights("policy", self.model)
        px.register_state(self, model=self.model, optimizer=self.optimizer)

    @px.register(px.Dispatch.ROWS, collect="list", to_device=True)
    def update(
        self, questions: Tensor, answers: list[Completion], reference: Tensor, advantages: Tensor
    ) -> dict[str, float]:
        """Take an optimizer step on the answers of all ranks."""
        settings, advantage = self.settings, advantages[:, None]
        tokens, drawn = as_tensors(questions, answers, settings.digits)
        distribution = answer_distribution(self.model, tokens, settings.digits)
        log_probs = of_answer(distribution, tokens)

        ratio = (log_probs - drawn).exp()
        clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
        gain = torch.minimum(ratio * advantage, clipped * advantage)
        kl = (reference - log_probs).exp() - (reference - log_probs) - 1  # unbiased and never negative
        entropy = -(distribution.exp() * distribution).sum(dim=-1)
        objective = gain - settings.kl_weight * kl + settings.entropy_weight * entropy

        self.optimizer.zero_grad()
        (-objective.sum()).backward()
        average_gradients(self.model, count=objective.numel())
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return {"kl": kl.mean().item(), "entropy": entropy.mean().item()}

    def close(self) -> None:
        dist.destroy_process_group()


class Reference(px.Worker):
    """The policy before training, in the actor's process."""

    def __init__(self, settings: Settings) -> None:
        self.digits = settings.digits
        self.model = copy.deepcopy(self.roles["actor"].model).requires_grad_(False)
        px.register_state(self, rng=False)  # nothing of it changes

    @px.register(px.Dispatch.ROWS, to_device=True)
    @torch.no_grad()
    def log_probs(self, questions: Tensor, answers: list[Completion]) -> Tensor:
        """Return the log-probability of each answer token, (rows, digits)."""
        tokens, _ = as_tensors(questions, answers, self.digits)
        return of_answer(answer_distribution(self.model, tokens, self.digits), tokens)


class Reward(px.Worker):
    """Reward of answers."""

    @px.register(px.Dispatch.ROWS)
    def score(self, questions: Tensor, answers: list[Completion]) -> Tensor:
        """Return the fraction of each answer's digits that are copied correctly, (rows,)."""
        digits = questions.shape[1] - 2
        tokens, _ = as_tensors(questions, answers, digits)
        return (questions[:, 1:-1] == tokens[:, -digits:]).float().mean(dim=1)


def small_llama() -> nn.Module:
    """Return an untrained Llama of 113,984 parameters."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=208,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        pad_token_id=None,
        bos_token_id=BEGIN,
        eos_token_id=None,  # an answer has as many digits as are asked for
    )
    return LlamaForCausalLM(config)


def as_tensors(questions: Tensor, answers: list[Completion], digits: int) -> tuple[Tensor, Tensor]:
    """Return tokens with the question in front, (rows, digits + 2 + digits), and log-probabilities, (rows, digits)."""
    shape, device = (len(answers), digits), questions.device
    tokens = torch.tensor([answer.tokens for answer in answers], dtype=torch.long, device=device).view(shape)
    log_probs = torch.tensor([answer.log_probs for answer in answers], device=device).view(shape)
    return torch.cat([questions, tokens], dim=1), log_probs


def answer_distribution(model: nn.Module, tokens: Tensor, digits: int) -> Tensor:
    """Return log-probabilities over the vocabulary at each answer token, (rows, digits, vocabulary)."""
    return model(tokens[:, :-1], use_cache=False).logits[:, -digits:].log_softmax(dim=-1)


def of_answer(distribution: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probabilities of the sampled tokens in ``distribution``, (rows, digits)."""
    return distribution.gather(-1, tokens[:, -distribution.shape[1] :, None]).squeeze(-1)


def average_gradients(model: nn.Module, count: int) -> None:
    """Sum gradients and token counts over the ranks and divide, so that rows may be split unevenly."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([*(g.flatten() for g in gradients), gradients[0].new_tensor([count])])
    dist.all_reduce(flat)
    averaged = (flat[:-1] / flat[-1]).split([g.numel() for g in gradients])
    for gradient, average in zip(gradients, averaged, strict=True):
        gradient.copy_(average.view_as(gradient))


def saved(
    groups: Groups,
    sync: px.WeightSync,
    settings: Settings,
    saving: Saving,
    console: Console,
    steps: Callable[..., Iterator[float]],
) -> list[float]:
    """Train, and save some steps as one commit. Return the mean reward of each step, also before a resume."""
    state: dict[str, Any] = {"questions": torch.Generator().manual_seed(settings.seed), "rewards": []}
    # The reference is what it was by its seed.
    roles = {"actor": groups.policy.actor, "rollout": groups.rollout}
    with saving.run(roles, state) as run:
        done = saving.resumed(run)
        rewards = steps(groups, sync, settings, state["questions"], done)
        for step, reward in enumerate(shown(rewards, settings.steps, console, done), start=done + 1):
            state["rewards"].append(reward)
            if run is not None and saving.is_due(step, settings.steps):
                run.save.submit(step)  # written beside the next steps
    return state["rewards"]


@contextmanager
def started(
    settings: Settings, ranks: int, device: str, *, replace: bool = False
) -> Generator[tuple[Groups, px.WeightSync]]:
    """Yield the groups and the sync of the weights between them; with ``replace``, lost ranks get new processes."""
    roles = px.colocate({"actor": Actor.bind(settings), "reference": Reference.bind(settings)})
    engine = TransformersRollout.bind(small_llama, weights="policy", seed=settings.seed)
    mended = px.ReplacePolicy() if replace else None
    with (
        px.ResourcePool([ranks], use_gpu=wants_gpu(device, ranks)) as pool,
        px.ResourcePool([1], use_gpu=False) as cpu,
    ):
        groups = Groups(
            policy=px.WorkerGroup(pool, roles, name="policy", on_failure=mended),
            rollout=px.WorkerGroup(pool, engine, name="rollout", on_failure=mended),
            judge=px.WorkerGroup(
                cpu, Reward, name="judge", on_failure=px.RestartPolicy() if replace else None
            ),
        )
        with px.WeightSync(groups.policy.actor, groups.rollout, "policy") as sync:
            yield groups, sync


def train(
    settings: Settings,
    ranks: int,
    device: str,
    console: Console,
    report: Path,
    saving: Saving,
    *,
    replace: bool,
) -> tuple[list[float], float]:
    """Start the groups, train, and write the report. Return the mean reward of each step, and of new questions."""
    with px.trace() as trace, started(settings, ranks, device, replace=replace) as (groups, sync):
        console.print(groups.policy.explain())
        rewards = saved(groups, sync, settings, saving, console, grpo_with_losses if replace else grpo)
        final = evaluate(groups, sync, settings)
    title = f"GRPO: a small Llama learns to copy digits, {settings.steps} steps on {ranks} ranks"
    trace.save(report, title=title, charts={"mean reward of each step": rewards})
    return rewards, final


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small Llama to copy digits by GRPO.")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument(
        "--ranks", type=int, default=2, help="processes that hold actor and reference, and as many engines"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for curve and report")
    parser.add_argument(
        "--replace",
        action="store_true",
        help="ranks that are lost get new processes, and their step is made again",
    )
    add_saving(parser)
    parser.add_argument(
        "--target", type=float, default=0.9, help="final reward below which the exit status is 1"
    )
    return parser.parse_args()


def main() -> int:
    given = arguments()
    console = Console()
    settings = Settings(steps=given.steps, seed=given.seed)
    picture, report = given.out / "grpo_reward.png", given.out / "grpo_report.html"
    saving = Saving(given.save, given.resume, given.save_every)
    rewards, final = train(
        settings, given.ranks, given.device, console, report, saving, replace=given.replace
    )
    save_curve(rewards, picture)
    console.print(f"reward curve: {picture}")
    console.print(f"what each rank did when: {report} (open it in a browser)")
    if final < given.target:
        print(
            f"the reward stayed below {given.target}: more --steps may help, or another --seed",
            file=sys.stderr,
        )
    print(f"final mean reward: {final:.2f}")
    return 0 if final >= given.target else 1


if __name__ == "__main__":
    sys.exit(main())
