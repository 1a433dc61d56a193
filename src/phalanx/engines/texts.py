"""Tokenizers of engines: texts in and out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["decoder", "tokenizer_of"]


def tokenizer_of(given: Any) -> Any:
    """A tokenizer: ``given``, or the one of transformers in the folder of that name; None for None."""
    if isinstance(given, str | Path):
        from transformers import AutoTokenizer  # only where texts are asked for

        return AutoTokenizer.from_pretrained(str(given))
    return given


def decoder(tokenizer: Any) -> Callable[[Sequence[int]], str] | None:
    """What gives the text of tokens."""
    if tokenizer is None:
        return None
    return lambda tokens: tokenizer.decode(list(tokens))
