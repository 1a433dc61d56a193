"""Sampling by vLLM: its parameters for an answer, seeded samples, and its outputs as sampled tokens.

vLLM gives a request with a seed a generator of its own, so an interrupted answer would get other tokens when it is
continued. Therefore rows with a seed are sampled by a logits processor, with random number i of the seed for token i.
The processor leaves vLLM a single token to choose; log-probabilities are computed before. vLLM imports it from this
module in its workers, as ``SeededProcessor``.
"""

from __future__ import annotations

from collections.abc import Iterable
from pkgutil import resolve_name
from typing import Any

import torch

from phalanx.engines.engine_requests import Answer, SampledToken
from phalanx.engines.token_sampling import sample_randomly

PROCESSOR = f"{__name__}:SeededProcessor"

_EXTRA = "phalanx_seed"
"""Key of ``SamplingParams.extra_args``: (seed, sample, number of earlier tokens)."""


def sampling_params(answer: Answer, *, seeds: bool) -> Any:
    """Return vLLM's parameters for the remaining tokens of an answer. vLLM raises an error if it rejects them.

    Args:
        seeds: whether rows without a seed are sampled by seeds, too; else they share vLLM's generator, which is faster.
    """
    sampling, vocabulary, count = answer.sampling, answer.row.vocabulary, len(answer.tokens)
    is_seeded = (seeds or sampling.seed is not None) and sampling.temperature > 0
    seed = (answer.seed, answer.sample, count) if is_seeded else None
    ends = {stop for stop in sampling.stop if isinstance(stop, int)}
    ends |= frozenset[int]() if sampling.ignore_eos else vocabulary.end
    return resolve_name("vllm.sampling_params:SamplingParams")(
        max_tokens=sampling.max_tokens - count,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        logprobs=sampling.log_probs,
        stop_token_ids=sorted(end for end in ends if end in vocabulary) or None,  # vLLM refuses others
        ignore_eos=True,  # end tokens are among the stops
        extra_args=None if seed is None else {_EXTRA: seed},
        detokenize=False,
        output_kind=resolve_name("vllm.sampling_params:RequestOutputKind").DELTA,
    )


def sampled_tokens(answer: Answer, output: Any, version: int) -> Iterable[SampledToken]:
    """Yield the tokens of an output of vLLM, sampled by weights of ``version``, and then the end, if any."""
    count, listed = answer.sampling.log_probs or 0, output.logprobs
    for index, token in enumerate(output.token_ids):
        log_probs: dict[int, Any] = {} if listed is None else listed[index]
        likeliest = sorted(log_probs, key=lambda other: log_probs[other].rank)[:count]
        top = {other: log_probs[other].logprob for other in likeliest} or None
        log_prob = None if listed is None else log_probs[token].logprob
        yield SampledToken(answer, token, log_prob, top, version=version)
    if output.finish_reason is not None:
        end = output.finish_reason if output.finish_reason in ("stop", "length") else "abort"
        yield SampledToken(answer, None, finish=end, version=version)


class SeededRows:
    """Methods of ``SeededProcessor``. ``rows`` has ``top_p``, the value of ``_EXTRA`` and the new tokens of rows."""

    def __init__(self, vllm_config: object, device: object, is_pin_memory: bool) -> None:
        self.rows: dict[int, tuple[float, int, int, int, list[int]]] = {}
        self._update = resolve_name("vllm.v1.sample.logits_processor:process_dict_updates")

    def is_argmax_invariant(self) -> bool:
        return True  # greedy tokens are chosen before, and all rows here have a temperature

    def update_state(self, batch_update: Any) -> None:
        self._update(self.rows, batch_update, self._row)

    @staticmethod
    def _row(params: Any, _: object, tokens: list[int]) -> Any:
        seed = (params.extra_args or {}).get(_EXTRA)
        return None if seed is None else (params.top_p, *seed, tokens)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self.rows:
            rows, values = list(self.rows), self.rows.values()
            draws = [(top_p, seed, sample, count + len(new)) for top_p, seed, sample, count, new in values]
            sampled = sample_randomly(logits[rows], draws)
            logits[rows] = float("-inf")
            logits[rows, sampled] = 0.0
        return logits


def __getattr__(name: str) -> Any:
    """Create ``SeededProcessor`` on first use: its base class is vLLM's."""
    if name != "SeededProcessor":
        raise AttributeError(name)
    base = resolve_name("vllm.v1.sample.logits_processor:LogitsProcessor")
    processor = globals()[name] = type(name, (SeededRows, base), {})
    return processor
