"""Asynchronous GRPO: separate groups generate answers and train on them at the same time.

    python examples/grpo_async.py                          # a minute or two on two cores
    python examples/grpo_async.py --compare                # first in turn, then at the same time: the speedup
    python examples/grpo_async.py --max-lag 0              # no answer is older than the weights that it trains
    python examples/grpo_async.py --at-sync wait           # answers end with the weights that they began with
    python examples/grpo_async.py --save out/run           # save some steps; --resume continues

Task and objective are those of ``grpo.py``; ``in_turn`` is that algorithm on these groups. ``grpo`` is the trainer's
side of the asynchronous algorithm: it takes a batch once there are enough answers, and sends its new weights while the
engines continue. ``produce`` is the other side: it has questions answered and scored, and puts the answers into the
channel. A lease on rows connects both: no answer is trained on more than ``max_lag`` versions after its first token was
sampled. Unfinished answers continue with new weights. Each token keeps the log-probability of the version that sampled
it, and the objective's ratios are relative to it.

The script ends with the reward curve, an HTML report of the run (each rank's calls) and, as its last line, the mean
reward on questions sampled after the training.
"""

from __future__ import annotations

import argparse
import copy
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from around import NOT_SAVED, Saving, add_saving, beside, save_curve, shown, wants_gpu
from grpo import answer_distribution, ask, average_gradients, group_advantages, of_answer, small_llama
from rich.console import Console
from torch import Tensor, nn

import phalanx as px
from phalanx.engines import SamplingParams
from phalanx.engines.transformers import TransformersRollout

Rows = dict[str, Tensor]


@dataclass(frozen=True)
class Settings:
    """Hyperparameters; letters are the paper's."""

    digits: int = 8
    questions: int = 32  # per step
    group_size: int = 8  # G, answers to each question
    together: int = 8  # questions that an engine is asked in one call
    steps: int = 300
    max_lag: int = 1  # versions between the first token of an answer and the step that trains on it
    at_sync: str = "keep"  # answers continue under new weights, or "wait": they end under the old ones first
    learning_rate: float = 2e-3
    clip: float = 0.2  # epsilon
    kl_weight: float = 1e-3  # beta
    entropy_weight: float = 0.05  # not in the paper: a model that starts from noise has to keep trying
    seed: int = 0

    def __post_init__(self) -> None:
        if self.questions % self.together:
            raise ValueError(f"{self.questions} questions per step are not asked {self.together} at a time")

    @property
    def rows(self) -> int:
        """Number of answers that each step trains on."""
        return self.questions * self.group_size


@dataclass(frozen=True)
class Groups:
    """The groups. Actor and reference are roles of the trainer's processes."""

    rollout: Any
    judge: Any
    trainer: Any


def grpo(
    groups: Groups, settings: Settings, staleness: px.StalenessManager, saving: Saving = NOT_SAVED
) -> Iterator[float]:
    """Train on answers while others are generated. Yield the mean reward of each step's answers.

    The trainer, the lead of generation and the trained rows are saved as one commit. A resumed run first yields the
    rewards of earlier steps, and asks all other questions again, since waiting answers would be a version older.
    """
    trainer, rollout = groups.trainer, groups.rollout
    done: dict[str, Any] = {"rewards": [], "trained": set[int]()}
    with (
        px.WeightSync(trainer.actor, rollout, "policy", staleness=staleness) as sync,
        px.Channel(name="answers", lengths="row") as answers,
        saving.run({"trainer": trainer.actor}, done, staleness=staleness) as run,
    ):
        saving.resumed(run)
        yield from done["rewards"]
        sync()
        producing = beside(
            producer(groups, settings, staleness, answers, done["trained"]), answers, staleness
        )
        with producing, ThreadPoolExecutor(1) as threads:
            syncing: Future[Any] | None = None
            for step in range(len(done["rewards"]) + 1, settings.steps + 1):
                with answers.take_rows(settings.rows, sort=True) as batch:
                    reference = trainer.reference.log_probs.submit(batch)
                    updates = trainer.actor.update(batch, reference)
                if syncing is not None:
                    syncing.result()
                syncing = send_weights(sync, rollout, settings, threads)  # during the next batch
                done["rewards"].append(sum(update.reward for update in updates) / settings.rows)
                done["trained"].update(row for update in updates for row in update.rows)
                if run is not None and saving.is_due(step, settings.steps):
                    run.save.submit(step)  # written beside the next steps
                yield done["rewards"][-1]
            if syncing is not None:
                syncing.result()


