"""Queues between groups: batches, row leases, snapshots and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.api.lazy_names import lazy_names

if TYPE_CHECKING:
    from phalanx.channels.batch import Batch as Batch
    from phalanx.channels.channel_snapshots import restore as restore
    from phalanx.channels.channel_snapshots import snapshot as snapshot
    from phalanx.channels.staleness import RowLease as RowLease
    from phalanx.errors import ChannelClosed as ChannelClosed
    from phalanx.errors import ChannelEmpty as ChannelEmpty
    from phalanx.errors import ChannelError as ChannelError
    from phalanx.errors import ChannelFull as ChannelFull
    from phalanx.errors import ItemsLost as ItemsLost
    from phalanx.errors import StalenessTimeout as StalenessTimeout

__getattr__, __dir__, __all__ = lazy_names(__name__)
