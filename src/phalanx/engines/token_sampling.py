"""Tokens drawn from logits, each row by its own sampling and its own random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.engines.engine_requests import Answer, SampledToken
from phalanx.engines.randomness import stream_of, uniforms

__all__ = ["by_numbers", "draw", "nucleus"]


def draw(answers: Sequence[Answer], logits: Tensor) -> tuple[list[SampledToken], Tensor]:
    """The next token of each answer.

    Args:
        answers: of each row.
        logits: (rows, vocabulary), of whatever device and dtype.

    Returns:
        What was drawn, and the tokens as a tensor, (rows,).
    """
    samplings = [answer.sampling for answer in answers]
    log_probs = logits.float().log_softmax(dim=-1)
    tokens = log_probs.argmax(dim=-1)
    hot = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    if hot:
        tokens[hot] = _sampled([answers[row] for row in hot], log_probs[hot])
    listed = tokens.tolist()
    if all(sampling.log_probs is None for sampling in samplings):
        return [SampledToken(answer, token) for answer, token in zip(answers, listed, strict=True)], tokens
    of_token = log_probs.gather(1, tokens[:, None])[:, 0].tolist()
    tops = _tops(samplings_top=[sampling.log_probs or 0 for sampling in samplings], log_probs=log_probs)
    drawn = [
        SampledToken(answer, token, None if sampling.log_probs is None else log_prob, top)
        for answer, sampling, token, log_prob, top in zip(
            answers, samplings, listed, of_token, tops, strict=True
        )
    ]
    return drawn, tokens


def _sampled(answers: Sequence[Answer], log_probs: Tensor) -> Tensor:
    """By the inverse of the cumulated distribution, in double precision: one uniform number for each token."""
    samplings = [answer.sampling for answer in answers]
    heat = torch.tensor([one.temperature for one in samplings], dtype=torch.float64, device=log_probs.device)
    weights = (log_probs.double() / heat[:, None]).softmax(dim=-1)
    if any(one.top_p < 1 for one in samplings):
        top_p = torch.tensor([one.top_p for one in samplings], dtype=torch.float64, device=log_probs.device)
        weights = nucleus(weights, top_p)
    return by_numbers(
        weights, [stream_of(one.seed, one.sample) for one in answers], [len(one.tokens) for one in answers]
    )


def by_numbers(weights: Tensor, streams: Sequence[int], places: Sequence[int]) -> Tensor:
    """A token of each row of ``weights``, (rows, vocabulary), by the random number of its place; (rows,)."""
    cumulated = weights.cumsum(dim=-1)
    points = torch.from_numpy(uniforms(streams, places)).to(weights.device) * cumulated[:, -1]
    found = torch.searchsorted(cumulated, points[:, None], right=True)[:, 0]
    return found.clamp_(max=weights.shape[1] - 1)


def nucleus(weights: Tensor, top_p: Tensor) -> Tensor:
    """Without the tokens that are not needed for the probability ``top_p``, the likeliest first."""
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    kept = ordered.masked_fill(before >= top_p[:, None], 0.0)
    return torch.zeros_like(weights).scatter_(1, order, kept)


def _tops(samplings_top: Sequence[int], log_probs: Tensor) -> list[dict[int, float] | None]:
    most = max(samplings_top)
    if not most:
        return [None] * len(samplings_top)
    values, tokens = (one.tolist() for one in log_probs.topk(min(most, log_probs.shape[1]), dim=-1))
    return [
        dict(zip(tokens[row][:count], values[row][:count], strict=True)) if count else None
        for row, count in enumerate(samplings_top)
    ]
