"""Small models, their tokenizer and training rows, made in verl's environment."""

from __future__ import annotations

import subprocess
from pathlib import Path

from bench.trainers.programs import SITE


def small_models(python: Path, folder: Path) -> Path:
    """Return the folder with `policy`, `value`, `sft.parquet` and `rl.parquet`.

    Raises:
        RuntimeError: if they cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [str(python), str(SITE / "small_models.py"), str(folder)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if made.returncode:
        raise RuntimeError(f"small models could not be made:\n{made.stderr[-3000:]}")
    return folder
