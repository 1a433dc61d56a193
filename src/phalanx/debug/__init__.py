"""Inspection of a running driver: status, statistics, progress and profiler settings.

Its modules also have ``px.trace``, ``group.method.explain`` and ``group.profile``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.lazy_names import lazy_names

if TYPE_CHECKING:
    from phalanx.api.explain import status as status
    from phalanx.calls.counts import statistics as statistics
    from phalanx.debug.profile import nsight_environment as nsight_environment
    from phalanx.display.progress import progress as progress

_HOMES = {
    "nsight_environment": "phalanx.debug.profile",
    "progress": "phalanx.display.progress",
    "statistics": "phalanx.calls.counts",
    "status": "phalanx.api.explain",
}

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
