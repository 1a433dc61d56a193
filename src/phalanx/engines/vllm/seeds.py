"""Draws of rows with a seed: token i is drawn with number i of the seed, whatever else is in the batch.

vLLM gives a request a generator of its own, which goes on from token to token, so that an answer that is interrupted
and gone on with would get other tokens. By vLLM's interface for logits processors, what is drawn here is all that is
left for vLLM to draw. Log-probabilities are taken before.
"""

from __future__ import annotations

from typing import Any

import torch

from phalanx.engines.randomness import stream_of
from phalanx.engines.token_sampling import by_numbers, nucleus
from phalanx.engines.vllm.vllm_imports import find

__all__ = ["EXTRA", "NAME", "seeded_draws"]

NAME = f"{__name__}:SeededDraws"
"""How vLLM finds the class, in whichever process its workers live."""

EXTRA = "phalanx_seed"
"""In ``SamplingParams.extra_args``: (seed, sample, tokens that the answer had before)."""


def seeded_draws() -> Any:
    """The class of vLLM's logits processor that does it."""
    base = find("vllm.v1.sample.logits_processor.LogitsProcessor")
    swap = find("vllm.v1.sample.logits_processor.MoveDirectionality").SWAP

    class SeededDraws(base):  # vLLM is there only now
        def __init__(self, vllm_config: object, device: object, is_pin_memory: bool) -> None:
            self.rows: dict[int, tuple[int, int, int, float, list[int]]] = {}

        def is_argmax_invariant(self) -> bool:
            # It changes no greedy draw: those are taken before, and it has rows with a temperature only.
            return True

        def update_state(self, batch_update: Any) -> None:
            if batch_update is None:
                return
            for index in batch_update.removed:
                self.rows.pop(index, None)
            for index, params, _, tokens in batch_update.added:
                self.rows.pop(index, None)
                seed = (params.extra_args or {}).get(EXTRA)
                if seed is not None:
                    self.rows[index] = (*seed, params.top_p, tokens)
            for first, second, direction in batch_update.moved:
                moved, other = self.rows.pop(first, None), self.rows.pop(second, None)
                if moved is not None:
                    self.rows[second] = moved
                if other is not None and direction == swap:
                    self.rows[first] = other

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            if self.rows:
                rows = list(self.rows)
                tokens = self._drawn(logits[rows])
                logits[rows] = float("-inf")
                logits[rows, tokens] = 0.0
            return logits

        def _drawn(self, logits: torch.Tensor) -> torch.Tensor:
            weights = logits.double().softmax(dim=-1)
            told = list(self.rows.values())
            if any(top_p < 1 for _, _, _, top_p, _ in told):
                most = [top_p for _, _, _, top_p, _ in told]
                weights = nucleus(weights, torch.tensor(most, dtype=weights.dtype, device=weights.device))
            streams = [stream_of(seed, sample) for seed, sample, _, _, _ in told]
            return by_numbers(weights, streams, [before + len(tokens) for _, _, before, _, tokens in told])

    return SeededDraws


def __getattr__(name: str) -> Any:
    """``SeededDraws``, made when it is asked for: its base is vLLM's."""
    if name != "SeededDraws":
        raise AttributeError(name)
    found = globals()[name] = seeded_draws()
    return found
