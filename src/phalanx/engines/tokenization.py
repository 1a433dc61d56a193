"""Tokenizers of engines: texts in and out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["check_folder", "decoder", "tokenizer_of"]


def tokenizer_of(given: Any) -> Any:
    """A tokenizer: ``given``, or the one of transformers in the folder of that name; None for None."""
    if isinstance(given, str | Path):
        check_folder("tokenizer", given)
        from transformers import AutoTokenizer  # only where texts are asked for

        return AutoTokenizer.from_pretrained(str(given))
    return given


def check_folder(what: str, given: str | Path) -> None:
    """See to it that there is a folder, where this is no name on the hub, which has a slash at most.

    Raises:
        ValueError: there is none.
    """
    named = str(given)
    if (named.startswith(("/", ".", "~")) or named.count("/") > 1) and not Path(named).is_dir():
        raise ValueError(f"{what}={named!r}: there is no such folder on this rank's host")


def decoder(tokenizer: Any) -> Callable[[Sequence[int]], str] | None:
    """What gives the text of tokens."""
    if tokenizer is None:
        return None
    return lambda tokens: tokenizer.decode(list(tokens))
