"""Numbers of a rank in Ray's own metrics, which its dashboard and Prometheus show."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from phalanx.config import settings

_gauges: dict[str, Any] = {}


def show(what: str, rank: str, values: Mapping[str, float]) -> None:
    """Set ``phalanx_WHAT_NAME`` to each value, for ``rank``; nothing where ``PHALANX_METRICS=0``."""
    if not settings().metrics:
        return
    with contextlib.suppress(Exception):  # monitoring never ends what it looks at
        for name, value in values.items():
            _gauge(f"phalanx_{what}_{name}").set(value, tags={"rank": rank})


def _gauge(name: str) -> Any:
    found = _gauges.get(name)
    if found is None:
        from ray.util import metrics  # takes a tenth of a second, which only who measures something spends

        found = _gauges[name] = metrics.Gauge(name, "Of a rank, as it told it last.", tag_keys=("rank",))
    return found
