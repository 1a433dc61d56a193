"""``px.data``: row types, dispatch modes, and functions on rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.api.lazy_names import lazy_names

if TYPE_CHECKING:
    from phalanx.collect.join import join_rows as join_rows
    from phalanx.declare.dispatch_modes import register_dispatch_mode as register_dispatch_mode
    from phalanx.dispatch.batch_metadata import PerShard as PerShard
    from phalanx.dispatch.shardable import register_row_type as register_row_type
    from phalanx.dispatch.split import count_rows as count_rows
    from phalanx.dispatch.split import split_rows as split_rows

__getattr__, __dir__, __all__ = lazy_names(__name__)
