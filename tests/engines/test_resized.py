"""Engines join a group and leave it: those that join have the weights of the others before they answer."""

from __future__ import annotations

import phalanx as px
from phalanx.engines import SamplingParams
from phalanx.engines.transformers import TransformersRollout
from tests.conformance.engines import Reference, Source
from tests.engines.test_transformers import THREADS, small_llama

SOAK_ON_RAY = True


def test_engines_that_join_answer_with_the_weights_of_the_last_sync(backend: str) -> None:
    with px.ResourcePool([1], use_gpu=False) as one, px.ResourcePool([2], use_gpu=False) as two:
        source = px.WorkerGroup(one, Source.bind(small_llama()))
        rollout = px.WorkerGroup(two, TransformersRollout.bind(small_llama, weights="policy"), env=THREADS)
        reference = Reference(small_llama())
        px.resize(rollout, 1)
        with px.WeightSync(source, rollout, "policy") as sync:
            (state,) = source.change(3)
            reference.model.load_state_dict(state)
            sync()
            px.resize(rollout, 2)

            made = rollout.generate(reference.prompts, SamplingParams(max_tokens=8, temperature=0))

    assert [one.tokens for one in made] == [reference.generate(prompt, 8) for prompt in reference.prompts]
    assert len({version for one in made for version in one.versions}) == 1
