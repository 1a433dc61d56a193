"""Make small models and data: `python small_models.py FOLDER`.

A tokenizer of bytes, a random Llama of 115 thousand parameters, another with a value head, and 64 rows of data for
supervised training and for reinforcement learning. Nothing is downloaded.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForTokenClassification, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]
TEMPLATE = (
    "{% for m in messages %}{% if m['role']=='assistant' %}<|assistant|>{% else %}<|user|>{% endif %}"
    "{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token per byte, and a chat template."""
    words = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[2],
        additional_special_tokens=SPECIAL[3:],
    )
    made.chat_template = TEMPLATE
    return made


def rows(count: int = 64) -> tuple[list[Any], list[Any]]:
    """Return sums as conversations, and as prompts with their answers."""
    chosen = random.Random(0)
    pairs = [(chosen.randrange(99), chosen.randrange(99)) for _ in range(count)]
    prompts = [[{"role": "user", "content": f"{a}+{b}?"}] for a, b in pairs]
    chats = [
        {"messages": [*prompt, {"role": "assistant", "content": f"#### {a + b}"}]}
        for prompt, (a, b) in zip(prompts, pairs, strict=True)
    ]
    asked = [
        {
            "data_source": "openai/gsm8k",
            "prompt": prompt,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": index, "split": "train"},
        }
        for index, (prompt, (a, b)) in enumerate(zip(prompts, pairs, strict=True))
    ]
    return chats, asked


def main(folder: Path) -> None:
    """Write `policy`, `value`, `sft.parquet` and `rl.parquet` into the folder."""
    tokenizer, config = byte_tokenizer(), LlamaConfig(**SIZES)
    torch.manual_seed(0)
    LlamaForCausalLM(config).float().save_pretrained(folder / "policy")
    torch.manual_seed(1)
    # The head is saved with the model: a fresh one would be random in every run, and runs could not be compared.
    LlamaForTokenClassification(LlamaConfig(**SIZES, num_labels=1)).float().save_pretrained(folder / "value")
    for name in ("policy", "value"):
        tokenizer.save_pretrained(folder / name)
    for name, table in zip(("sft", "rl"), rows(), strict=True):
        pd.DataFrame(table).to_parquet(folder / f"{name}.parquet")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
