"""Keeps Python's garbage collector from going through what a program is still importing.

verl's programs import half a million objects in each of their processes, all of which stay. Each time that a quarter
has come on top, the collector goes through all of them, and finds nothing: a tenth of the time of these imports.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping

_SOME = 8
"""So many modules more than at the last look: imports are under way."""


class _WhileImporting:
    """What the collector calls: takes what is there out of all later collections while modules come.

    It does so when the collector comes to objects that have outlived one look, long before it would go through all, and
    takes itself away once it goes through all of them and no modules have come since the last time. A collection that
    the program asks for (``gc.collect()``) finds what has become garbage since the last such moment.
    """

    def __init__(self) -> None:
        self._before = self._at_all = len(sys.modules)

    def __call__(self, phase: str, info: Mapping[str, int]) -> None:
        """Called by the collector."""
        if phase != "start" or info["generation"] == 0:
            return
        modules = len(sys.modules)
        if info["generation"] == 1:
            if modules - self._before >= _SOME:
                gc.freeze()
            self._before = modules
        elif modules - self._at_all >= _SOME:
            self._at_all = modules
        elif gc.callbacks[-1] is self:  # else the next one would not hear of this collection
            gc.callbacks.pop()


def spare_imports() -> None:
    """Leave out of the collector's rounds what is imported from here on, and what there is by then. Idempotent."""
    if not any(isinstance(one, _WhileImporting) for one in gc.callbacks):
        gc.callbacks.append(_WhileImporting())
