"""The overlay: the installed verl with this package as its single controller.

``import verl.single_controller...`` imports ``phalanx.compat.verl.single_controller...``. All else is verl's own.
Without verl, ``installation`` provides the tutorial's names by a finder of the same class.

:func:`install` puts the overlay into the driver. Every process that has ``PHALANX_VERL=1`` in its environment gets the
overlay when verl (by verl's own hooks for plugins) or this package is imported. If the overlay cannot take effect, an
error is raised: a program never continues with verl's own controller unnoticed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from phalanx.config import overlays_verl, own_variables
from phalanx.dispatch.shardable import register_row_type
from phalanx.errors import DeclarationError, DispatchError
from phalanx.worker.bootstrap import importing

#: The module that verl imports at the end of its own import, and verl's variable that names it.
PLUGIN, HOOK = "phalanx.compat.verl_plugin", "VERL_USE_EXTERNAL_MODULES"
ASKED = "PHALANX_VERL"
#: Ray's variable with the configuration of a job, in the job's process (`ray job submit`).
_SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_CONTROLLER = "verl.single_controller"
#: The release of verl that this controller is tested with. Other patch releases of its line are accepted.
TESTED = "0.9.1"
#: Modules of verl that the controller uses or replaces.
_USED = ("protocol", "single_controller", "utils.transferqueue_utils", "plugin.platform")
#: Package with verl's names, and the modules of verl whose names are in a module of another name there.
HOME = "phalanx.compat.verl"
_ELSEWHERE = {
    "single_controller.ray.megatron": "megatron",
    "single_controller.base.megatron": "single_controller.base",
    "single_controller.base.megatron.worker": "single_controller.base.worker",
    "models": "megatron",
    "models.llama": "megatron",
    "models.llama.megatron": "megatron",
    "models.llama.megatron.layers": "megatron",
    "utils": "megatron",
    "utils.megatron_utils": "megatron",
}


class AlreadyImported(DeclarationError, ImportError):
    """A module of verl that was imported before Phalanx could replace it."""


class UnfitVerl(DeclarationError, ImportError):
    """The installed verl is missing, too old, too new, broken or imported in part."""


class VerlNotInstalled(DispatchError, ModuleNotFoundError):
    """A value or a dispatch mode needs an installed verl."""


def home_of(name: str) -> str | None:
    """Return the module here with the names of the module ``name`` of verl ("": of verl itself); None if none has."""
    if name.partition(".")[0] not in ("", "single_controller") and name not in _ELSEWHERE:
        return None
    home = f"{HOME}.{_ELSEWHERE.get(name, name)}" if name else HOME
    try:
        return home if importlib.util.find_spec(home) is not None else None
    except ModuleNotFoundError:
        return None


class Redirect(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder and loader of modules for which ``home_of`` returns another name; None leaves them to other finders."""

    def __init__(self, home_of: Callable[[str], str | None]) -> None:
        self.home_of = home_of

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec that imports the home module, if there is one."""
        home = self.home_of(fullname)
        found = None if home is None else importlib.util.find_spec(home)
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the home module, imported under its own name."""
        module = importlib.import_module(self.home_of(spec.name) or spec.name)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, which the import system has replaced by the alias's spec."""
        alias = module.__spec__
        if alias is not None and alias.loader is self:
            module.__spec__ = alias.loader_state


def _home_of(fullname: str) -> str | None:
    """Return this package's module for a module of verl's controller; None for other modules."""
    if fullname == _CONTROLLER or fullname.startswith(f"{_CONTROLLER}."):
        return home_of(fullname.partition(".")[2])
    return None


#: Finder that imports verl's controller from this package.
_FINDER = Redirect(_home_of)


def active() -> bool:
    """Return whether this process has the overlay."""
    return _FINDER in sys.meta_path


