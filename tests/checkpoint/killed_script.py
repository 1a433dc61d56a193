"""A driver that trains two ranks on their own samples, saves each step, and prints its reward."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist

import phalanx as px

STEPS = 12
SAMPLES = 8
TOLD = "told: "


class Actor(px.Worker):
    """Approaches a target known only by the rewards of samples. ``ballast`` makes its state larger."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        torch.manual_seed(7)
        self.model = torch.nn.Linear(64, 4)
        self.ballast = torch.nn.Linear(1024, 1024)
        self.optimizer = torch.optim.Adam([*self.model.parameters(), *self.ballast.parameters()], lr=0.05)
        torch.manual_seed(100 + self.rank)
        px.register_state(
            self,
            model=torch.nn.ModuleDict({"model": self.model, "ballast": self.ballast}),
            optimizer=self.optimizer,
        )

    @px.register(px.Dispatch.ROWS)
    def train(self, questions: torch.Tensor) -> torch.Tensor:
        means = self.model(questions)
        actions = means.detach() + torch.randn(means.shape)
        rewards = -(actions - questions[:, :4]).square().sum(dim=1)
        gain = (rewards - rewards.mean())[:, None] * -(actions - means).square()
        idle = 1e-6 * self.ballast.weight.square().mean()
        self.optimizer.zero_grad()
        (idle - gain.mean()).backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        return rewards


def tell(what: object) -> None:
    """Print a value with a prefix that separates it from Ray's output."""
    print(TOLD + json.dumps(what), flush=True)


def main(address: str, path: str) -> None:
    """Print the pids of the ranks, then ``[step, rewards]`` after each step, from the last complete step on."""
    px.init(backend="ray", address=address, log_to_driver=False)
    state = {"questions": torch.Generator().manual_seed(3), "rewards": []}
    with px.ResourcePool([2], use_gpu=False, name_prefix=f"driver-{os.getpid()}") as pool:
        actor = px.WorkerGroup(pool, Actor)
        with px.checkpoint.CheckpointManager(path, {"actor": actor}, state=state, keep=2) as run:
            first = (run.resume() or 0) + 1
            tell(actor.run(lambda _: os.getpid()))
            for step in range(first, STEPS + 1):
                rewards = actor.train(torch.randn(SAMPLES, 64, generator=state["questions"]))
                state["rewards"].append(rewards.mean().item())
                tell([step, state["rewards"]])
                if step % 2:
                    run.save(step)
                else:
                    run.save.submit(step)
    tell("over")


if __name__ == "__main__":
    main(*sys.argv[1:])
