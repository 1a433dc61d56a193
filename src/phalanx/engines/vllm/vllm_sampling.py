"""Sampling by vLLM: its parameters for an answer, seeded samples, and its outputs as sampled tokens.

vLLM gives a request with a seed a generator of its own, so an interrupted answer would get other tokens when it is
continued. Therefore rows with a seed are sampled by a logits processor, with random number i of the seed for token i.
The processor leaves vLLM a single token to choose; log-probabilities are computed before. vLLM imports it from this
module in its workers, as ``SeededProcessor``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from phalanx.engines.engine_requests import Answer, SampledToken
from phalanx.engines.token_sampling import keep_top_p, random_stream, sample_by_numbers
from phalanx.engines.vllm.vllm_imports import find
from phalanx.engines.vocabulary import Vocabulary

PROCESSOR = f"{__name__}:SeededProcessor"

_EXTRA = "phalanx_seed"
"""Key of ``SamplingParams.extra_args``: (seed, sample, number of earlier tokens)."""
_MASK = (1 << 64) - 1


def token_prompt(tokens: Sequence[int]) -> dict[str, Any]:
    """Return tokens as a prompt of vLLM."""
    return {"type": "token", "prompt_token_ids": list(tokens), "arrival_time": time.time()}


class VllmSampling:
    """Factory of vLLM's sampling parameters.

    Args:
        vocabulary: vocabulary of the engine.
        seeds: whether all rows are sampled by seeds; else rows without a seed share vLLM's generator, which is faster.
    """

    def __init__(self, vocabulary: Vocabulary, *, seeds: bool) -> None:
        self._vocabulary, self._seeds = vocabulary, seeds
        self._params = find("vllm.sampling_params.SamplingParams")
        self._delta = find("vllm.sampling_params.RequestOutputKind").DELTA

    def for_answer(self, answer: Answer) -> Any:
        """Return the parameters for the remaining tokens of an answer. vLLM raises an error if it rejects them."""
        sampling, count = answer.sampling, len(answer.tokens)
        is_seeded = (self._seeds or sampling.seed is not None) and sampling.temperature > 0
        seed = (answer.seed & _MASK, answer.sample, count) if is_seeded else None
        limit = math.inf if self._vocabulary.size is None else self._vocabulary.size
        ends = {stop for stop in sampling.stop if isinstance(stop, int)}
        ends |= frozenset[int]() if sampling.ignore_eos else self._vocabulary.end
        return self._params(
            max_tokens=sampling.max_tokens - count,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            logprobs=sampling.log_probs,
            stop_token_ids=sorted(end for end in ends if 0 <= end < limit) or None,  # vLLM refuses others
            ignore_eos=True,  # end tokens are among the stops
            extra_args=None if seed is None else {_EXTRA: seed},
            detokenize=False,
            output_kind=self._delta,
        )


def sampled_tokens(answer: Answer, output: Any, version: int) -> Iterable[SampledToken]:
    """Yield the tokens of an output of vLLM, sampled by weights of ``version``; the last token has the end, if any."""
    count = answer.sampling.log_probs or 0
    end = output.finish_reason if output.finish_reason in (None, "stop", "length") else "abort"
    if end is not None and not output.token_ids:
        yield SampledToken(answer, None, finish=end, version=version)
    for index, token in enumerate(output.token_ids):
        finish = end if index == len(output.token_ids) - 1 else None
        if output.logprobs is None:
            yield SampledToken(answer, token, finish=finish, version=version)
            continue
        log_probs: dict[int, Any] = output.logprobs[index]
        likeliest = sorted(log_probs.items(), key=lambda pair: pair[1].rank)[:count]
        top = {other: entry.logprob for other, entry in likeliest} or None
        yield SampledToken(answer, token, log_probs[token].logprob, top, finish, version)


def _processor() -> Any:
    base = find("vllm.v1.sample.logits_processor.LogitsProcessor")
    update = find("vllm.v1.sample.logits_processor.process_dict_updates")

    class SeededProcessor(base):
        def __init__(self, vllm_config: object, device: object, is_pin_memory: bool) -> None:
            self.rows: dict[int, tuple[int, int, int, float, list[int]]] = {}

        def is_argmax_invariant(self) -> bool:
            return True  # greedy tokens are chosen before, and all rows here have a temperature

        def update_state(self, batch_update: Any) -> None:
            update(self.rows, batch_update, self._row)

        @staticmethod
        def _row(params: Any, _: object, tokens: list[int]) -> Any:
            seed = (params.extra_args or {}).get(_EXTRA)
            return None if seed is None else (*seed, params.top_p, tokens)

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            if self.rows:
                rows = list(self.rows)
                tokens = self._sample(logits[rows])
                logits[rows] = float("-inf")
                logits[rows, tokens] = 0.0
            return logits

        def _sample(self, logits: torch.Tensor) -> torch.Tensor:
            weights = logits.double().softmax(dim=-1)
            seeds, samples, earlier, top_p, tokens = zip(*self.rows.values(), strict=True)
            if min(top_p) < 1:
                weights = keep_top_p(weights, torch.tensor(top_p, dtype=weights.dtype, device=weights.device))
            streams = list(map(random_stream, seeds, samples))
            positions = [count + len(new) for count, new in zip(earlier, tokens, strict=True)]
            return sample_by_numbers(weights, streams, positions)

    return SeededProcessor


def __getattr__(name: str) -> Any:
    """Create ``SeededProcessor`` on first use: its base class is vLLM's."""
    if name != "SeededProcessor":
        raise AttributeError(name)
    processor = globals()[name] = _processor()
    return processor
