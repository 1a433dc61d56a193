"""``install()``: makes ``import verl`` give this package, here and in the Ray processes of this driver."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

from phalanx.compat.verl import overlay as over_verl
from phalanx.compat.verl.errors import AlreadyImported
from phalanx.compat.verl.redirect import Redirect

_NAME = "verl"
_HOME = "phalanx.compat.verl"
#: A folder with a package ``verl`` that installs the drop-in when it is imported: for processes not yet reached.
ALIAS_FOLDER = str(Path(__file__).parents[1] / "_alias")


class _Alias(Redirect):
    """This package as ``verl``, and all that it has; nothing else of that name is there."""

    def home_of(self, fullname: str) -> str | None:
        """The module of this package. Raises ModuleNotFoundError where it has none of verl's name."""
        if fullname != _NAME and not fullname.startswith(_NAME + "."):
            return None
        home = _home_of(fullname)
        try:
            found = importlib.util.find_spec(home)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: `verl` is phalanx's drop-in here, which has its single controller, "
                "DataProto and their helpers (docs/migrating-from-verl.md); phalanx.compat.verl.install(overlay=True) "
                "keeps an installed verl and its trainers",
                name=fullname,
            )
        return home


def _home_of(fullname: str) -> str:
    return _HOME + fullname[len(_NAME) :]


def install(*, overlay: bool = False) -> None:
    """Make ``import verl`` give this package, in this process and in the Ray processes of this driver. Idempotent.

    Call it before anything of verl is imported. Workers of a ``RayWorkerGroup`` are reached in any case; other
    tasks and actors (a trainer that runs as a Ray actor) where ``ray.init`` comes after it. Ray tells its processes
    about a driver once, in ``ray.init``; later there is a ``RuntimeWarning`` with what to do for those.

    Args:
        overlay: keep the installed verl, its trainers and its ``DataProto``, and give only ``verl.single_controller``
            from here. Call it before ``ray.init``, and before anything imports verl's own controller.

    Raises:
        AlreadyImported: the real verl has been imported, or with ``overlay`` its controller, or ``ray.init`` was
            called (also an ImportError).
        UnfitVerl: with ``overlay``, verl is not installed, or of another line (also an ImportError).
    """
    if overlay:
        over_verl.install()
        return
    if over_verl.active():
        raise AlreadyImported(
            "install() after install(overlay=True), or with PHALANX_VERL=1: the real verl is in use with this "
            "controller already; leave one of them out"
        )
    install_here(strict=True)
    _reach_children()
    _reach_jobs()


def install_here(*, strict: bool) -> None:
    """Make ``import verl`` give this package in this process; ``strict``: refuse where the real one is in use."""
    present = sys.modules.get(_NAME)
    home = sys.modules[_HOME]
    foreign = present is not None and present is not home and not _is_alias(present)
    if foreign and strict:
        raise AlreadyImported(
            f"the real verl has been imported already, from {getattr(present, '__file__', None)}; call "
            "phalanx.compat.verl.install() before the first import of it"
        )
    if foreign:
        return
    if not any(isinstance(finder, _Alias) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Alias())
    sys.modules[_NAME] = home


def _is_alias(module: ModuleType) -> bool:
    return (getattr(module, "__file__", None) or "").startswith(ALIAS_FOLDER)


def _reach_children() -> None:
    """Processes started from here, those of a local Ray cluster among them."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if ALIAS_FOLDER not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([ALIAS_FOLDER, *paths])


def _reach_jobs() -> None:
    """Every Ray process that works for this driver, on a cluster that it joins later."""
    import ray
    from ray.job_config import JobConfig

    if getattr(ray.init, "phalanx", False):
        return
    if ray.is_initialized() and ALIAS_FOLDER not in sys.path:
        warnings.warn(
            "phalanx.compat.verl.install() was called after ray.init: the workers of groups get the drop-in, other "
            "tasks and actors that import verl do not. Call install() before ray.init, or in those tasks and actors "
            "before they import verl",
            RuntimeWarning,
            stacklevel=3,
        )
    original = ray.init

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("job_config") or JobConfig()
        paths = getattr(config, "_py_driver_sys_path", None)
        if isinstance(paths, list) and ALIAS_FOLDER not in paths:
            paths.append(ALIAS_FOLDER)
            kwargs["job_config"] = config
        return original(*args, **kwargs)

    init.phalanx = True  # type: ignore[attr-defined]
    ray.init = init
