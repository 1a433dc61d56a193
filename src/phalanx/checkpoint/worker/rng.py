"""The random generators of a process as a part of its state."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

__all__ = ["Generators"]


class Generators:
    """Those of torch, of ``device`` too where it is an accelerator, of numpy and of ``random``."""

    def __init__(self, device: Any) -> None:
        kind = torch.device(device).type
        module = getattr(torch, kind, None)
        self._device = torch.device(device)
        self._accelerator: Any = module if kind != "cpu" and hasattr(module, "get_rng_state") else None

    def state_dict(self) -> dict[str, Any]:
        """All of them."""
        state: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state(),
            "random": random.getstate(),
        }
        if self._accelerator is not None:
            state["accelerator"] = self._accelerator.get_rng_state(self._device)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; what was saved without an accelerator, or with one, is taken as far as it goes."""
        torch.set_rng_state(state["torch"])
        np.random.set_state(state["numpy"])
        random.setstate(state["random"])
        if self._accelerator is not None and "accelerator" in state:
            self._accelerator.set_rng_state(state["accelerator"], self._device)
