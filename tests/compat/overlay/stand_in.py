"""Stand-in for an installed verl: its plugin hooks and the modules that the controller uses."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
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
MODULES = {
    "__init__": HOOKS,
    "protocol": """
class DataProto(list):
    concat = staticmethod(lambda parts: DataProto(sum(map(list, parts), [])))
    batch = property(lambda self: self)
    slice = lambda self, start, stop: DataProto(self[start:stop])
    select_idxs = lambda self, rows: DataProto(self[row] for row in rows)

class DataProtoFuture: ...
class BatchMeta: ...
""",
    "utils/__init__": "",
    "utils/transferqueue_utils": "def tqbridge(dispatch_mode): return lambda function: function",
    "plugin/__init__": "",
    "plugin/platform": "",
    "single_controller/__init__": "class Worker: ...",
    "single_controller/ray/__init__": "class RayWorkerGroup: ...",
}


def make_verl(folder: Path, version: str = "0.9.1", without: str = "") -> Path:
    """Make a package ``verl`` in ``folder`` and return the folder, which belongs on Python's path.

    Args:
        without: Module to leave out.
    """
    package = folder / "verl"
    for name, text in MODULES.items():
        if name != without:
            file = package / f"{name}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    if version:
        (package / "version").mkdir()
        (package / "version" / "version").write_text(f"{version}\n")
    return folder


def make_entry_point(folder: Path) -> Path:
    """Make the entry point of verl's plugin that pyproject.toml declares, and return ``folder``."""
    declared = re.search(r'"verl.plugins"\]\n(\w+) = "([\w.]+)"', (ROOT / "pyproject.toml").read_text())
    assert declared is not None
    metadata = folder / "phalanx-0.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: phalanx\nVersion: 0.0\n")
    (metadata / "entry_points.txt").write_text(f"[verl.plugins]\n{declared[1]} = {declared[2]}\n")
    return folder
