"""Importing the users' modules in a rank's process, without looking for garbage meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def importing() -> Generator[None, None, None]:
    """For imports alone: what they make stays, so that the collector would look through ever more of it for nothing.

    That is an eighth of the time that ``import torch`` takes. What was made is taken out of all later collections too
    (``gc.freeze``), which would else stop the rank for a tenth of a second each time they come to the oldest objects.
    A module that sets the collector's thresholds, or turns it off, has its way.
    """
    first, *others = gc.get_threshold()
    gc.set_threshold(0, *others)
    try:
        yield
    finally:
        gc.freeze()
        if gc.get_threshold() == (0, *others):
            gc.set_threshold(first, *others)