def install() -> None:
    """Put the overlay into this process, its children, and all Ray processes of this driver.

    Raises:
        AlreadyImported: if verl's own controller is imported, or Ray was started without the overlay.
        UnfitVerl: if the installed verl is missing, too old, too new, broken or imported in part.
    """
    install_here()
    version, folder = installed_version()
    if version != TESTED:
        warnings.warn(
            f"verl in {folder} is version {version}; Phalanx is tested with verl {TESTED}. If something fails, pip "
            f"install 'verl=={TESTED}'",
            RuntimeWarning,
            stacklevel=2,
        )
    _check_jobs()
    os.environ.update(carried(os.environ))
    amend_ray_init(
        "phalanx_overlay", _with_environment
    )  # so that it reaches every Ray process of this driver


def install_here() -> None:
    """Put the overlay into this process. Idempotent. Raises like :func:`install`."""
    if not active():
        check_verl()
        _check_nothing_early()
        sys.meta_path.insert(0, _FINDER)
    register_row_types()


def register_row_types() -> None:
    """Register ``DataProto`` and ``BatchMeta`` for dispatch, if verl is imported. ``TensorDict`` is always known."""
    module = sys.modules.get("verl.protocol")
    if module is None or not hasattr(module, "DataProto"):
        return
    data_proto, batch_meta = module.DataProto, module.BatchMeta
    register_row_type(
        data_proto,
        count=_row_count,
        slice=data_proto.slice,
        concat=data_proto.concat,
        take=lambda data, indices: data.select_idxs(list(indices)),
    )
    if hasattr(batch_meta, "select_samples"):  # a stand-in without methods if TransferQueue is not installed
        register_row_type(
            batch_meta,
            count=len,
            slice=lambda meta, start, stop: meta.select_samples(list(range(start, stop))),
            concat=batch_meta.concat,
            take=lambda meta, indices: meta.select_samples(list(indices)),
        )


def _row_count(data: Any) -> int | None:
    """Return the number of rows, or None for a ``DataProto`` of ``meta_info`` alone, which is replicated."""
    return None if data.batch is None and not data.non_tensor_batch else len(data)


def import_verl() -> None:
    """Import verl completely, before the controller: verl's plugins may import the controller, which needs verl.

    Raises:
        UnfitVerl: if verl cannot be imported.
    """
    try:
        with importing():
            importlib.import_module("verl")
    except ImportError as error:
        version, folder = installed_version()
        raise UnfitVerl(
            f"verl {version} in {folder} cannot be imported: {type(error).__name__}: {error}. Repair it, such as by "
            f"pip install 'verl=={TESTED}'"
        ) from error


def installed_version() -> tuple[str, str]:
    """Return version and folder of the installed verl; two empty texts if there is none."""
    present = sys.modules.get("verl")
    spec = present.__spec__ if present is not None else importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        return "", ""
    folder = Path(spec.origin).parent
    if Path(__file__).parents[1] in folder.parents:
        return "", ""
    file = folder / "version" / "version"
    return (file.read_text().strip() if file.is_file() else "unknown"), str(folder)


def check_verl() -> None:
    """Check that the installed verl fits this controller. Raises UnfitVerl if it does not."""
    version, folder = installed_version()
    if not folder:
        raise UnfitVerl(
            f"Phalanx was asked to be verl's controller, but {sys.executable} has no verl: pip install "
            f"'verl=={TESTED}' there"
        )
    line = TESTED.rpartition(".")[0]
    if version.split(".")[:2] != line.split("."):
        raise UnfitVerl(
            f"verl in {folder} is version {version}, but Phalanx serves verl {line}.x: pip install 'verl=={TESTED}', "
            f"or run it without Phalanx (no `phalanx verl`, no {ASKED})"
        )
    missing = [f"verl.{name}" for name in _USED if not _is_module(Path(folder, *name.split(".")))]
    if missing:
        raise UnfitVerl(
            f"verl {version} in {folder} is broken: it has no module {missing[0]}; pip install --force-reinstall "
            f"--no-deps 'verl=={TESTED}'"
        )
    loaded = sorted(name for name in sys.modules if name.startswith("verl."))
    if loaded and "verl" not in sys.modules:
        raise UnfitVerl(
            f"verl {version} in {folder} is imported in part: an import of it failed in this process and left "
            f"{loaded[0]}. `{sys.executable} -c 'import verl'` shows the cause; repair it, and start the program again"
        )


