"""Serving engines as roles: the base class, its data types, and helpers for drivers. Each engine is a module of its
own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.facade import lazy_names

if TYPE_CHECKING:
    from phalanx.api.sticky import sticky as sticky
    from phalanx.engines.endpoints import endpoints as endpoints
    from phalanx.engines.engine import RolloutEngine as RolloutEngine
    from phalanx.engines.engine_requests import Answer as Answer
    from phalanx.engines.engine_requests import SampledToken as SampledToken
    from phalanx.engines.engine_requests import Vocabulary as Vocabulary
    from phalanx.engines.engine_types import Capabilities as Capabilities
    from phalanx.engines.engine_types import Completion as Completion
    from phalanx.engines.engine_types import Endpoint as Endpoint
    from phalanx.engines.engine_types import EngineStatistics as EngineStatistics
    from phalanx.engines.engine_types import SamplingParams as SamplingParams
    from phalanx.engines.engine_types import Tokens as Tokens
    from phalanx.engines.model_runner import ModelRunner as ModelRunner

_HOMES = {
    "Answer": "phalanx.engines.engine_requests",
    "Capabilities": "phalanx.engines.engine_types",
    "Completion": "phalanx.engines.engine_types",
    "Endpoint": "phalanx.engines.engine_types",
    "EngineStatistics": "phalanx.engines.engine_types",
    "ModelRunner": "phalanx.engines.model_runner",
    "RolloutEngine": "phalanx.engines.engine",
    "SampledToken": "phalanx.engines.engine_requests",
    "SamplingParams": "phalanx.engines.engine_types",
    "Tokens": "phalanx.engines.engine_types",
    "Vocabulary": "phalanx.engines.engine_requests",
    "endpoints": "phalanx.engines.endpoints",
    "sticky": "phalanx.api.sticky",
}

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
