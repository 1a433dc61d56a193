"""A rank's part of a folder in Hugging Face's format: its boxes, at their places in files that are there already."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from phalanx.checkpoint.storage.safetensors_layout import Place, runs
from phalanx.checkpoint.storage.storage import advice
from phalanx.checkpoint.worker.write import elements_of
from phalanx.errors import CheckpointError
from phalanx.weights.planning.boxes import Box

__all__ = ["save_config", "write_boxes"]


def write_boxes(
    folder: str, places: Mapping[str, Place], boxes: Iterable[tuple[str, Box, torch.Tensor]]
) -> int:
    """Write boxes of tensors, given by name, and return once they will be there after a loss of power; their bytes.

    Raises:
        CheckpointError: a file cannot be written; says why.
    """
    files: dict[str, int] = {}
    written = 0
    try:
        for name, box, tensor in boxes:
            place = places[name]
            if place.file not in files:
                files[place.file] = os.open(f"{folder}/{place.file}", os.O_WRONLY)
            data = elements_of(tensor)
            itemsize, at = tensor.element_size(), 0
            for first, count in runs(box, place.shape):
                _whole(files[place.file], data[at : at + count * itemsize], place.start + first * itemsize)
                at += count * itemsize
            written += at
        for number in files.values():
            os.fsync(number)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} is not there on this rank's node; choose a path that the driver and all ranks share"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {advice(error)}") from error
    finally:
        for number in files.values():
            os.close(number)
    return written


def _whole(number: int, data: Any, at: int) -> None:
    while data:
        count = os.pwrite(number, data, at)
        data, at = data[count:], at + count


def save_config(model: Any, folder: str) -> None:
    """What else belongs into such a folder, where the model is one of transformers."""
    save: Any = getattr(getattr(model, "config", None), "save_pretrained", None)
    if callable(save):
        save(folder)
