"""Llama's layers on megatron-core."""

from phalanx.compat.verl.models.llama.megatron.layers import ParallelLlamaMLP

__all__ = ["ParallelLlamaMLP"]
