"""vLLM as a role. vLLM itself is imported in the ranks, when an engine is created."""

from phalanx.engines.vllm.rollout import VllmRollout

__all__ = ["VllmRollout"]
