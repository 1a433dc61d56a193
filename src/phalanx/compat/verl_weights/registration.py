"""``checkpoint_engine.backend=phalanx``: importing this puts the engine into verl's registry."""

from __future__ import annotations

from verl.checkpoint_engine.base import (  # pyright: ignore[reportMissingImports]
    CheckpointEngine,
    CheckpointEngineRegistry,
)

from phalanx.compat.verl_weights.engine import WeightsEngine

__all__ = ["PhalanxCheckpointEngine"]


@CheckpointEngineRegistry.register("phalanx")
class PhalanxCheckpointEngine(WeightsEngine, CheckpointEngine):
    """See :class:`phalanx.compat.verl_weights.engine.WeightsEngine`; its options are ``engine_kwargs.phalanx``."""
