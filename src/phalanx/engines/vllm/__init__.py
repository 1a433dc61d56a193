"""vLLM as a role. vLLM itself is imported only in ranks, when an engine is created."""

from phalanx.engines.vllm.rollout import VllmRollout

__all__ = ["VllmRollout"]
