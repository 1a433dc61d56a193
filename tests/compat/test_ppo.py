"""A PPO trainer as verl's users write it: four roles in one fused group, DataProto all the way, tiny models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import ray
import torch
from torch.nn import functional

from phalanx.compat.verl import DataProto
from phalanx.compat.verl.protocol import pad_dataproto_to_divisor, unpad_dataproto
from phalanx.compat.verl.single_controller.base import Worker
from phalanx.compat.verl.single_controller.base.decorator import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from phalanx.compat.verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls_fused,
)
from phalanx.compat.verl.utils.py_functional import append_to_dict

VOCABULARY, PROMPT, RESPONSE = 8, 2, 4
OVER_ACTOR = make_nd_compute_dataproto_dispatch_fn(mesh_name="actor")


class Tiny(torch.nn.Module):
    """Reads the last prompt token and the position; ``outputs`` numbers for each response token."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.token = torch.nn.Embedding(VOCABULARY, 32)
        self.place = torch.nn.Embedding(RESPONSE, 32)
        self.head = torch.nn.Linear(32, outputs)

    def forward(self, prompts: torch.Tensor) -> torch.Tensor:
        hidden = self.token(prompts[:, -1]).unsqueeze(1) + self.place.weight
        return self.head(torch.tanh(hidden))


def token_log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits, -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def token_mean(values: torch.Tensor, mask: torch.Tensor) -> float:
    """Over all tokens of the responses, none of them weighted by its row's length."""
    return ((values * mask).sum() / mask.sum()).item()


def average_gradients(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= torch.distributed.get_world_size()


class ActorRolloutWorker(Worker):
    def __init__(self, config: dict[str, Any], role: str) -> None:
        super().__init__()
        self.config, self.role = config, role  # names that verl's own workers use
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        self._register_dispatch_collect_info("actor", dp_rank=self.rank, is_collect=True)

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        torch.manual_seed(0)
        self.model = Tiny(VOCABULARY)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.config["lr"])

    @register(OVER_ACTOR)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        generator = torch.Generator().manual_seed(1000 * prompts.meta_info["step"] + self.rank)
        with torch.no_grad():
            logits = self.model(prompts.batch["prompts"])
            probabilities = torch.softmax(logits, -1).flatten(0, 1)
        tokens = torch.multinomial(probabilities, 1, generator=generator).view(-1, RESPONSE)
        lengths = 1 + prompts.batch["prompts"][:, :1] % RESPONSE
        mask = (torch.arange(RESPONSE) < lengths).long()
        return DataProto.from_dict({"responses": tokens, "response_mask": mask})

    @register(OVER_ACTOR)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        with torch.no_grad():
            logits = self.model(data.batch["prompts"])
        log_probs = token_log_probs(logits, data.batch["responses"])
        if self.role == "ref":
            return DataProto.from_dict({"ref_log_prob": log_probs})
        entropys = torch.distributions.Categorical(logits=logits).entropy()
        return DataProto.from_dict({"old_log_probs": log_probs, "entropys": entropys})

    @register(OVER_ACTOR)
    def update_actor(self, data: DataProto) -> DataProto:
        metrics: dict[str, Any] = {}
        for mini in data.make_iterator(self.config["mini_batch"], epochs=2, seed=self.rank):
            new = token_log_probs(self.model(mini.batch["prompts"]), mini.batch["responses"])
            ratio = torch.exp(new - mini.batch["old_log_probs"])
            advantages = mini.batch["advantages"]
            clipped = ratio.clamp(0.8, 1.2) * advantages
            loss = -torch.minimum(ratio * advantages, clipped)[mini.batch["response_mask"].bool()].mean()
            self.optimizer.zero_grad()
            loss.backward()
            average_gradients(self.model)
            self.optimizer.step()
            append_to_dict(metrics, {"actor/pg_loss": loss.item(), "actor/ratio": ratio.mean().item()})
        return DataProto(meta_info={"metrics": metrics})

    @register(Dispatch.ONE_TO_ALL)
    def weights(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()


class CriticWorker(Worker):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        place = self.get_fused_worker_by_name("actor").get_dispatch_collect()
        self.set_dispatch_collect("actor", **place)
        self.model = Tiny(1)
        torch.distributed.broadcast(self.model.head.weight.data, 0)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.config["lr"])

    @register(OVER_ACTOR)
    def compute_values(self, data: DataProto) -> DataProto:
        with torch.no_grad():
            return DataProto.from_dict({"values": self.model(data.batch["prompts"]).squeeze(-1)})

    @register(OVER_ACTOR)
    def update_critic(self, data: DataProto) -> DataProto:
        values = self.model(data.batch["prompts"]).squeeze(-1)
        loss = functional.mse_loss(values, data.batch["returns"])
        self.optimizer.zero_grad()
        loss.backward()
        average_gradients(self.model)
        self.optimizer.step()
        return DataProto(meta_info={"metrics": {"critic/vf_loss": [loss.item()]}})


