"""Parts of the image example: photographs as a data set, CLIP, embedding workers, a contact sheet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

import phalanx as px

Array = np.ndarray[Any, Any]

PHOTOGRAPHS = ("astronaut", "chelsea", "coffee", "rocket", "camera", "coins", "hubble_deep_field", "brick")
"""Photographs in scikit-image's wheel; others would be downloaded."""

SIDE = 128  # pixels
CACHED = "openai/clip-vit-base-patch32"
RANDOM = "random"


def make_images(folder: Path, per_class: int, seed: int = 0) -> list[Path]:
    """Write JPEGs ``folder/<class>/<class>_<n>.jpg``: random crops of photographs, mirrored and brightened."""
    from skimage import data

    random = np.random.default_rng(seed)
    paths: list[Path] = []
    for name in PHOTOGRAPHS:
        photograph = Image.fromarray(getattr(data, name)()).convert("RGB")
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(per_class):
            paths.append(folder / name / f"{name}_{number}.jpg")
            _variant(photograph, random).save(paths[-1], quality=90)
    return paths


def _variant(photograph: Image.Image, random: np.random.Generator) -> Image.Image:
    shorter = min(photograph.size)
    side = int(shorter * random.uniform(0.55, 0.95))
    left, top = (int(random.integers(0, extent - side + 1)) for extent in photograph.size)
    crop = photograph.crop((left, top, left + side, top + side)).resize((SIDE, SIDE))
    if random.random() < 0.5:
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    brightness = random.uniform(0.85, 1.15)
    return crop.point([min(255, int(value * brightness)) for value in range(256)] * 3)


def choose_model(asked: str | None) -> str:
    """Return ``asked``; without it the tutorial's CLIP if it was downloaded before, else :data:`RANDOM`."""
    if asked is not None:
        return asked
    from huggingface_hub import try_to_load_from_cache

    return CACHED if isinstance(try_to_load_from_cache(CACHED, "config.json"), str) else RANDOM


def load_clip(model: str, device: str) -> tuple[Any, Any]:
    """Return (CLIP, its image processor) from a hub name or a local folder, or a small CLIP with random weights.

    The random weights are equal in every process.

    Raises:
        OSError: if neither hub nor folder has such a model.
    """
    from transformers.utils import logging

    logging.set_verbosity_error()  # without torchvision it says that images are processed by Pillow
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    if model != RANDOM:
        return CLIPModel.from_pretrained(model).to(device).eval(), CLIPImageProcessor.from_pretrained(model)
    vision = {"image_size": 64, "patch_size": 16, "hidden_size": 64, "intermediate_size": 128}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 16}
    text |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = CLIPConfig(vision_config=vision | layers, text_config=text | layers, projection_dim=64)
    torch.manual_seed(0)
    size = {"shortest_edge": 64}
    processor = CLIPImageProcessor(size=size, crop_size={"height": 64, "width": 64})
    return CLIPModel(config).to(device).eval(), processor


class Embedder:
    """A model that turns images into unit vectors."""

    def __init__(self, model: str, device: str) -> None:
        self.model, self.processor = load_clip(model, device)
        self.device = device

    def __call__(self, images: Sequence[Array]) -> Array:
        """Return float32 (images, embedding) of uint8 arrays (height, width, 3)."""
        if not len(images):
            return np.zeros((0, self.model.config.projection_dim), np.float32)
        pictures = [Image.fromarray(np.uint8(image)).convert("RGB") for image in images]
        inputs = self.processor(images=pictures, return_tensors="pt").to(self.device)
        with torch.inference_mode():
            features = self.model.get_image_features(**inputs)
        pooled = getattr(features, "pooler_output", features)  # transformers 4 gave the tensor itself
        return torch.nn.functional.normalize(pooled.float(), dim=-1).cpu().numpy()


class EmbedImages:
    """A stage of a Ray Data pipeline, which adds the column "embedding"."""

    def __init__(self, model: str, device: str) -> None:
        self.embed = Embedder(model, device)

    def __call__(self, batch: dict[str, Array]) -> dict[str, Array]:
        return {**batch, "embedding": self.embed(batch["image"])}


class EmbeddingWorker(px.Worker):
    """An embedder as a worker: rows are split over the ranks, embeddings joined in order."""

    def __init__(self, model: str) -> None:
        self.embedder = Embedder(model, str(self.device))

    @px.register(px.Dispatch.ROWS)
    def embed(self, images: Sequence[Array]) -> Array:
        return self.embedder(images)


def nearest(embeddings: Array, queries: Sequence[int], count: int) -> list[list[int]]:
    """Return, for each query (a row number), the ``count`` other rows with the largest cosine, best first.

    The mean of the embeddings is subtracted: features that all images share distinguish none.
    """
    centered = embeddings - embeddings.mean(axis=0)
    centered /= np.linalg.norm(centered, axis=1, keepdims=True).clip(1e-12)
    similar = centered[list(queries)] @ centered.T
    similar[range(len(queries)), list(queries)] = -np.inf
    return np.argsort(-similar, axis=1, kind="stable")[:, :count].tolist()


def contact_sheet(rows: Sequence[Sequence[Path]], label: Callable[[Path], str], target: Path) -> None:
    """Return a PNG with a row per query: the query, a gap, its neighbors; a label under each."""
    gap, under = 12, 16
    width = gap * 2 + SIDE * max(len(row) for row in rows)
    sheet = Image.new("RGB", (width, (SIDE + under) * len(rows)), "white")
    draw = ImageDraw.Draw(sheet)
    for line, row in enumerate(rows):
        for column, path in enumerate(row):
            left, top = column * SIDE + (gap if column else 0), line * (SIDE + under)
            with Image.open(path) as picture:
                sheet.paste(picture.convert("RGB").resize((SIDE, SIDE)), (left, top))
            draw.text((left + 2, top + SIDE + 2), label(path), fill="black")
    target.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(target)
