"""``TransformersRollout``: an engine for small models, a causal language model of transformers.

All running answers form a batch, padded on the left. Keys and values are a tensor each per layer, with a row for
each answer. New answers are computed in a batch of their own, whose keys and values are then appended; finished
rows are removed. Positions and masks are explicit, so that padding does not affect a row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from phalanx.engines.engine import RolloutEngine
from phalanx.engines.engine_requests import Answer, ModelRunner, SampledToken
from phalanx.engines.engine_types import (
    Capabilities,
    Decode,
    Vocabulary,
    check_folder,
    end_tokens,
    load_tokenizer,
)
from phalanx.engines.token_sampling import sample_tokens

_TOP = 64


class TransformersRollout(RolloutEngine):
    """Engine of transformers in the worker's process, on CPUs and GPUs.

    Each rank has the complete model. With ``weights``, syncs update it in place::

        rollout = px.WorkerGroup(pool, TransformersRollout.bind("path/of/model", weights="policy"))
        sync = px.WeightSync(actor, rollout, "policy")

    Args:
        model: a folder with a model (or its name on the hub), a module, or a function that returns one.
        weights: name under which syncs send weights; None for constant weights.
        tokenizer: a folder, or a tokenizer: prompts and stops can then be texts, and answers have ``text``.
        dtype: dtype of a model that is loaded from a folder; None for its own.
        context: maximum number of tokens of prompt and answer together; None for the model's own limit. A model with
            positions of type "longrope" has its original limit: a longer row would change the others of its batch.
        max_running: maximum number of answers in a batch.
        seed: seed of the generator of seeds for rows that have none; None for different seeds in every run.

    Raises:
        ValueError: if an argument is invalid.
    """

    def __init__(
        self,
        model: str | Path | nn.Module | Callable[[], nn.Module],
        *,
        weights: str | None = None,
        tokenizer: Any = None,
        dtype: torch.dtype | None = None,
        context: int | None = None,
        max_running: int = 256,
        seed: int | None = None,
    ) -> None:
        if max_running < 1:
            raise ValueError(f"max_running={max_running}: expected a number from 1")
        self.model = _load_model(model, dtype).to(self.device).eval().requires_grad_(False)
        encode, decode = load_tokenizer(tokenizer)
        runner = PaddedRunner(self.model, _vocabulary(self.model, context, decode), max_running=max_running)
        self.serve(runner, weights=weights, seed=seed, encode=encode)
        if weights is not None:
            self.accept_weights(weights, self.model)


class PaddedRunner(ModelRunner):
    """Model runner that samples a token for every running answer in each step.

    ``_mask`` is (rows, places), True at a token; ``_cache`` has the same places. ``_tokens``, (rows,), has the last
    token of each running answer, which is not in the cache yet.

    Args:
        model: causal language model that takes ``input_ids``, ``attention_mask`` and ``past_key_values``.
        vocabulary: limits and decoding of tokens.
        max_running: maximum number of answers in a batch.
    """

    def __init__(self, model: Any, vocabulary: Vocabulary, *, max_running: int) -> None:
        self.vocabulary = vocabulary
        self.capabilities = Capabilities(vocabulary.context, top=_TOP, text=vocabulary.text is not None)
        self._model = model
        self._device = next(model.parameters()).device
        self._max_running = max_running
        self._new: list[Answer] = []
        self._running: list[Answer] = []
        self._cache: Any = None
        parameters = inspect.signature(model.forward).parameters
        is_open = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        self._unknown = set[str]() if is_open else {"position_ids", "logits_to_keep"} - parameters.keys()

    def room(self) -> int | None:
        return max(0, self._max_running - len(self._running) - len(self._new))

    def add(self, answers: Sequence[Answer]) -> None:
        self._new.extend(answers)

    def remove(self, answers: Sequence[Answer]) -> None:
        removed = set(answers)
        if _has_states(self._cache):
            self.weights_changed()  # transformers cannot remove rows from states: compute the others again
        self._new = [answer for answer in self._new if answer not in removed]
        rows = [row for row, answer in enumerate(self._running) if answer not in removed]
        if not rows:
            self._running, self._cache = [], None
        elif len(rows) < len(self._running):
            self._keep(rows)

    def _keep(self, rows: Sequence[int]) -> None:
        """Remove all other rows, and the first places if all kept rows have padding there."""
        chosen = torch.tensor(rows, device=self._device)
        self._running = [self._running[row] for row in rows]
        self._mask, self._tokens = self._mask[chosen], self._tokens[chosen]
        self._cache.batch_select_indices(chosen)
        # A model without ``position_ids`` counts the places of its cache, so all places stay.
        if "position_ids" not in self._unknown and _is_plain(self._cache):
            padding = int(self._mask.any(dim=0).int().argmax())
            self._mask = self._mask[:, padding:]
            for layer in self._cache.layers:
                layer.keys, layer.values = layer.keys[:, :, padding:], layer.values[:, :, padding:]

    def weights_changed(self) -> None:
        self._new, self._running, self._cache = self._running + self._new, [], None

    @torch.no_grad()
    def step(self) -> list[SampledToken]:
        sampled: list[SampledToken] = []
        if self._running and self._new and not _is_plain(self._cache):
            self.weights_changed()
        if self._running:
            self._mask = nn.functional.pad(self._mask, (0, 1), value=True)
            self._cache, self._tokens, sampled = self._sample(
                self._running, self._tokens[:, None], self._mask, self._cache
            )
        if self._new:
            rows = [torch.tensor(answer.so_far) for answer in self._new]
            ids = pad_sequence(rows, batch_first=True, padding_value=-1, padding_side="left").to(self._device)
            mask = ids >= 0
            cache, tokens, first = self._sample(self._new, ids.clamp_(min=0), mask)
            if self._running:
                self._append(cache, mask, tokens)
            else:
                self._cache, self._mask, self._tokens = cache, mask, tokens
            self._running, self._new = self._running + self._new, []
            sampled += first
        return sampled

    def _append(self, cache: Any, mask: Tensor, tokens: Tensor) -> None:
        """Append rows, padded to the same number of places."""
        places = max(self._mask.shape[1], mask.shape[1])
        for layer, added in zip(self._cache.layers, cache.layers, strict=True):
            layer.keys = _joined(layer.keys, added.keys, places, 2)
            layer.values = _joined(layer.values, added.values, places, 2)
        self._mask = _joined(self._mask, mask, places, 1)
        self._tokens = torch.cat([self._tokens, tokens])

    def _sample(
        self, answers: Sequence[Answer], ids: Tensor, mask: Tensor, cache: Any = None
    ) -> tuple[Any, Tensor, list[SampledToken]]:
        """Run the model on ``ids``, the tokens of each answer that are not in the cache, and sample the next tokens."""
        positions = (mask.long().cumsum(dim=1) - 1).clamp_(min=0)[:, -ids.shape[1] :]
        options = {"use_cache": True, "logits_to_keep": 1, "position_ids": positions}
        known = {name: value for name, value in options.items() if name not in self._unknown}
        out = self._model(input_ids=ids, attention_mask=mask.long(), past_key_values=cache, **known)
        sampled, tokens = sample_tokens(answers, out.logits[:, -1])
        return out.past_key_values, tokens, sampled

    def cache_use(self) -> float:
        return len(self._running) / self._max_running


def _is_plain(cache: Any) -> bool:
    """Return whether all layers of a cache have plain tensors of keys and values, with a place per token."""
    from transformers.cache_utils import DynamicLayer

    return all(type(layer) is DynamicLayer for layer in getattr(cache, "layers", [None]))


def _has_states(cache: Any) -> bool:
    """Return whether a layer of a cache has states of convolutions or of linear attention."""
    return any(hasattr(layer, "conv_states") for layer in getattr(cache, "layers", ()))


def _joined(upper: Tensor, lower: Tensor, places: int, dim: int) -> Tensor:
    """Concatenate rows, padded with zeros to ``places`` places at the beginning of tensor dim ``dim``."""

    def padded(tensor: Tensor) -> Tensor:
        after = 2 * (tensor.ndim - 1 - dim)
        return nn.functional.pad(tensor, (*[0] * after, places - tensor.shape[dim], 0))

    return torch.cat([padded(upper), padded(lower)])


def _vocabulary(model: nn.Module, context: int | None, text: Decode | None) -> Vocabulary:
    """Return the vocabulary of a model from its configuration.

    Raises:
        ValueError: if its context is unknown, or smaller than ``context``.
    """
    config = cast(Any, model.config).get_text_config()
    longest: int | None = getattr(config, "max_position_embeddings", None)
    rope: Any = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        longest = rope.get("original_max_position_embeddings", longest)
    if longest is None and context is None:
        raise ValueError(f"the configuration of {type(model).__name__} has no context length: give context=")
    if context is not None and not 0 < context <= (longest or context):
        raise ValueError(f"context={context}: expected 1 to {longest}, the model's own context")
    end = end_tokens(getattr(getattr(model, "generation_config", None), "eos_token_id", None))
    return Vocabulary(context or longest or 0, end, getattr(config, "vocab_size", None), text)


def _load_model(model: Any, dtype: torch.dtype | None) -> nn.Module:
    if isinstance(model, str | Path):
        check_folder("model", model)
        from transformers import AutoModelForCausalLM

        return cast(Any, AutoModelForCausalLM).from_pretrained(str(model), dtype=dtype or "auto")
    made = model() if callable(model) and not isinstance(model, nn.Module) else model
    if not isinstance(made, nn.Module):
        raise ValueError(
            f"model={made!r}: expected a folder, a causal language model, or a function that returns one"
        )
    return made