class RewardWorker(Worker):
    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        wanted = data.batch["prompts"][:, -1:]
        right = (data.batch["responses"] == wanted).float()
        return DataProto.from_dict({"rm_scores": right}, {"grade": np.array(right.mean(1).tolist(), object)})


class Trainer:
    """One PPO step, as the driver writes it."""

    def __init__(self) -> None:
        config = {"lr": 2e-2, "mini_batch": 16}
        roles = {
            "actor": RayClassWithInitArgs(ray.remote(ActorRolloutWorker), config, "actor"),
            "ref": RayClassWithInitArgs(ray.remote(ActorRolloutWorker), config, "ref"),
            "critic": RayClassWithInitArgs(ray.remote(CriticWorker), config),
            "rm": RayClassWithInitArgs(ray.remote(RewardWorker)),
        }
        pool = RayResourcePool([2], use_gpu=False)
        self.group = RayWorkerGroup(pool, create_colocated_worker_cls_fused(roles), name_prefix="ppo")
        self.group.fuse(roles)
        for role in ("actor", "ref", "critic"):
            getattr(self.group, role).init_model()
        self.initial = self.group.ref.weights()[0]

    def step(self, step: int) -> tuple[DataProto, dict[str, float]]:
        random = torch.Generator().manual_seed(step)
        prompts = torch.randint(0, VOCABULARY, (64, PROMPT), generator=random)
        uids = np.array([f"prompt {step}/{i}" for i in range(64)], dtype=object)
        batch = DataProto.from_dict({"prompts": prompts}, {"uid": uids}, meta_info={"step": step})
        group = self.group

        batch = batch.union(group.actor.generate_sequences(batch))
        batch = batch.union(group.actor.compute_log_prob(batch))
        batch = batch.union(group.ref.compute_log_prob(batch))
        batch = batch.union(group.critic.compute_values(batch))
        batch = batch.union(group.rm.compute_rm_score(batch))

        kl = batch.batch["old_log_probs"] - batch.batch["ref_log_prob"]
        rewards = batch.batch["rm_scores"] - 0.001 * kl
        batch.batch["returns"] = rewards  # each token is graded by itself
        batch.batch["advantages"] = rewards - batch.batch["values"]
        mask = batch.batch["response_mask"]
        metrics = {
            "reward": token_mean(batch.batch["rm_scores"], mask),
            "kl": token_mean(kl, mask),
            "actor/entropy": token_mean(batch.batch.pop("entropys"), mask),
        }
        for output in (group.critic.update_critic(batch), group.actor.update_actor(batch)):
            for name, values in output.meta_info["metrics"].items():
                metrics[name] = float(
                    np.mean(np.concatenate([np.ravel(value) for value in np.atleast_1d(values)]))
                )
        return batch, metrics


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_ppo_trainer_learns(ray_cluster: None) -> None:
    trainer = Trainer()

    history = [trainer.step(step) for step in range(20)]

    first, last = history[0], history[-1]
    assert first[1]["reward"] < 0.35
    assert last[1]["reward"] > 0.8
    assert {"actor/pg_loss", "actor/ratio", "actor/entropy", "critic/vf_loss", "kl", "reward"} == set(last[1])
    assert last[1]["actor/entropy"] < first[1]["actor/entropy"] - 0.5
    assert len(last[0]) == 64
    assert last[0].non_tensor_batch["uid"][3] == "prompt 19/3"
    assert last[0].batch["old_log_probs"].shape == (64, RESPONSE)

    now = trainer.group.ref.weights()[0]
    assert all(torch.equal(now[name], value) for name, value in trainer.initial.items())
    [one, other] = trainer.group.actor.weights()
    assert all(torch.equal(one[name], other[name]) for name in one)

    odd, added = pad_dataproto_to_divisor(last[0].slice(0, 5), 2)
    values = unpad_dataproto(trainer.group.critic.compute_values(odd), added)
    assert len(values) == 5
