"""Tests that every engine passes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import phalanx as px
from phalanx.engines import Completion, SamplingParams, Tokens

__all__ = ["GREEDY", "PROMPTS", "EngineConformance", "Reference", "Source"]

LENGTH = 12
GREEDY = SamplingParams(max_tokens=LENGTH, temperature=0)
PROMPTS = [[5, 9], [*range(2, 58, 4)], [*range(40, 45)], [*range(63, 54, -1)], [7, 3, 61]]
_CLOSE = 1e-4


class Source(px.Worker):
    """A worker that publishes a model, whose weights it changes on request."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.publish_weights("policy", model)

    @px.register
    def change(self, seed: int) -> dict[str, Any]:
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 0.1 * parameter.std() * torch.randn(parameter.shape, generator=random)
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


class Reference:
    """Expected answers of an engine: those of transformers with the same weights."""

    def __init__(self, model: Any) -> None:
        self.model = copy.deepcopy(model).eval()

    def generate(self, prompt: Sequence[int], count: int) -> tuple[int, ...]:
        """Return the ``count`` tokens that transformers generates greedily."""
        ids = torch.tensor([list(prompt)])
        made = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
        return tuple(made[0, len(prompt) :].tolist())

    @torch.no_grad()
    def log_probs(self, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """Return the log-probability of each token after the prompt, from one forward pass."""
        ids = torch.tensor([[*prompt, *tokens]])
        found = self.model(ids).logits[0, :-1].log_softmax(dim=-1).gather(1, ids[0, 1:, None])[:, 0]
        return found[len(prompt) - 1 :]

    def check_log_probs(self, made: Sequence[Completion]) -> None:
        """Compare the log-probabilities of answers to the prompts."""
        for prompt, one in zip(PROMPTS, made, strict=True):
            expected = self.log_probs(prompt, one.tokens)
            assert torch.allclose(torch.tensor(one.log_probs), expected, rtol=0, atol=_CLOSE)

    def check_greedy(self, made: Sequence[Completion]) -> None:
        """Compare ``LENGTH`` greedy tokens of each answer, and their log-probabilities."""
        assert [one.tokens for one in made] == [self.generate(prompt, LENGTH) for prompt in PROMPTS]
        assert [(one.finish_reason, one.error) for one in made] == [("length", None)] * len(made)
        self.check_log_probs(made)


def _all_tokens(items: Sequence[Tokens]) -> tuple[int, ...]:
    return tuple(token for item in items for token in item.tokens)


class EngineConformance:
    """Behavior of an engine; a subclass provides the engine.

        class TestMyEngine(EngineConformance):
            @pytest.fixture(scope="class")
            def model(self):
                return LlamaForCausalLM(config)              # the same weights as the engine's

            @pytest.fixture(scope="class")
            def rollout(self, model):
                with px.ResourcePool([2], use_gpu=False) as pool:
                    yield px.WorkerGroup(pool, MyEngine.bind("path/of/model", weights="policy"))

    The engine accepts weights named "policy", computes in float32, draws at temperatures 0 and 1, has a context and a
    vocabulary of 64 tokens or more, and no end token. One group is started for all tests of the class, and updated by
    some of them.
    """

    @pytest.fixture(scope="class")
    def reference(self, model: Any) -> Reference:
        return Reference(model)

    @pytest.fixture(scope="class")
    def source(self, model: Any, rollout: Any) -> Iterator[Any]:
        with px.ResourcePool([1], use_gpu=False, backend=rollout.pool.backend) as pool:
            yield px.WorkerGroup(pool, Source.bind(copy.deepcopy(model)), name="source")

    @pytest.fixture(scope="class")
    def sync(self, source: Any, rollout: Any) -> Iterator[px.WeightSync]:
        with px.WeightSync(source, rollout, "policy") as made:
            yield made

    def test_log_probabilities_of_sampled_tokens_are_those_of_the_model(
        self, rollout: Any, reference: Reference
    ) -> None:
        reference.check_log_probs(rollout.generate(PROMPTS, SamplingParams(max_tokens=LENGTH)))

    def test_greedy_tokens_and_versions_are_those_of_the_weights_before_and_after_each_sync(
        self, rollout: Any, reference: Reference, source: Any, sync: px.WeightSync
    ) -> None:
        reference.check_greedy(rollout.generate(PROMPTS, GREEDY))
        for seed in range(3):
            (state,) = source.change(seed)
            reference.model.load_state_dict(state)
            version = sync()
            made = rollout.generate(PROMPTS, GREEDY)

            reference.check_greedy(made)
            assert [one.versions for one in made] == [((version.number, LENGTH),)] * len(made)

    def test_tokens_of_an_answer_have_the_weight_versions_before_and_after_a_sync(
        self, rollout: Any, reference: Reference, source: Any, sync: px.WeightSync
    ) -> None:
        prompt = PROMPTS[0]
        length = min(rollout.capabilities().context - len(prompt), 64)
        for seed in range(77, 97):  # until a sync comes before the end of the answer
            before = sync().number
            sampling = SamplingParams(max_tokens=length, temperature=0)
            with rollout.any.generate_tokens.stream([prompt], sampling, buffer=1) as items:
                seen = [next(items)]
                rollout.pause("keep")
                (state,) = source.change(seed)
                after = sync().number
                rollout.resume()
                seen += list(items)
            tokens = _all_tokens(seen)
            old = sum(len(item.tokens) for item in seen if item.version == before)
            assert len(tokens) == length
            assert old > 0
            assert {item.version for item in seen} <= {before, after}
            if old < length:
                break
        else:
            pytest.fail("each of 20 answers was at its end before the first of its tokens was read")
        reference.model.load_state_dict(state)

        new = tokens[old : old + LENGTH]
        assert new == reference.generate([*prompt, *tokens[:old]], len(new))[: len(new)]

    def test_a_prompt_that_is_too_long_is_an_error_of_its_row(
        self, rollout: Any, reference: Reference
    ) -> None:
        context = rollout.capabilities().context
        long, short = rollout.generate([[2] * (context + 1), PROMPTS[0]], SamplingParams(max_tokens=2))

        assert long.finish_reason == "error"
        assert str(context) in str(long.error)
        assert long.tokens == ()
        assert short.error is None
        assert len(short.tokens) == 2

    def test_each_row_has_its_own_sampling_parameters_and_can_be_streamed(self, rollout: Any) -> None:
        """A stream yields rows with their index in the call."""
        samplings = [SamplingParams(max_tokens=row + 1) for row in range(len(PROMPTS))]

        made = rollout.generate(PROMPTS, samplings)
        rows = dict(rollout.generate_rows.stream(PROMPTS, samplings, by="rows"))

        assert [len(one.tokens) for one in made] == [1, 2, 3, 4, 5]
        assert {row: len(one.tokens) for row, one in rows.items()} == {0: 1, 1: 2, 2: 3, 3: 4, 4: 5}

    def test_a_stop_sequence_ends_an_answer_and_stays_in_it(self, rollout: Any) -> None:
        prompt = PROMPTS[0]
        (whole,) = rollout.generate([prompt], GREEDY)
        pair = whole.tokens[2:4]
        first = next(i for i in range(1, LENGTH) if whole.tokens[i - 1 : i + 1] == pair)

        (made,) = rollout.generate([prompt], replace(GREEDY, stop=(pair,)))

        assert (made.tokens, made.finish_reason) == (whole.tokens[: first + 1], "stop")

    def test_several_answers_to_a_prompt_are_returned_as_one_row(self, rollout: Any) -> None:
        made = rollout.generate(PROMPTS[:2], SamplingParams(max_tokens=LENGTH, n=3))

        assert [len(one.all) for one in made] == [3, 3]
        assert len({one.tokens for one in made[0].all}) > 1

    def test_log_probabilities_can_be_left_out_and_an_empty_list_of_prompts_has_no_answers(
        self, rollout: Any
    ) -> None:
        (made,) = rollout.generate(PROMPTS[:1], SamplingParams(max_tokens=2, log_probs=None))

        assert len(made.tokens) == 2
        assert made.log_probs == ()
        assert rollout.generate([], SamplingParams()) == []

    def test_a_row_with_a_seed_has_the_same_tokens_alone_in_a_batch_and_after_a_prefix(
        self, rollout: Any
    ) -> None:
        if not rollout.capabilities().seeds:
            pytest.skip("this engine has no seeds of rows")
        sampling = SamplingParams(max_tokens=LENGTH, seed=5).each(len(PROMPTS))
        made = rollout.generate(PROMPTS, sampling)

        alone = [rollout.generate([prompt], [one])[0] for prompt, one in zip(PROMPTS, sampling, strict=True)]

        (last,) = rollout.generate(PROMPTS[-1:], sampling[-1:], prefix=[made[-1].tokens[:4]])

        assert [one.tokens for one in alone] == [one.tokens for one in made]
        assert last.tokens == made[-1].tokens
        assert [version for version, _ in last.versions] == [-1, made[-1].version]

    def test_an_aborted_answer_continues_from_its_prefix(self, rollout: Any) -> None:
        prompt = PROMPTS[1]
        (whole,) = rollout.generate([prompt], GREEDY)
        with rollout.any.generate_tokens.stream([prompt], GREEDY, ids=["mine"], buffer=1) as items:
            seen = [next(items)]
            rollout.abort(["mine"])
            seen += list(items)
        tokens = _all_tokens(seen)
        part = Completion(tokens, (-1.0,) * len(tokens), "abort", ((seen[-1].version, len(tokens)),))

        (made,) = rollout.generate([prompt], GREEDY, prefix=[part])

        assert seen[-1].finish_reason in ("abort", "length")
        assert made.tokens == whole.tokens
        assert made.finish_reason == "length"
        assert sum(count for _, count in made.versions) == LENGTH

    def test_a_pause_with_abort_returns_partial_answers_and_the_engine_resumes(self, rollout: Any) -> None:
        for _ in range(20):  # until a pause comes before the end of the answer
            with rollout.any.generate_tokens.stream(
                PROMPTS[:1], SamplingParams(max_tokens=40), buffer=1
            ) as items:
                seen = [next(items)]
                rollout.pause("abort")
                seen += list(items)
            rollout.resume()
            if len(_all_tokens(seen)) < 40:
                break

        assert seen[-1].finish_reason == "abort"
        assert len(rollout.generate(PROMPTS[:1], SamplingParams(max_tokens=3))[0].tokens) == 3

    def test_a_pause_with_wait_lets_running_answers_finish(self, rollout: Any) -> None:
        with rollout.any.generate_tokens.stream(PROMPTS[:1], SamplingParams(max_tokens=LENGTH)) as items:
            seen = [next(items)]
            rollout.pause("wait")
            seen += list(items)
        rollout.resume()

        assert (len(_all_tokens(seen)), seen[-1].finish_reason) == (LENGTH, "length")

    @pytest.mark.filterwarnings("ignore:.*does nothing")
    def test_sleep_and_wake_leave_a_working_engine(self, rollout: Any) -> None:
        """An engine that does not support sleep ignores it."""
        rollout.sleep(["kv_cache"])
        rollout.wake(["kv_cache"])
        rollout.reset_cache()

        assert len(rollout.generate(PROMPTS[:1], SamplingParams(max_tokens=3))[0].tokens) == 3

    def test_statistics_count_tokens_and_requests(self, rollout: Any) -> None:
        before = rollout.engine_statistics()
        rollout.generate(PROMPTS, SamplingParams(max_tokens=4))
        after = rollout.engine_statistics()

        count = len(PROMPTS)
        assert sum(one.tokens for one in after) - sum(one.tokens for one in before) == 4 * count
        assert sum(one.requests for one in after) - sum(one.requests for one in before) == count
        assert all(one.running == 0 for one in after)
