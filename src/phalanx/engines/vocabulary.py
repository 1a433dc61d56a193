"""Vocabulary of a model: its context, its end tokens, and the tokenizer between tokens and text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

Encode: TypeAlias = Callable[[str], Sequence[int]]
Decode: TypeAlias = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Vocabulary:
    """Limits and decoding of a model's tokens.

    Attributes:
        context: maximum number of tokens of prompt and answer together.
        end: the model's own end tokens.
        size: number of tokens, which are 0 to ``size - 1``; None if unknown.
        text: function that decodes tokens, if there is a tokenizer.
    """

    context: int
    end: frozenset[int] = frozenset()
    size: int | None = None
    text: Decode | None = None


def end_tokens(eos_token_id: int | Sequence[int] | None) -> frozenset[int]:
    """Return the end tokens in ``eos_token_id`` of a generation configuration."""
    if eos_token_id is None:
        return frozenset()
    return frozenset([eos_token_id] if isinstance(eos_token_id, int) else eos_token_id)


def load_tokenizer(tokenizer: Any) -> tuple[Encode | None, Decode | None]:
    """Return functions that encode and decode, by a tokenizer or a folder with a tokenizer; (None, None) without."""
    if tokenizer is None:
        return None, None
    if isinstance(tokenizer, str | Path):
        check_folder("tokenizer", tokenizer)
        from transformers import AutoTokenizer  # only if texts are used

        tokenizer = AutoTokenizer.from_pretrained(str(tokenizer))
    return tokenizer.encode, lambda tokens: tokenizer.decode(list(tokens))


def check_folder(argument: str, folder: str | Path) -> None:
    """Check that a folder exists, unless its name can be a name on the hub, with at most a single slash.

    Raises:
        ValueError: if the folder does not exist.
    """
    name = str(folder)
    if (name.startswith(("/", ".", "~")) or name.count("/") > 1) and not Path(name).is_dir():
        raise ValueError(f"{argument}={name!r}: there is no such folder on this rank's host")
