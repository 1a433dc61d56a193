"""vLLM as a role. vLLM itself is imported in the ranks, when an engine is made."""

from phalanx.engines.vllm.rollout import AsyncVllmRollout, VllmRollout

__all__ = ["AsyncVllmRollout", "VllmRollout"]
