"""A package that stands for the real verl: the drop-in's own protocol and helpers under verl's name, verl's hooks."""

from __future__ import annotations

import shutil
from pathlib import Path

import phalanx.compat.verl

HOOKS = """
import importlib, logging, os
from .protocol import DataProto

__version__ = "0.9.1"

for _name in filter(None, os.getenv("VERL_USE_EXTERNAL_MODULES", "").split(",")):
    importlib.import_module(_name)

_policy = os.getenv("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
if _policy != "none":
    from importlib.metadata import entry_points

    for _plugin in entry_points(group="verl.plugins"):
        if _policy != "auto" and _plugin.name not in _policy.split(","):
            continue
        try:
            _plugin.load()
        except Exception as _error:
            logging.getLogger(__name__).debug("Failed to load plugin %s", _error)
"""
LIGHT = """
class DataProto:
    concat = slice = select_idxs = len

class DataProtoFuture:
    pass
"""
THEIRS = '''
class RayWorkerGroup:
    """verl's own."""
'''


def make_verl(folder: Path, version: str = "0.9.1", *, whole: bool = False) -> Path:
    """A package ``verl`` in ``folder``, which is given back: to be put on the path of Python.

    ``whole``: with a ``DataProto`` that does its work, whose import takes long.
    """
    home = Path(phalanx.compat.verl.__file__).parent
    package = folder / "verl"
    for name in ("protocol.py", "rows.py", "errors.py", "_proto", "utils"):
        given, made = home / name, package / name
        if given.is_dir():
            shutil.copytree(given, made, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            package.mkdir(parents=True, exist_ok=True)
            shutil.copy(given, made)
    for file in package.rglob("*.py"):
        file.write_text(file.read_text().replace("phalanx.compat.verl", "verl"))
    (package / "__init__.py").write_text(HOOKS)
    if not whole:
        (package / "protocol.py").write_text(LIGHT)
    (package / "version").mkdir()
    (package / "version" / "version").write_text(f"{version}\n")
    ray = package / "single_controller" / "ray"
    ray.mkdir(parents=True)
    (ray.parent / "__init__.py").write_text("class Worker: ...")
    (ray / "__init__.py").write_text(THEIRS)
    return folder


def make_entry_point(folder: Path) -> Path:
    """What tells verl of the plugin where Phalanx is installed."""
    metadata = folder / "phalanx_hook-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: phalanx-hook\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("[verl.plugins]\nphalanx = phalanx.compat.verl_plugin\n")
    return folder
