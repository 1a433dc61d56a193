"""What a source's own forward says of prompts, and what the engine says that got its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from phalanx.declare.weights import Published
from phalanx.execution.weights.book import Key, WeightsBook
from phalanx.execution.weights.ends import model_of
from phalanx.execution.weights.orders import Probed

__all__ = ["probe_source", "probe_target", "why_no_forward"]


def why_no_forward(published: Published) -> str:
    """Why what is published cannot be asked for log-probabilities, in words; empty where it may be."""
    if published.log_probs is not None:
        return ""
    if published.megatron is not None:
        return "a Megatron module has no forward of tokens alone"
    model = model_of(published)
    if not isinstance(model, torch.nn.Module):
        return f"what it publishes is a {type(model).__name__}, which has no forward"
    return ""


def probe_source(book: WeightsBook, key: Key, prompts: Sequence[Sequence[int]]) -> Probed:
    """Log-probabilities of the prompts' tokens by this source rank's forward; every rank has to be asked."""
    published = book.published(key)
    try:
        if published.log_probs is not None:
            return Probed(tuple(map(tuple, published.log_probs(prompts))))
        return Probed(_forward(model_of(published), prompts))
    except Exception as error:
        return Probed(None, f"its forward raised {type(error).__name__}: {error}")


def probe_target(book: WeightsBook, key: Key) -> Probed:
    """The same by the engine of this target rank."""
    probing = book.accepted(key).probing
    if probing is None:
        return Probed(None)
    told = probing.log_probs(probing.prompts)
    return Probed(None if told is None else tuple(map(tuple, told)))


def _forward(model: Any, prompts: Sequence[Sequence[int]]) -> tuple[tuple[float, ...], ...]:
    trains = [module for module in model.modules() if module.training]
    device = next(model.parameters()).device
    model.eval()
    try:
        with torch.no_grad():
            return tuple(_of_one(model, torch.tensor([list(prompt)], device=device)) for prompt in prompts)
    finally:
        for module in trains:
            module.training = True
        # After a forward without a backward FSDP2 has parameters whole; a sync reads the sharded ones.
        for module in model.modules():
            if hasattr(module, "reshard") and hasattr(module, "unshard"):
                module.reshard()


def _of_one(model: Any, ids: torch.Tensor) -> tuple[float, ...]:
    logits = model(input_ids=ids).logits
    if hasattr(logits, "full_tensor"):
        logits = logits.full_tensor()
    found = logits[0, :-1].float().log_softmax(dim=-1).gather(1, ids[0, 1:, None])[:, 0]
    return tuple(found.tolist())
