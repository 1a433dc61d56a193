"""Inspection of a running driver: status, statistics, progress and profiler settings.

Its modules also implement ``px.trace``, ``group.method.explain`` and ``group.profile``, whose side on ranks is
``rank_profile``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.api.lazy_names import lazy_names

if TYPE_CHECKING:
    from phalanx.api.explain import status as status
    from phalanx.debug.profile import nsight_environment as nsight_environment
    from phalanx.display.progress import progress as progress
    from phalanx.session.session import statistics as statistics

__getattr__, __dir__, __all__ = lazy_names(__name__)
