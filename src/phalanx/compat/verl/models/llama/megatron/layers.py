"""Llama's layers, sharded over Megatron's tp ranks."""

from __future__ import annotations

from typing import Any

from phalanx.parallel import megatron as native


class ParallelLlamaMLP(native.ParallelLlamaMLP):
    """The gated MLP of Llama, sharded over the tp ranks.

    Args:
        config: configuration with ``hidden_size``, ``intermediate_size`` and ``hidden_act``, as of Hugging Face.
        megatron_config: result of ``init_model_parallel_config``; None for its defaults.
    """

    def __init__(self, config: Any, megatron_config: Any = None) -> None:
        if megatron_config is None:
            from phalanx.compat.verl.utils.megatron_utils import init_model_parallel_config

            megatron_config = init_model_parallel_config({})
        super().__init__(
            config.hidden_size, config.intermediate_size, megatron_config, hidden_act=config.hidden_act
        )
        self.config = config
