"""A causal language model of transformers as an engine: all running answers are one batch, padded on the left.

For small models on CPUs that is several times faster than paged attention. Keys and values are one tensor per
layer, with a row for each answer. Answers that begin while others run are read in a batch of their own, whose keys
and values are put below the others'; what ended is cut out. Positions and masks are given, so that a row's padding
does not matter to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from phalanx.engines.engine_requests import Answer, SampledToken, Vocabulary
from phalanx.engines.engine_types import Capabilities
from phalanx.engines.model_runner import ModelRunner
from phalanx.engines.token_sampling import draw

__all__ = ["PaddedRunner"]

_TOP = 64


class Batch:
    """Rows that a model has read: their keys and values, and which places are no padding.

    ``mask`` is (rows, places), True where a row has a token; ``places`` is that of the cache, which has not read
    the last token of each row yet. ``tokens`` are those, (rows,).
    """

    def __init__(self, answers: list[Answer], cache: Any, mask: Tensor, tokens: Tensor) -> None:
        self.answers = answers
        self.cache = cache
        self.mask = mask
        self.tokens = tokens

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows."""
        chosen = torch.tensor(rows, device=self.mask.device)
        self.answers = [self.answers[row] for row in rows]
        self.mask, self.tokens = self.mask[chosen], self.tokens[chosen]
        self.cache.batch_select_indices(chosen)

    def put_below(self, other: Batch) -> None:
        """The rows of both, padded to the same number of places."""
        places = max(self.mask.shape[1], other.mask.shape[1])
        for mine, theirs in zip(self.cache.layers, other.cache.layers, strict=True):
            mine.keys = torch.cat([_left(mine.keys, places, 2), _left(theirs.keys, places, 2)])
            mine.values = torch.cat([_left(mine.values, places, 2), _left(theirs.values, places, 2)])
        self.mask = torch.cat([_left(self.mask, places, 1), _left(other.mask, places, 1)])
        self.tokens = torch.cat([self.tokens, other.tokens])
        self.answers = self.answers + other.answers


