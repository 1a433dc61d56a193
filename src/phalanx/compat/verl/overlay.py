"""The overlay: the real verl, whose single controller is this package; all else of verl stays verl's own.

``import verl.single_controller...`` gives ``phalanx.compat.verl.single_controller...``. In turn this package's
``protocol`` and ``utils`` are the real verl's, so that there is one ``DataProto``.

A process is reached before it imports anything of verl's controller: by :func:`install` in the driver, and in every
process that has ``PHALANX_VERL=1`` in its environment as soon as anything of verl (by verl's own hooks for plugins) or
of this package is imported. Where it cannot take effect any more it raises: a group is never verl's without a word.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.compat.verl.errors import AlreadyImported, UnfitVerl
from phalanx.compat.verl.jobs import ASKED, HOOK, PLUGIN, carried, reach_jobs
from phalanx.compat.verl.redirect import Redirect
from phalanx.compat.verl.rows import register_rows
from phalanx.config import overlays_verl

_HOME = "phalanx.compat.verl"
_CONTROLLER = "verl.single_controller"
_GIVEN = {
    _CONTROLLER: f"{_HOME}.single_controller",
    f"{_HOME}.protocol": "verl.protocol",
    f"{_HOME}.utils": "verl.utils",
}
#: The line of verl whose callers this controller serves; its latest release is the one that it is tested with.
LINE, TESTED = "0.9.", "0.9.1"


class _Overlay(Redirect):
    """verl's controller from here, and our protocol and helpers from verl."""

    def home_of(self, fullname: str) -> str | None:
        """The other name of a module that is exchanged."""
        for name, home in _GIVEN.items():
            if fullname == name or fullname.startswith(name + "."):
                return home + fullname[len(name) :]
        return None


def active() -> bool:
    """Whether this process has the overlay."""
    return any(isinstance(finder, _Overlay) for finder in sys.meta_path)


def install() -> None:
    """Put the overlay into this process, its children, and all Ray processes of this driver.

    Raises:
        AlreadyImported: too late for it: the error names the module that was imported too early.
        UnfitVerl: verl is not installed, or is not of the line that this controller serves.
    """
    install_here()
    _check_jobs()
    os.environ.update(carried(os.environ))
    reach_jobs()


def install_here() -> None:
    """Put the overlay into this process. Idempotent; raises as :func:`install`."""
    if not active():
        _check_nothing_early()
        check_version()
        sys.meta_path.insert(0, _Overlay())
    _register_rows()


def _register_rows() -> None:
    protocol = sys.modules.get("verl.protocol")
    if protocol is not None and hasattr(protocol, "DataProto"):  # else verl's import is still under way
        register_rows(protocol.DataProto)


def installed_version() -> tuple[str, str]:
    """Version and folder of the verl that ``import verl`` finds; empty texts where there is none."""
    folder = _folder()
    if folder is None:
        return "", ""
    file = folder / "version" / "version"
    return (file.read_text().strip() if file.is_file() else "unknown"), str(folder)


def _folder() -> Path | None:
    present = sys.modules.get("verl")
    spec = present.__spec__ if present is not None else importlib.util.find_spec("verl")
    origin = None if spec is None else spec.origin
    return None if origin is None else Path(origin).parent


def check_version() -> None:
    """See to it that the verl that is installed is one for this controller. Raises UnfitVerl."""
    version, folder = installed_version()
    if not folder:
        raise UnfitVerl(
            f"Phalanx was asked to be verl's controller, but {sys.executable} has no verl: pip install "
            f"'verl=={TESTED}' there, or use phalanx.compat.verl.install() for code that needs verl's controller alone"
        )
    if not version.startswith(LINE):
        raise UnfitVerl(
            f"Phalanx was asked to be verl's controller, but verl in {folder} is version {version}: it serves verl "
            f"{LINE}x. pip install 'verl=={TESTED}', or run it without Phalanx (no `phalanx verl`, no {ASKED})"
        )


def _check_nothing_early() -> None:
    theirs = sorted(_loaded(_CONTROLLER))
    if theirs:
        raise AlreadyImported(
            f"verl's own controller is in use in this process: {theirs[0]} was imported before Phalanx could take its "
            f"place. Start the program with `phalanx verl ...`, or call phalanx.compat.verl.install(overlay=True) "
            f"before anything imports {_CONTROLLER}; a module in {HOOK} that imports it must come after {PLUGIN}"
        )
    ours = sorted([*_loaded(f"{_HOME}.protocol"), *_loaded(f"{_HOME}.utils")])
    if ours or getattr(sys.modules.get("verl"), "__name__", "verl") != "verl":
        raise AlreadyImported(
            f"the drop-in without verl is in use in this process ({', '.join(ours) or 'install()'}), which has "
            "a DataProto of its own: call phalanx.compat.verl.install(overlay=True) before it is imported, and not "
            "install() as well"
        )


def _loaded(name: str) -> Iterator[str]:
    """Modules of that package that are loaded under their own name."""
    for key, module in list(sys.modules.items()):
        if (key == name or key.startswith(name + ".")) and getattr(module, "__name__", key) == key:
            yield key


def _check_jobs() -> None:
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized() and not _told_by_others(ray):
        raise AlreadyImported(
            "phalanx.compat.verl.install(overlay=True) was called after ray.init, or verl imported after it: Ray has "
            "told its processes about this driver already, and actors that are trainers would get verl's own "
            "controller. Call it before ray.init, or import verl before it, or start the program with `phalanx verl "
            "...`"
        )


def _told_by_others(ray: Any) -> bool:
    """Whether processes that Ray starts from here have the variables all the same, which this one has."""
    if not overlays_verl():
        return False
    private = ray._private.worker
    node = private._global_node
    if private.global_worker.mode == private.WORKER_MODE or (node is not None and node.is_head()):
        return True  # Ray's own process, or a cluster that this one started, with its environment
    environment = ray.get_runtime_context().runtime_env.get("env_vars") or {}
    return ASKED in environment
