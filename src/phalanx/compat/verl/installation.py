"""``install()``, the names of verl's tutorial for machines without verl, and the runtimes of worker processes."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

from phalanx.compat.verl import overlay as over_verl

_NAME = "verl"
#: Attribute of ``ray.init`` that provides the names.
_MARK = "phalanx"
#: A folder with a package ``verl`` that provides the names in processes with the folder on their path.
ALIAS_FOLDER = str(Path(__file__).parents[1] / "_alias")


def _home_of(fullname: str) -> str | None:
    """Return the module of this package for a name of verl; None for other packages.

    Raises:
        ModuleNotFoundError: if this package does not provide that name of verl.
    """
    package, _, name = fullname.partition(".")
    if package != _NAME:
        return None
    home = over_verl.home_of(name)
    if home is None:
        raise ModuleNotFoundError(
            f"No module named {fullname!r}: verl is not installed, and Phalanx provides only "
            "verl.single_controller and what verl's tutorial imports (docs/migrating-from-verl.md). For all else: "
            "pip install verl",
            name=fullname,
        )
    return home


#: Finder of the tutorial's names of verl.
_FINDER = over_verl.Redirect(_home_of)


def install(*, overlay: bool = False) -> None:
    """Make Phalanx verl's single controller, in this process and in the Ray processes of this driver. Idempotent.

    If verl is installed, only ``verl.single_controller`` comes from Phalanx. Call it before ``ray.init``, and before
    verl's own controller is imported. Without verl, ``import verl`` imports the single controller and the other names
    of verl's tutorial; after ``ray.init``, only workers of groups get the names, with a warning.

    Args:
        overlay: True requires an installed verl.

    Raises:
        AlreadyImported: if verl's own controller is imported, or Ray was started without the overlay (also an
            ImportError).
        UnfitVerl: if the installed verl is too old, too new, broken or imported in part; with ``overlay``, if there is
            none (also an ImportError).
    """
    if overlay or over_verl.installed_version()[1]:
        over_verl.install()
        return
    install_here(strict=True)
    _reach_jobs()


def install_here(*, strict: bool) -> None:
    """Provide the tutorial's names in this process, unless verl is installed.

    Args:
        strict: raise AlreadyImported if another ``verl`` is imported.
    """
    if over_verl.installed_version()[1]:
        return
    present = sys.modules.get(_NAME)
    home, file = sys.modules[over_verl.HOME], getattr(present, "__file__", None)
    if present is not None and present is not home and not (file or "").startswith(ALIAS_FOLDER):
        if strict:
            raise over_verl.AlreadyImported(
                f"another module verl is imported, from {file}, which is not an installed verl; call "
                "phalanx.compat.verl.install() before the first import of verl"
            )
        return
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    sys.modules[_NAME] = home


def make_runtime(overlay: bool, services: Any) -> Any:
    """Return the runtime of a worker process with the overlay, or with the tutorial's names of verl.

    Raises:
        UnfitVerl: if verl cannot be imported.
    """
    if overlay:
        over_verl.install_here()
        over_verl.import_verl()
    else:
        install_here(strict=False)
    from phalanx.compat.verl.single_controller.base.decorator import references_in
    from phalanx.worker.handlers import make_runtime as native

    services.upstream = references_in
    return native(services)


def _reach_jobs() -> None:
    """Provide the names in the Ray processes of this driver, on a cluster that it starts or joins later."""
    import ray

    if hasattr(ray.init, _MARK):
        return
    if ray.is_initialized() and ALIAS_FOLDER not in sys.path:
        warnings.warn(
            "phalanx.compat.verl.install() was called after ray.init: the workers of groups have its names of verl, "
            "other tasks and actors do not. Call install() before ray.init, or in those tasks and actors before they "
            "import verl",
            RuntimeWarning,
            stacklevel=3,
        )
    over_verl.amend_ray_init(_MARK, _with_alias)


def _with_alias(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of ``ray.init`` that put the alias folder on the path of this driver's Ray processes."""
    from ray.job_config import JobConfig

    config = kwargs.get("job_config") or JobConfig()
    paths = getattr(config, "_py_driver_sys_path", None)
    if isinstance(paths, list) and ALIAS_FOLDER not in paths:
        paths.append(ALIAS_FOLDER)
        return {**kwargs, "job_config": config}
    return kwargs
