"""A rollout for machines without accelerators, by verl's own registries: `rollout.name=hf`.

A Ray actor per replica has the model and generates token by token with transformers; the actor's ranks send weights at
each update, as to a serving engine. Sampling is seeded by the prompt and by the number of its requests since the
update, so that two runs of a trainer see the same sequences in any order of requests.
"""

from __future__ import annotations

import asyncio
import os
import zlib
from typing import Any

import ray
import torch
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

END = 2


def server_name(replica: int) -> str:
    return f"hf_server_{replica}_0"


class HfServer:
    """The model of one replica."""

    def __init__(self, path: str, response_length: int) -> None:
        from transformers import AutoModelForCausalLM  # in the server's process only

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.response_length = response_length
        self.asked: dict[tuple[int, ...], int] = {}
        self.version: int | None = 0

    def load(self, weights: dict[str, torch.Tensor], global_steps: int | None) -> int:
        found = self.model.load_state_dict(
            {name: held.float() for name, held in weights.items()}, strict=False
        )
        if found.missing_keys or found.unexpected_keys:
            raise ValueError(f"the weights do not fit the model: {found}")
        self.asked, self.version = {}, global_steps
        return len(weights)

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        key = tuple(prompt_ids)
        turn = self.asked[key] = self.asked.get(key, -1) + 1
        generator = torch.Generator().manual_seed(zlib.crc32(repr((key, turn, self.version)).encode()))
        greedy = not sampling_params.get("temperature")
        limit = sampling_params.get("max_tokens") or self.response_length
        tokens, probabilities = self._sample(list(prompt_ids), limit, greedy, generator)
        return TokenOutput(
            token_ids=tokens,
            log_probs=probabilities,
            stop_reason="completed",
            extra_fields={"global_steps": self.version},
        )

    @torch.no_grad()
    def _sample(
        self, prompt: list[int], limit: int, greedy: bool, generator: torch.Generator
    ) -> tuple[list[int], list[float]]:
        ids, past, tokens, probabilities = torch.tensor([prompt]), None, [], []
        while len(tokens) < limit and (not tokens or tokens[-1] != END):
            out = self.model(ids, past_key_values=past, use_cache=True)
            past = out.past_key_values
            log = torch.log_softmax(out.logits[0, -1].float(), -1)
            tokens.append(
                int(log.argmax() if greedy else torch.multinomial(log.exp(), 1, generator=generator))
            )
            probabilities.append(float(log[tokens[-1]]))
            ids = torch.tensor([tokens[-1:]])
        return tokens, probabilities

    async def _nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    wake_up = sleep = abort_all_requests = resume_generation = clear_kv_cache = _nothing
    release_kv_cache = resume_kv_cache = start_profile = stop_profile = _nothing


class HfAdapter(BaseRollout):
    """The part in each rank of the actor, which sends the weights to the server of its replica."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        rank, size = int(os.environ["RANK"]), self.config.tensor_model_parallel_size
        self.replica_rank = rank // size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % size == 0

    async def resume(self, tags: Any) -> None:
        pass

    async def release(self) -> None:
        pass

    async def update_weights(self, weights: Any, global_steps: int | None = None, **kwargs: Any) -> None:
        if hasattr(weights, "__aiter__"):
            held = {name: tensor.detach().cpu() async for name, tensor in weights}
        else:
            held = {name: tensor.detach().cpu() for name, tensor in weights}
        if self.is_leader_rank:
            await ray.get_actor(server_name(self.replica_rank)).load.remote(held, global_steps)


class HfReplica(RolloutReplica):
    """A replica, whose server is placed on the node of its first worker."""

    async def launch_servers(self) -> None:
        nodes = await asyncio.gather(
            *[
                worker.__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id())
                for worker in self.workers
            ]
        )
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(nodes[0], soft=False)
        placed = ray.remote(HfServer).options(
            name=server_name(self.replica_rank), num_cpus=1, scheduling_strategy=strategy
        )
        path = self.model_config.path if hasattr(self.model_config, "path") else self.model_config["path"]
        self.servers = [placed.remote(path, self.config.response_length)]
        self._server_handle = self.servers[0]
        self._server_address = f"hf-{self.replica_rank}"


_ROLLOUT_REGISTRY[("hf", "async")] = "hf_rollout.HfAdapter"
RolloutReplicaRegistry.register("hf", lambda: HfReplica)
