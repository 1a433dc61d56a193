"""Models and requests of both contenders."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

THREADS = "2"
OPTIONS: dict[str, Any] = {
    "kv_cache_memory_bytes": 128 << 20,
    "load_format": "dummy",
    "max_num_seqs": 64,
    "enforce_eager": True,
}
REQUESTS, TOKENS = 128, 48
SMALL, LARGE = "small", "large"


def save_models(folder: Path) -> None:
    """Save two configurations: a model with short steps, which show the overhead, and a model of 520 MB."""
    from transformers import LlamaConfig

    shapes = {
        SMALL: {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4},
        LARGE: {"hidden_size": 1024, "intermediate_size": 2560, "num_hidden_layers": 24},
    }
    for name, shape in shapes.items():
        LlamaConfig(
            vocab_size=8192,
            num_attention_heads=shape["hidden_size"] // 64,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            architectures=["LlamaForCausalLM"],
            eos_token_id=None,
            bos_token_id=None,
            dtype="float32" if name == SMALL else "bfloat16",
            **shape,
        ).save_pretrained(folder / name)


def prompts() -> list[list[int]]:
    """Return prompts, equal in every process."""
    source = random.Random(0)
    return [[source.randrange(8192) for _ in range(source.randrange(8, 32))] for _ in range(REQUESTS)]


def model_of(folder: str) -> Any:
    """Return a model with random weights of the configuration's type."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    return AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, str(config.dtype).removeprefix("torch."))
    )