def producer(
    groups: Groups, settings: Settings, staleness: px.StalenessManager, answers: px.Channel, trained: set[int]
) -> Callable[[], None]:
    """Return the function of the producer threads, which put answers into the channel until all questions are
    answered.
    """
    before = frozenset(trained)
    questions = (some for some in asked(settings) if int(some["row"][0]) not in before)
    again, turn = list[Rows](), threading.Lock()

    def produce() -> None:
        while True:
            with turn:  # the thread with the next lease takes the next questions
                some = again.pop() if again else next(questions, None)
                if some is None:
                    return
                lease = staleness.lease(len(some["row"]))
            with lease:
                rows = to_train_on(groups, settings, some)
                if lease.put(answers, rows, rows["version"].tolist()) < len(some["row"]):
                    again.append(some)  # training was faster, and they are too old

    return produce


def in_turn(groups: Groups, settings: Settings) -> Iterator[float]:
    """Run the same algorithm with generation and training in turn, on the same groups."""
    trainer = groups.trainer
    per_step = settings.questions // settings.together
    with (
        px.WeightSync(trainer.actor, groups.rollout, "policy") as sync,
        ThreadPoolExecutor(per_step) as threads,
    ):
        questions = asked(settings)
        for _ in range(settings.steps):
            sync()
            some = islice(questions, per_step)
            parts = list(threads.map(lambda each: to_train_on(groups, settings, each), some))
            batch = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            reference = trainer.reference.log_probs.submit(batch)
            yield sum(update.reward for update in trainer.actor.update(batch, reference)) / settings.rows
        sync()


def asked(settings: Settings) -> Iterator[Rows]:
    """Yield all questions by call, each repeated for its answers, with the numbers of the rows."""
    random = torch.Generator().manual_seed(settings.seed)
    number = 0
    for _ in range(settings.steps):
        for questions in ask(settings.questions, settings.digits, random).split(settings.together):
            prompts = questions.repeat_interleave(settings.group_size, dim=0)
            yield {"row": torch.arange(number, number + len(prompts)), "tokens": prompts}
            number += len(prompts)


def answered(groups: Groups, settings: Settings, asked: Rows) -> Rows:
    """Return scored answers to some questions, from the least busy engine."""
    sampling = SamplingParams(max_tokens=settings.digits, ignore_eos=True)
    seeds = (settings.seed * 10_000_000 + asked["row"]).tolist()
    completions = groups.rollout.any.generate(
        asked["tokens"].tolist(), [replace(sampling, seed=seed) for seed in seeds]
    )
    answers = {
        "row": asked["row"],
        "tokens": torch.cat([asked["tokens"], torch.tensor([one.tokens for one in completions])], dim=1),
        "log_probs": torch.tensor([one.log_probs for one in completions]),
        "version": torch.tensor([one.versions[0][0] for one in completions]),
        "versions": torch.tensor([len(one.versions) for one in completions]),
    }
    return {**answers, "reward": groups.judge.score(answers)}


def to_train_on(groups: Groups, settings: Settings, asked: Rows) -> Rows:
    """Return answers with their advantages."""
    rows = answered(groups, settings, asked)
    return {**rows, "advantage": group_advantages(rows["reward"], settings.group_size)}


def send_weights(
    sync: px.WeightSync, rollout: Any, settings: Settings, threads: ThreadPoolExecutor
) -> Future[Any] | None:
    """Begin to send the actor's weights. Return None if the engines have them already."""
    if settings.at_sync == "keep":  # engines receive between two tokens
        return threads.submit(sync.submit().result)
    rollout.pause("wait")  # engines finish their answers first
    sync()
    rollout.resume()
    return None


def evaluate(groups: Groups, settings: Settings, count: int = 512) -> float:
    """Return the mean reward of a sampled answer to each of ``count`` new questions."""
    random = torch.Generator().manual_seed(settings.seed + 1_000_000)
    questions = {"row": torch.arange(count), "tokens": ask(count, settings.digits, random)}
    return answered(groups, settings, questions)["reward"].mean().item()


class Update(NamedTuple):
    """Result of a rank's update: the sum of its rewards, and its number of rows."""

    reward: float
    rows: list[int]


