"""A sentence of verl's: what makes verl say it, and with which error.

Code on verl, its tests above all, finds errors by these words: the drop-in says them too, and more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Sentence:
    """A sentence that ``act`` makes verl say, whole, and the function of verl that says it."""

    where: str
    act: Callable[[], object]
    error: type[Exception]
    text: str

    def said(self) -> str:
        """What is said: the sentence, if it is among the words of an error of the same type, or what comes instead."""
        try:
            self.act()
        except self.error as error:
            words = str(error.args[0] if isinstance(error, KeyError) else error)
            return self.text if self.text in words else words
        except Exception as error:
            return f"{type(error).__name__}, no {self.error.__name__}: {error}"
        return "nothing"
