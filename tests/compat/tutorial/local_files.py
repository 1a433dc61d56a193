"""Stand-ins for the tutorial's downloads: images in folders by class, and a small CLIP with random weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer


def make_images(folder: Path) -> None:
    """``folder/<class>/<class>_<n>.jpg``."""
    random = np.random.default_rng(0)
    for name in ("miniature_poodle", "otterhound"):
        (folder / name).mkdir(parents=True)
        for number in range(3):
            pixels = random.integers(0, 255, (72, 72, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{name}_{number}.jpg")


def make_clip(folder: Path) -> None:
    """A folder that ``CLIPModel`` and ``CLIPProcessor`` load from."""
    folder.mkdir(parents=True)
    vocabulary = {"<|startoftext|>": 0, "<|endoftext|>": 1, "a</w>": 2, "a": 3}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 64}
    text = {"vocab_size": 64, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1}
    config = CLIPConfig(
        vision_config={"image_size": 64, "patch_size": 32, **layers},
        text_config={**text, "pad_token_id": 1, **layers},
        projection_dim=16,
    )
    torch.manual_seed(0)
    CLIPModel(config).save_pretrained(folder)
    size = {"shortest_edge": 64}
    images = CLIPImageProcessor(size=size, crop_size={"height": 64, "width": 64})
    words = CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    CLIPProcessor(images, words).save_pretrained(folder)


if __name__ == "__main__":
    import sys

    make_images(Path(sys.argv[1]) / "doggos-dataset" / "train")
    make_clip(Path(sys.argv[1]) / "clip")
