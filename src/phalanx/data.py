"""Row types, dispatch modes and functions on rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.lazy_names import lazy_names

if TYPE_CHECKING:
    from phalanx.collect.join import join_rows as join_rows
    from phalanx.declare.dispatch_modes import register_dispatch_mode as register_dispatch_mode
    from phalanx.dispatch.batch_metadata import PerShard as PerShard
    from phalanx.dispatch.shardable import register_row_type as register_row_type
    from phalanx.dispatch.split import count_rows as count_rows
    from phalanx.dispatch.split import split_rows as split_rows

_HOMES = {
    "PerShard": "phalanx.dispatch.batch_metadata",
    "count_rows": "phalanx.dispatch.split",
    "join_rows": "phalanx.collect.join",
    "register_dispatch_mode": "phalanx.declare.dispatch_modes",
    "register_row_type": "phalanx.dispatch.shardable",
    "split_rows": "phalanx.dispatch.split",
}

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
