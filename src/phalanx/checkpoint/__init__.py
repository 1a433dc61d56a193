"""Checkpoints of runs: the manager of a folder of steps, futures and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.api.lazy_names import lazy_names

if TYPE_CHECKING:
    from phalanx.checkpoint.manager import CheckpointManager as CheckpointManager
    from phalanx.checkpoint.save_future import SaveFuture as SaveFuture
    from phalanx.checkpoint.save_load import CheckpointInfo as CheckpointInfo
    from phalanx.errors import CheckpointCorrupted as CheckpointCorrupted
    from phalanx.errors import CheckpointError as CheckpointError
    from phalanx.errors import CheckpointLocked as CheckpointLocked
    from phalanx.errors import CheckpointMismatch as CheckpointMismatch
    from phalanx.group.epoch import Snapshot as Snapshot

__getattr__, __dir__, __all__ = lazy_names(__name__)
