"""``TransformersRollout``: a causal language model of transformers as a role that generates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from phalanx.engines.continuous import ContinuousMachine
from phalanx.engines.engine import RolloutEngine
from phalanx.engines.engine_requests import Vocabulary
from phalanx.engines.model_runner import ModelRunner
from phalanx.engines.padded import PaddedRunner
from phalanx.engines.tokenization import check_folder, decoder, tokenizer_of

__all__ = ["TransformersRollout"]

Scheduler = Literal["padded", "continuous"]


class TransformersRollout(RolloutEngine):
    """An engine in the worker's process, by transformers alone, on CPUs and GPUs.

    Each rank has the whole model. With ``weights`` it accepts syncs, in place::

        rollout = px.WorkerGroup(pool, TransformersRollout.bind("path/of/model", weights="policy"))
        sync = px.WeightSync(actor, rollout, "policy")

    Args:
        model: a folder with a model (or its name on the hub), a module, or a function that makes one.
        weights: the name under which syncs bring weights; None for weights that stay.
        scheduler: "padded" makes all running answers one batch; "continuous" is transformers' continuous batching,
            paged attention, for long answers of many lengths on GPUs.
        tokenizer: a folder, or a tokenizer: prompts and stops may then be texts, and answers have ``text``.
        dtype: of a model that is loaded from a folder; None for the one that it was saved in.
        context: tokens of prompt and answer together; None for what the model says.
        max_running: answers at once at most.
        num_blocks: of the cache for "continuous", of 256 tokens each; the context is no longer than all of them.
        seed: of the seeds of rows that name none; None for others in every run.

    Raises:
        ValueError: an argument is none of these.
    """

    def __init__(
        self,
        model: str | Path | nn.Module | Callable[[], nn.Module],
        *,
        weights: str | None = None,
        scheduler: Scheduler = "padded",
        tokenizer: Any = None,
        dtype: torch.dtype | None = None,
        context: int | None = None,
        max_running: int = 256,
        num_blocks: int = 64,
        seed: int | None = None,
    ) -> None:
        if scheduler not in ("padded", "continuous"):
            raise ValueError(f'scheduler={scheduler!r}: expected "padded" or "continuous"')
        for name, number in (("max_running", max_running), ("num_blocks", num_blocks)):
            if number < 1:
                raise ValueError(f"{name}={number}: expected a number from 1")
        self.model = _made(model, dtype).to(self.device).eval().requires_grad_(False)
        text = tokenizer_of(tokenizer)
        vocabulary = vocabulary_of(self.model, context, decoder(text))
        machine: ModelRunner
        if scheduler == "padded":
            machine = PaddedRunner(self.model, vocabulary, max_running=max_running)
        else:
            machine = ContinuousMachine(
                self.model, vocabulary, max_running=max_running, num_blocks=num_blocks, seed=seed
            )
        self.serve(machine, weights=weights, seed=seed, encode=None if text is None else text.encode)
        if weights is not None:
            self.accept_weights(weights, self.model)


def vocabulary_of(
    model: nn.Module, context: int | None, text: Callable[[Sequence[int]], str] | None
) -> Vocabulary:
    """When answers of a model end, by its configuration.

    Raises:
        ValueError: its context is not known, or smaller than ``context``.
    """
    config: Any = model.config
    longest: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    if longest is None and context is None:
        raise ValueError(f"{type(model).__name__} does not say how long its context is: give context=")
    if context is not None and not (0 < context <= (longest or context)):
        raise ValueError(
            f"context={context}: expected a number from 1, and {longest} at most, which the model has"
        )
    generation: Any = getattr(model, "generation_config", None)
    end: Any = getattr(generation, "eos_token_id", None)
    ends = [] if end is None else [end] if isinstance(end, int) else list(end)
    return Vocabulary(
        context=context or longest or 0,
        end=frozenset(ends),
        size=getattr(config.get_text_config(), "vocab_size", None),
        text=text,
    )


def _made(model: Any, dtype: torch.dtype | None) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, str | Path):
        check_folder("model", model)
        from transformers import AutoModelForCausalLM

        loaded: Any = AutoModelForCausalLM.from_pretrained(str(model), dtype=dtype or "auto")
        return loaded
    if callable(model):
        made = model()
        if isinstance(made, nn.Module):
            return made
        raise ValueError(f"{model!r} made a {type(made).__name__}; expected a causal language model")
    raise ValueError(f"model={model!r}: expected a folder, a module, or a function that makes one")