class Actor(px.Worker):
    """The policy in training: a copy on each rank, kept equal by summing gradients over the ranks."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        torch.manual_seed(settings.seed)
        self.model = small_llama().to(self.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.publish_weights("policy", self.model, step=lambda: steps_of(self.optimizer))
        px.register_state(self, model=self.model, optimizer=self.optimizer)

    @px.register(px.Dispatch.ROWS, collect="list", to_device=True)
    def update(self, answers: Rows, reference: Tensor) -> Update:
        """Take an optimizer step on the answers of all ranks."""
        settings, advantage = self.settings, answers["advantage"][:, None]
        distribution = answer_distribution(self.model, answers["tokens"], settings.digits)
        log_probs = of_answer(distribution, answers["tokens"])

        ratio = (log_probs - answers["log_probs"]).exp()  # to the versions that drew these tokens
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
        return Update(answers["reward"].sum().item(), answers["row"].tolist())

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


def steps_of(optimizer: torch.optim.Optimizer) -> int:
    """Return the number of steps that the optimizer has taken."""
    return next((int(state["step"]) for state in optimizer.state.values()), 0)


@contextmanager
def started(settings: Settings, engines: int, trainers: int, device: str) -> Generator[Groups]:
    """Yield the three groups until the block ends."""
    gpu = wants_gpu(device, engines + trainers)
    with (
        px.ResourcePool([engines + trainers], use_gpu=gpu) as pool,
        px.ResourcePool([1], use_gpu=False) as cpu,
    ):
        roles = px.colocate({"actor": Actor.bind(settings), "reference": Reference.bind(settings)})
        yield Groups(
            rollout=px.WorkerGroup(
                pool[:engines], TransformersRollout.bind(small_llama, weights="policy"), name="rollout"
            ),
            judge=px.WorkerGroup(cpu, Judge, name="judge"),
            trainer=px.WorkerGroup(pool[engines:], roles, name="trainer"),
        )


@dataclass(frozen=True)
class Run:
    """Result: mean reward of each step, rows per second after the first steps, and reward of new questions."""

    rewards: list[float]
    rows_per_second: float
    final: float


def train(
    settings: Settings,
    engines: int,
    trainers: int,
    device: str,
    console: Console,
    report: Path,
    *,
    turns: bool = False,
    saving: Saving = NOT_SAVED,
) -> Run:
    """Start the groups, train, and write the report; ``turns`` trains and generates in turn, and saves nothing."""
    staleness = px.StalenessManager(settings.max_lag, rows_per_version=settings.rows)
    with started(settings, engines, trainers, device) as groups, px.trace() as trace:
        console.print(groups.trainer.explain())
        steps = in_turn(groups, settings) if turns else grpo(groups, settings, staleness, saving)
        rewards, times = [], []
        for reward in shown(steps, settings.steps, console):
            rewards.append(reward)
            times.append(time.perf_counter())
        final = evaluate(groups, settings)
    warm = min(5, (len(times) - 1) // 2)  # what is made on first use is no part of the speed
    speed = settings.rows * (len(times) - 1 - warm) / max(times[-1] - times[warm], 1e-9)
    how = "in turn" if turns else f"at the same time, lag at most {settings.max_lag}"
    title = f"GRPO, {settings.steps} steps, generation and training {how}; engines: {engines}, trainers: {trainers}"
    trace.save(report, title=title, charts={"mean reward of each step": rewards})
    if not turns:
        console.print(staleness.explain())
    return Run(rewards, speed, final)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small Llama to copy digits by asynchronous GRPO.")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--max-lag", type=int, default=Settings.max_lag)
    parser.add_argument("--at-sync", choices=("keep", "wait"), default=Settings.at_sync)
    parser.add_argument("--engines", type=int, default=1, help="processes that generate")
    parser.add_argument("--trainers", type=int, default=1, help="processes that train")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument(
        "--compare", action="store_true", help="train in turn before, and say how much faster this is"
    )
    add_saving(parser)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for curve and report")
    parser.add_argument(
        "--target", type=float, default=0.9, help="final reward below which the exit status is 1"
    )
    return parser.parse_args()


def main() -> int:
    given = arguments()
    console = Console()
    settings = Settings(steps=given.steps, seed=given.seed, max_lag=given.max_lag, at_sync=given.at_sync)
    where = (given.engines, given.trainers, given.device, console)
    turns = (
        train(settings, *where, given.out / "grpo_in_turn_report.html", turns=True) if given.compare else None
    )
    picture, report = given.out / "grpo_async_reward.png", given.out / "grpo_async_report.html"
    saving = Saving(given.save, given.resume, given.save_every)
    run = train(settings, *where, report, saving=saving)
    save_curve(run.rewards, picture)
    console.print(f"reward curve: {picture}")
    console.print(f"what each rank did when: {report} (open it in a browser)")
    console.print(f"rows per second: {run.rows_per_second:.0f}")
    if turns is not None:
        console.print(
            f"in turn: {turns.rows_per_second:.0f} rows per second, final mean reward {turns.final:.2f}; at the same "
            f"time: {run.rows_per_second / turns.rows_per_second:.2f} times as many"
        )
    if run.final < given.target:
        print(
            f"the reward stayed below {given.target}: more --steps may help, or another --seed",
            file=sys.stderr,
        )
    print(f"final mean reward: {run.final:.2f}")
    return 0 if run.final >= given.target else 1


if __name__ == "__main__":
    sys.exit(main())
