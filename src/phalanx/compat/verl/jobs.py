"""Variables that bring the overlay to the Ray processes of a driver, on a running cluster too."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from typing import Any

from phalanx.config import own_variables

#: The module that verl imports at the end of its own import, and verl's variable that names it.
PLUGIN, HOOK = "phalanx.compat.verl_plugin", "VERL_USE_EXTERNAL_MODULES"
ASKED = "PHALANX_VERL"
#: Ray's variable in the process of a job (`ray job submit`) with the job's configuration.
_SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"


def carried(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that bring the overlay to another process with this environment."""
    modules = [name for name in environment.get(HOOK, "").split(",") if name and name != PLUGIN]
    return {ASKED: "1", HOOK: ",".join([PLUGIN, *modules])}


def reach_jobs() -> None:
    """Make ``ray.init`` pass the variables to every Ray process of this driver. Idempotent."""
    import ray

    if getattr(ray.init, "phalanx_overlay", False):
        return
    original = ray.init

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        submitted = os.environ.get(_SUBMITTED)
        if submitted is None:
            return original(*args, **_with_environment(kwargs))
        kwargs, os.environ[_SUBMITTED] = _in_a_job(kwargs, submitted)
        return original(*args, **kwargs)

    init.phalanx_overlay = True  # type: ignore[attr-defined]
    ray.init = init


def _with_environment(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of ``ray.init`` with the overlay's variables and this library's settings."""
    config = kwargs.get("job_config")
    if config is None or kwargs.get("runtime_env") is not None:
        return {**kwargs, "runtime_env": _amended(kwargs.get("runtime_env"))}
    config.set_runtime_env(_amended(config.runtime_env))
    return dict(kwargs)


def _in_a_job(kwargs: Mapping[str, Any], submitted: str) -> tuple[dict[str, Any], str]:
    """Return arguments of ``ray.init`` and the job's configuration, for a process that ``ray job submit`` started.

    Ray rejects a variable that both name, even with equal values. So a variable that the job names is changed there.
    Ray ignores the runtime_env of ``job_config`` here.
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
    if ours.get("PHALANX_TRACE"):  # other processes have other folders
        ours["PHALANX_TRACE"] = os.path.abspath(ours["PHALANX_TRACE"])
    return {**runtime_env, "env_vars": {**ours, **theirs, **carried(hooks)}}
