"""Examples as modules of the test's process."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "examples"


@contextmanager
def loaded(script: str, backend: str) -> Generator[ModuleType]:
    """Yield an example, which imports its neighbors and makes pools on ``backend``."""
    name = f"example_{script}"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        patch.setenv("PHALANX_BACKEND", backend)
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{script}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, name, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        yield module