class PaddedRunner(ModelRunner):
    """Draws a token for every running answer in each step.

    Args:
        model: a causal language model; it is given ``input_ids``, ``attention_mask`` and ``position_ids``.
        vocabulary: when answers end.
        max_running: answers at once at most.
    """

    def __init__(self, model: nn.Module, vocabulary: Vocabulary, *, max_running: int = 256) -> None:
        self.vocabulary = vocabulary
        self.capabilities = Capabilities(
            context=vocabulary.context, top=_TOP, text=vocabulary.text is not None
        )
        self._model = model
        self._max_running = max_running
        self._new: list[Answer] = []
        self._batch: Batch | None = None
        parameters = inspect.signature(model.forward).parameters
        open_ended = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        self._takes = {
            name for name in ("position_ids", "logits_to_keep") if name in parameters or open_ended
        }

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def room(self) -> int | None:
        """See :class:`ModelRunner`."""
        held = 0 if self._batch is None else len(self._batch.answers)
        return max(0, self._max_running - held - len(self._new))

    def add(self, answers: Sequence[Answer]) -> None:
        """See :class:`ModelRunner`."""
        self._new.extend(answers)

    def remove(self, answers: Sequence[Answer]) -> None:
        """See :class:`ModelRunner`."""
        gone = {id(answer) for answer in answers}
        self._new = [answer for answer in self._new if id(answer) not in gone]
        if self._batch is None:
            return
        rows = [row for row, answer in enumerate(self._batch.answers) if id(answer) not in gone]
        if not rows:
            self._batch = None
        elif len(rows) < len(self._batch.answers):
            self._batch.keep(rows)

    def weights_changed(self) -> None:
        """See :class:`ModelRunner`: everything is read again."""
        if self._batch is not None:
            self._new = self._batch.answers + self._new
            self._batch = None

    @torch.no_grad()
    def step(self) -> list[SampledToken]:
        """See :class:`ModelRunner`."""
        drawn: list[SampledToken] = []
        before = self._batch
        if before is not None and self._new and not _plain(before.cache):
            self.weights_changed()  # caches of this kind cannot be put together
            before = None
        if before is not None:
            drawn += self._next(before)
        if self._new:
            begun, first = self._read(self._new)
            self._new = []
            drawn += first
            if before is None:
                self._batch = begun
            else:
                before.put_below(begun)
        return drawn

    def _read(self, answers: list[Answer]) -> tuple[Batch, list[SampledToken]]:
        """Read what these have so far, and draw the next token of each."""
        ids, mask = self._padded([answer.so_far for answer in answers])
        positions = (mask.long().cumsum(dim=1) - 1).clamp_(min=0)
        out = self._forward(ids, mask, positions, None)
        drawn, tokens = draw(answers, out.logits[:, -1])
        return Batch(list(answers), out.past_key_values, mask, tokens), drawn

    def _next(self, batch: Batch) -> list[SampledToken]:
        """Read the last token of each row, and draw the next."""
        positions = batch.mask.sum(dim=1, keepdim=True)
        batch.mask = torch.cat([batch.mask, batch.mask.new_ones(len(batch.answers), 1)], dim=1)
        out = self._forward(batch.tokens[:, None], batch.mask, positions, batch.cache)
        batch.cache = out.past_key_values
        drawn, batch.tokens = draw(batch.answers, out.logits[:, -1])
        return drawn

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Any:
        given: dict[str, Any] = {"position_ids": positions, "logits_to_keep": 1}
        return self._model(
            input_ids=ids,
            attention_mask=mask.long(),
            past_key_values=cache,
            use_cache=True,
            **{name: value for name, value in given.items() if name in self._takes},
        )

    def _padded(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Tokens, padded on the left, and where there are any: (rows, places) each."""
        places = max(len(row) for row in rows)
        ids = torch.tensor([[0] * (places - len(row)) + list(row) for row in rows])
        mask = torch.arange(places) >= torch.tensor([[places - len(row)] for row in rows])
        return ids.to(self._device), mask.to(self._device)

    @torch.no_grad()
    def prompt_log_probs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """See :class:`ModelRunner`."""
        found: list[list[float]] = []
        for start in range(0, len(prompts), self._max_running):
            found += self._log_probs_of(prompts[start : start + self._max_running])
        return found

    def _log_probs_of(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        ids, mask = self._padded(prompts)
        positions = (mask.long().cumsum(dim=1) - 1).clamp_(min=0)
        given = {"position_ids": positions} if "position_ids" in self._takes else {}
        out = cast(Any, self._model)(input_ids=ids, attention_mask=mask.long(), use_cache=False, **given)
        log_probs = (
            out.logits[:, :-1].float().log_softmax(dim=-1).gather(2, ids[:, 1:, None])[:, :, 0].tolist()
        )
        return [row[len(row) - len(prompt) + 1 :] for row, prompt in zip(log_probs, prompts, strict=True)]

    def cache_use(self) -> float:
        """See :class:`ModelRunner`: rows at work of those that there may be."""
        return (0 if self._batch is None else len(self._batch.answers)) / self._max_running

    def why_not(self, what: str) -> str:
        """See :class:`ModelRunner`."""
        return "the model stays where it is, and keys and values are given back with the last answer"

    def close(self) -> None:
        """See :class:`ModelRunner`."""
        self._new, self._batch = [], None


def _plain(cache: Any) -> bool:
    """Whether all layers are simple tensors of keys and values, one place per token."""
    from transformers.cache_utils import DynamicLayer

    return all(type(layer) is DynamicLayer for layer in getattr(cache, "layers", [None]))


def _left(tensor: Tensor, places: int, axis: int) -> Tensor:
    """``tensor`` with zeros before it, so that it has that many places along tensor dim ``axis``."""
    missing = places - tensor.shape[axis]
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[axis] = missing
    return torch.cat([tensor.new_zeros(shape), tensor], dim=axis)
