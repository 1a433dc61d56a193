"""Serving engines as roles: what all of them have in common. Each engine is a module of its own, imported when used."""

from phalanx.engines.engine import RolloutEngine
from phalanx.engines.leaves import (
    Capabilities,
    Completion,
    Endpoint,
    EngineStatistics,
    Sampling,
    Tokens,
)
from phalanx.engines.machine import Machine
from phalanx.engines.requests import Answer, Drawn, Vocabulary

__all__ = [
    "Answer",
    "Capabilities",
    "Completion",
    "Drawn",
    "Endpoint",
    "EngineStatistics",
    "Machine",
    "RolloutEngine",
    "Sampling",
    "Tokens",
    "Vocabulary",
]
