"""Engines as roles: the base class, its data types, and helpers for drivers. Each engine is a module of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.api.lazy_names import lazy_names

if TYPE_CHECKING:
    from phalanx.api.sticky import sticky as sticky
    from phalanx.engines.engine import RolloutEngine as RolloutEngine
    from phalanx.engines.engine import endpoints as endpoints
    from phalanx.engines.engine_requests import Answer as Answer
    from phalanx.engines.engine_requests import ModelRunner as ModelRunner
    from phalanx.engines.engine_requests import SampledToken as SampledToken
    from phalanx.engines.engine_types import Capabilities as Capabilities
    from phalanx.engines.engine_types import Completion as Completion
    from phalanx.engines.engine_types import Endpoint as Endpoint
    from phalanx.engines.engine_types import EngineStatistics as EngineStatistics
    from phalanx.engines.engine_types import SamplingParams as SamplingParams
    from phalanx.engines.engine_types import Tokens as Tokens
    from phalanx.engines.engine_types import Vocabulary as Vocabulary

__getattr__, __dir__, __all__ = lazy_names(__name__)
