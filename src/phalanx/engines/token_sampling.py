"""Sampling of tokens from logits, each row by its own parameters and its own random numbers.

A row's random numbers depend on its own seed alone, not on the batch or on interruptions of the answer: number i of a
seed is computed without the earlier numbers. The generator is splitmix64 (Steele, Lea and Flood 2014, "Fast splittable
pseudorandom number generators"), whose state after i numbers is seed + i * GOLDEN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phalanx.engines.engine_requests import Answer, SampledToken

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

_Words: TypeAlias = "npt.NDArray[np.uint64]"


def sample_tokens(answers: Sequence[Answer], logits: Tensor) -> tuple[list[SampledToken], Tensor]:
    """Sample the next token of each answer.

    Args:
        answers: answer of each row.
        logits: (rows, vocabulary), of any device and dtype.

    Returns:
        The sampled tokens, and a tensor of their ids, (rows,).
    """
    log_probs = logits.float().log_softmax(dim=-1)
    tokens = log_probs.argmax(dim=-1)
    random = [row for row, answer in enumerate(answers) if answer.sampling.temperature > 0]
    if random:
        chosen = [answers[row] for row in random]
        temperatures = [[answer.sampling.temperature] for answer in chosen]
        scaled = log_probs[random].double() / log_probs.new_tensor(temperatures, dtype=torch.float64)
        draws = [(one.sampling.top_p, one.seed, one.sample, len(one.tokens)) for one in chosen]
        tokens[random] = sample_randomly(scaled, draws)
    of_token = log_probs.gather(1, tokens[:, None])[:, 0].tolist()
    count = min(max(answer.sampling.log_probs or 0 for answer in answers), log_probs.shape[1])
    likeliest = zip(*(part.tolist() for part in log_probs.topk(count, dim=-1)), strict=True)
    sampled: list[SampledToken] = []
    for answer, token, log_prob, (values, ids) in zip(
        answers, tokens.tolist(), of_token, likeliest, strict=True
    ):
        wanted = answer.sampling.log_probs
        top = dict(zip(ids[:wanted], values[:wanted], strict=True)) if wanted else None
        sampled.append(SampledToken(answer, token, None if wanted is None else log_prob, top))
    return sampled, tokens


def sample_randomly(logits: Tensor, draws: Sequence[tuple[float, int, int, int]]) -> Tensor:
    """Sample a token, (rows,), from each row of ``logits``, (rows, vocabulary).

    The inverse of the cumulative distribution is computed in double precision, with a random number per token.

    Args:
        draws: ``top_p``, seed, sample and position of each row. The position is the number of earlier tokens.
    """
    top_p, seeds, samples, positions = zip(*draws, strict=True)
    weights = logits.double().softmax(dim=-1)
    if min(top_p) < 1:
        weights = _keep_top_p(weights, torch.tensor(top_p, dtype=weights.dtype, device=weights.device))
    cumulative = weights.cumsum(dim=-1)
    numbers = torch.from_numpy(uniform_numbers(random_streams(seeds, samples), positions))
    points = numbers.to(weights.device) * cumulative[:, -1]
    tokens = torch.searchsorted(cumulative, points[:, None], right=True)[:, 0]
    return tokens.clamp_(max=weights.shape[1] - 1)


def _keep_top_p(weights: Tensor, top_p: Tensor) -> Tensor:
    """Return the weights, set to 0 except for the likeliest tokens that together have the probability ``top_p``."""
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    kept = ordered.masked_fill(before >= top_p[:, None], 0.0)
    return torch.zeros_like(weights).scatter_(1, order, kept)


def random_streams(seeds: Sequence[int], samples: Sequence[int]) -> _Words:
    """Return the random stream of answer ``samples[i]`` of a row with ``seeds[i]``, for each i."""
    states = _mix(np.asarray(seeds, np.uint64))
    return _mix(states + np.asarray(samples, np.uint64) * np.uint64(_GOLDEN))


def uniform_numbers(streams: _Words, positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return random number ``positions[i]`` of ``streams[i]``, for each i; numbers are from 0 to below 1."""
    steps = (np.asarray(positions, np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    return (_mix(streams + steps) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(states: _Words) -> _Words:
    states = (states ^ (states >> np.uint64(30))) * np.uint64(_FIRST)
    states = (states ^ (states >> np.uint64(27))) * np.uint64(_SECOND)
    return states ^ (states >> np.uint64(31))
