"""What an engine computes is compared with what the source of its weights computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import phalanx as px
from phalanx.engines.transformers import TransformersRollout


def llama(theta: float = 1e4) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.5,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    return LlamaForCausalLM(config).train()


class Source(px.Worker):
    """Publishes a model as it is, as a mapping of tensors, or with a function that gives log-probabilities."""

    def __init__(self, how: str = "module", theta: float = 1e4) -> None:
        self.model = llama(theta)
        state = dict(self.model.state_dict())
        if how == "module":
            self.publish_weights("policy", self.model)
        elif how == "mapping":
            self.publish_weights("policy", state)
        else:
            self.publish_weights("policy", state, log_probs=self.log_probs)

    @torch.no_grad()
    def log_probs(self, prompts: Any) -> list[list[float]]:
        found = []
        for prompt in prompts:
            ids = torch.tensor([list(prompt)])
            logits = self.model(ids).logits[0, :-1].log_softmax(dim=-1)
            found.append(logits.gather(1, ids[0, 1:, None])[:, 0].tolist())
        return found

    @px.register
    def trains(self) -> bool:
        return self.model.training


def linked(pool: px.ResourcePool, *source: Any, **options: Any) -> px.WeightSync:
    rollout = px.WorkerGroup(pool, TransformersRollout.bind(llama, weights="policy"))
    return px.WeightSync(px.WorkerGroup(pool, Source.bind(*source)), rollout, "policy", **options)


@pytest.fixture
def pool() -> Any:
    with px.ResourcePool([1], use_gpu=False, backend="inline", max_colocate_count=6) as made:
        yield made


def test_the_first_version_is_compared_and_those_that_are_verified_in_full(pool: px.ResourcePool) -> None:
    sync = linked(pool)
    first, second = sync(), sync()
    third = linked(pool)(verify="full")
    off = linked(pool)(verify="off")

    assert first.probe is not None and first.probe.largest < 1e-4 and first.probe.tokens == 60
    assert second.probe is None
    assert third.probe is not None
    assert off.probe is None


def test_the_source_trains_on_as_it_did(pool: px.ResourcePool) -> None:
    source = px.WorkerGroup(pool, Source)
    rollout = px.WorkerGroup(pool, TransformersRollout.bind(llama, weights="policy"))
    px.WeightSync(source, rollout, "policy")()

    assert source.trains() == [True]


def test_an_engine_that_computes_something_else_is_an_error(pool: px.ResourcePool) -> None:
    sync = linked(pool, "module", 10.0)

    with pytest.raises(px.WeightsDiffer, match=r"computes something else.*differ by"):
        sync()


@pytest.mark.parametrize("probe", [False, 100.0])
def test_what_is_allowed_to_differ_may(pool: px.ResourcePool, probe: float) -> None:
    version = linked(pool, "module", 10.0, probe=probe)()

    assert (version.probe is None) == (probe is False)


def test_a_source_without_a_forward_is_told_once(pool: px.ResourcePool) -> None:
    sync = linked(pool, "mapping")
    with pytest.warns(RuntimeWarning, match=r"not compared.*which has no forward.*log_probs=") as told:
        version = sync()
    sync(verify="full")

    assert version.probe is None
    assert len(told) == 1


def test_a_source_may_say_how_it_is_asked(pool: px.ResourcePool) -> None:
    version = linked(pool, "function")()

    assert version.probe is not None and version.probe.largest < 1e-4


def test_a_probe_that_is_none_is_refused(pool: px.ResourcePool) -> None:
    with pytest.raises(px.DeclarationError, match="probe=-1"):
        linked(pool, probe=-1)


class Sleeper(TransformersRollout):
    """An engine whose memory may be given back."""

    def __init__(self) -> None:
        super().__init__(llama, weights="policy")
        self._machine.capabilities = replace(self._machine.capabilities, sleep=True)


def test_an_engine_that_sleeps_is_compared_once_it_is_awake(pool: px.ResourcePool) -> None:
    source, rollout = px.WorkerGroup(pool, Source), px.WorkerGroup(pool, Sleeper)
    sync = px.WeightSync(source, rollout, "policy")
    rollout.sleep()
    asleep = sync()
    rollout.wake()

    assert asleep.probe is None
    assert sync().probe is not None
