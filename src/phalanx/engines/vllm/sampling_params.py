"""What vLLM is asked for an answer, and what it told, the same for its engine in this process and beside it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

from phalanx.engines.engine_requests import Answer, SampledToken, Vocabulary
from phalanx.engines.engine_types import Capabilities, FinishReason, SamplingParams
from phalanx.engines.vllm.seeds import EXTRA
from phalanx.engines.vllm.vllm_imports import find, on_cpu

__all__ = ["Asking", "capabilities_of", "drawn", "of_prompt", "prompt_of", "vocabulary_of"]

_WORD = (1 << 64) - 1
"""What vLLM passes on of a number, and what a seed is drawn by."""


def vocabulary_of(engine: Any) -> Vocabulary:
    """When answers of its model end."""
    model = engine.vllm_config.model_config
    return Vocabulary(
        context=model.max_model_len,
        end=_end_tokens(model, model.hf_text_config),
        size=model.get_vocab_size(),
    )


def capabilities_of(engine: Any) -> Capabilities:
    """What it can do."""
    model = engine.vllm_config.model_config
    return Capabilities(
        context=model.max_model_len,
        sleep=bool(model.enable_sleep_mode) and not on_cpu(),
        prefix_cache=bool(engine.vllm_config.cache_config.enable_prefix_caching),
        top=max(model.max_logprobs, 0),
    )


def prompt_of(tokens: Sequence[int]) -> dict[str, Any]:
    """Tokens as vLLM takes them."""
    return {"type": "token", "prompt_token_ids": list(tokens), "arrival_time": time.time()}


class Asking:
    """Sampling parameters of vLLM.

    Args:
        vocabulary: of the engine.
        seeds: draw all rows by their seeds; else those that name none share vLLM's own random numbers, which is faster.
    """

    def __init__(self, vocabulary: Vocabulary, *, seeds: bool) -> None:
        self._vocabulary = vocabulary
        self._seeds = seeds
        self._taken: SamplingParams | None = None
        self._params = find("vllm.sampling_params.SamplingParams")
        self._delta = find("vllm.sampling_params.RequestOutputKind").DELTA

    def refuses(self, sampling: SamplingParams) -> str | None:
        """Why vLLM does not take a sampling, in its words; None where it does."""
        if sampling is not self._taken:  # most rows of a call have the same one
            try:
                self._params_of(sampling, 0, None)
            except Exception as error:  # its own, which are no ValueError
                return f"vLLM refuses {sampling}: {error}"
            self._taken = sampling
        return None

    def of(self, answer: Answer) -> Any:
        """Of the tokens that an answer still gets."""
        sampling, had = answer.sampling, len(answer.tokens)
        seeded = (self._seeds or sampling.seed is not None) and sampling.temperature > 0
        return self._params_of(sampling, had, (answer.seed & _WORD, answer.sample, had) if seeded else None)

    def _params_of(self, sampling: SamplingParams, had: int, seed: tuple[int, int, int] | None) -> Any:
        size = self._vocabulary.size
        ends = {one for one in sampling.stop if isinstance(one, int)}
        ends |= frozenset[int]() if sampling.ignore_eos else self._vocabulary.end
        # Others never come, and vLLM would refuse them.
        ends = {one for one in ends if one >= 0 and (size is None or one < size)}
        return self._params(
            max_tokens=sampling.max_tokens - had,
            temperature=sampling.temperature,
            # What draws by seed does it by top_p itself, and leaves one token.
            top_p=sampling.top_p,
            logprobs=sampling.log_probs,
            stop_token_ids=sorted(ends) or None,
            ignore_eos=True,  # vLLM has no tokenizer here; the end tokens are among the stops
            extra_args=None if seed is None else {EXTRA: seed},
            detokenize=False,
            output_kind=self._delta,
        )

    def of_prompt(self, prompt: Sequence[int]) -> tuple[Sequence[int], Any]:
        """Of a prompt whose log-probabilities are wanted; and the prompt for it.

        vLLM takes none that has no room for a token. Of one that fills the context the last token is drawn.
        """
        told = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 0.0, "detokenize": False}
        if len(prompt) < self._vocabulary.context:
            return prompt, self._params(**told)
        return prompt[:-1], self._params(**told, logprobs=0, allowed_token_ids=[prompt[-1]])


def drawn(answer: Answer, output: Any, version: int | None = None) -> Iterable[SampledToken]:
    """The tokens of an output of vLLM, by weights of ``version``."""
    tokens = list(output.token_ids)
    for at, token in enumerate(tokens):
        told = None if output.logprobs is None else output.logprobs[at]
        finish = _finish(output.finish_reason) if at == len(tokens) - 1 else None
        if told is None:
            yield SampledToken(answer, token, finish=finish, version=version)
            continue
        top = _top(told, answer.sampling.log_probs or 0)
        yield SampledToken(answer, token, told[token].logprob, top, finish, version)


def _finish(reason: str | None) -> FinishReason | None:
    return "stop" if reason == "stop" else "length" if reason == "length" else None


def _top(told: dict[int, Any], count: int) -> dict[int, float] | None:
    if not count:
        return None
    likeliest = sorted(told.items(), key=lambda pair: pair[1].rank)[:count]
    return {token: one.logprob for token, one in likeliest}


def of_prompt(prompt: Sequence[int], output: Any) -> list[float]:
    """The log-probabilities of the tokens of ``prompt`` but the first; see :meth:`Asking.of_prompt`."""
    tokens = output.prompt_token_ids[1:]
    found = [
        one[token].logprob if one else math.nan
        for token, one in zip(tokens, output.prompt_logprobs[1:], strict=True)
    ]
    if len(tokens) + 1 < len(prompt):
        found.append(output.outputs[0].logprobs[0][prompt[-1]].logprob)
    return found


def _end_tokens(model_config: Any, hf: Any) -> frozenset[int]:
    """The model's end tokens, as its generation settings have them, else its configuration."""
    settings = model_config.try_get_generation_config() or {}
    told = settings.get("eos_token_id", getattr(hf, "eos_token_id", None))
    if told is None:
        return frozenset()
    return frozenset([told] if isinstance(told, int) else told)