def _is_module(path: Path) -> bool:
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def _check_nothing_early() -> None:
    theirs = sorted(
        name
        for name, module in list(sys.modules.items())
        if f"{name}.".startswith(f"{_CONTROLLER}.") and getattr(module, "__name__", name) == name
    )  # a module of this package has its own name
    if theirs:
        raise AlreadyImported(
            f"verl's own controller is in use in this process: {theirs[0]} was imported before Phalanx could take its "
            "place. Start the program with `phalanx verl ...`, or call phalanx.compat.verl.install() before anything "
            f"imports {_CONTROLLER}; a module in {HOOK} that imports it must come after {PLUGIN}"
        )


def _check_jobs() -> None:
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized() and not _has_variables(ray):
        raise AlreadyImported(
            "phalanx.compat.verl.install() was called after ray.init, or verl imported after it: Ray has "
            "told its processes about this driver already, and actors that are trainers would get verl's own "
            "controller. Call it before ray.init, or import verl before it, or start the program with `phalanx verl "
            "...`"
        )


def _has_variables(ray: Any) -> bool:
    """Return whether this process has the overlay's variables, and Ray starts its processes with them."""
    if not overlays_verl():
        return False
    from phalanx.backends.ray import private  # loads Ray

    if private.runs_in_cluster_process():  # Ray started this process with them
        return True
    environment = ray.get_runtime_context().runtime_env.get("env_vars") or {}
    return ASKED in environment


def carried(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that install the overlay in another process with ``environment``."""
    modules = [name for name in environment.get(HOOK, "").split(",") if name and name != PLUGIN]
    return {ASKED: "1", HOOK: ",".join([PLUGIN, *modules])}


def amend_ray_init(mark: str, amend: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Make ``ray.init`` pass its keyword arguments through ``amend``, once for each ``mark``."""
    import ray

    original = ray.init
    if hasattr(original, mark):
        return

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **amend(kwargs))

    setattr(init, mark, True)
    ray.init = init


def _with_environment(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of ``ray.init`` with the overlay's variables and this library's settings."""
    submitted = os.environ.get(_SUBMITTED)
    if submitted is not None:
        amended, os.environ[_SUBMITTED] = _in_a_job(kwargs, submitted)
        return amended
    config = kwargs.get("job_config")
    if config is None or kwargs.get("runtime_env") is not None:
        return {**kwargs, "runtime_env": _amended(kwargs.get("runtime_env"))}
    config.set_runtime_env(_amended(config.runtime_env))
    return dict(kwargs)


def _in_a_job(kwargs: Mapping[str, Any], submitted: str) -> tuple[dict[str, Any], str]:
    """Return arguments of ``ray.init`` and the job's configuration, for a process that ``ray job submit`` started.

    Ray rejects a variable that both set, even to equal values. So a variable that the job sets is changed in the job's
    configuration. Ray ignores the runtime_env of ``job_config`` in such a process.
    """
    given = kwargs.get("runtime_env") or {}
    runtime_env = _amended(given)
    job = json.loads(submitted)
    theirs = (job.get("runtime_env") or {}).get("env_vars") or {}
    for name in theirs.keys() & runtime_env["env_vars"].keys() - (given.get("env_vars") or {}).keys():
        theirs[name] = runtime_env["env_vars"].pop(name)
    return {**kwargs, "runtime_env": runtime_env}, json.dumps(job)


def _amended(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a runtime_env with the variables of the overlay and of this library added."""
    runtime_env = dict(given or {})
    theirs = dict(runtime_env.get("env_vars") or {})
    hooks = {HOOK: theirs.get(HOOK, os.environ.get(HOOK, ""))}
    ours = own_variables()
    if ours.get("PHALANX_TRACE"):  # other processes have other working folders
        ours["PHALANX_TRACE"] = os.path.abspath(ours["PHALANX_TRACE"])
    return {**runtime_env, "env_vars": {**ours, **theirs, **carried(hooks)}}
