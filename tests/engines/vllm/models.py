"""Small models and a tokenizer, and a source of weights that may not fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import phalanx as px
from tests.conformance.engines import Source

END = 1
CONTEXT = 128


def save_model(folder: Path, kind: str = "Qwen2", *, tied: bool = False, end: int | None = END) -> str:
    """Save a small random model, and return its folder."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=end,
        pad_token_id=None,
        initializer_range=0.2,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.save_pretrained(folder)
    return str(folder)


def save_tokenizer(folder: Path) -> str:
    """Save a tokenizer of the words "w0" to "w127", without a model, whose type of tokenizer would be used."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({f"w{token}": token for token in range(128)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)
    return str(folder)


def load_model(folder: str) -> Any:
    """Return the model that :func:`save_model` saved."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class OddSource(Source):
    """A source that also publishes "odd" weights."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.sent: dict[str, torch.Tensor] = {}
        self.publish_weights("odd", lambda: self.sent)

    @px.register
    def send(self, without: Sequence[str] = (), shapes: dict[str, tuple[int, ...]] | None = None) -> None:
        """Set the weights published as "odd": those of the model without some, or with other shapes."""
        found: dict[str, torch.Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        self.sent = {name: one.detach() for name, one in found.items() if name not in without}
        self.sent.update((name, torch.zeros(shape)) for name, shape in (shapes or {}).items())
