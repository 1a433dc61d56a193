"""Trainers of which a rank dies in a step, at a given operation of torch."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import phalanx as px
from phalanx.parallel.module_rejoining import declare_instead, keep_tensors
from phalanx.parallel.torch_native import DeviceMeshWorker

HIDDEN, VOCABULARY = 32, 64


class Operations(TorchDispatchMode):
    """Counts operations of torch, and kills the process at operation ``last``."""

    def __init__(self, last: int | None) -> None:
        super().__init__()
        self.count = 0
        self._last = last

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count += 1
        if self.count == self._last:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **(kwargs or {}))


class Fragile(px.Worker):
    """A trainer whose steps return their number of operations. It dies at operation ``last``."""

    last: int | None = None

    @px.register(px.Dispatch.ONE_TO_ALL)
    def arm(self, rank: int, last: int) -> None:
        self.last = last if rank == self.rank else None

    @px.register(px.Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @px.register(px.Dispatch.ONE_TO_ALL)
    def step(self, number: int) -> tuple[float, int]:
        with Operations(self.last) as operations:
            loss = self.train(torch.randint(VOCABULARY, (2, 8)))
        return loss, operations.count

    def train(self, ids: torch.Tensor) -> float:
        raise NotImplementedError


def losses(group: px.WorkerGroup, number: int) -> list[float]:
    """Train a step, and return the loss of each rank."""
    return [loss for loss, _ in group.step(number)]


class Replicated(Fragile):
    """The same model on all ranks; each gradient is summed over the ranks."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Embedding(VOCABULARY, HIDDEN), torch.nn.Dropout(0.1), torch.nn.Linear(HIDDEN, VOCABULARY)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        px.register_state(self, model=self.model, optimizer=self.optimizer)
        torch.manual_seed(self.rank)

    def train(self, ids: torch.Tensor) -> float:
        logits = self.model(ids[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


class Sharded(Fragile, DeviceMeshWorker):
    """FSDP2 over all ranks, with a clipped gradient and the mean loss of the ranks."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = self.sharded(tiny_llama())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        px.register_state(self, model=self.model, optimizer=self.optimizer)
        torch.manual_seed(self.rank)

    def rejoin(self) -> None:
        with torch.device("meta"):
            made = tiny_llama()
        keep_tensors(self.sharded(made), self.model, self.optimizer)
        declare_instead(self, self.model, made)
        self.model = made

    def sharded(self, model: Any) -> Any:
        mesh = self.init_mesh(dp=-1)
        for layer in model.get_decoder().layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def train(self, ids: torch.Tensor) -> float:
        logits = self.model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = loss.detach() / self.world_size
        dist.all_reduce(mean)
        return mean.item()


def tiny_llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)
