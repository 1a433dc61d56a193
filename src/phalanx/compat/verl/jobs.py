"""How the overlay reaches the Ray processes of a driver, on a cluster that is up already as well."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from typing import Any

from phalanx.config import own_variables

#: What verl imports at the end of its own import, named in a variable of verl's.
PLUGIN, HOOK = "phalanx.compat.verl_plugin", "VERL_USE_EXTERNAL_MODULES"
ASKED = "PHALANX_VERL"
#: Where Ray tells the process of a job (`ray job submit`) what the job was submitted with.
_SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"


def carried(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that bring the overlay to another process, given those that it has."""
    modules = [name for name in environment.get(HOOK, "").split(",") if name and name != PLUGIN]
    return {ASKED: "1", HOOK: ",".join([PLUGIN, *modules])}


def reach_jobs() -> None:
    """Every Ray process that works for this driver: ``ray.init`` tells Ray the variables for them. Idempotent."""
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
    """Arguments of ``ray.init`` whose processes get the overlay, and the settings of this library."""
    config = kwargs.get("job_config")
    if config is None or kwargs.get("runtime_env") is not None:
        return {**kwargs, "runtime_env": _amended(kwargs.get("runtime_env"))}
    config.set_runtime_env(_amended(config.runtime_env))
    return dict(kwargs)


def _in_a_job(kwargs: Mapping[str, Any], submitted: str) -> tuple[dict[str, Any], str]:
    """The same, and what the job was submitted with, for a process that ``ray job submit`` started.

    Ray refuses a variable that both have, with one value as well; so what the job has already is changed there. Of
    ``job_config`` Ray takes no runtime_env here.
    """
    given = kwargs.get("runtime_env") or {}
    runtime_env = _amended(given)
    job = json.loads(submitted)
    theirs = (job.get("runtime_env") or {}).get("env_vars") or {}
    for name in theirs.keys() & runtime_env["env_vars"].keys() - (given.get("env_vars") or {}).keys():
        theirs[name] = runtime_env["env_vars"].pop(name)
    return {**kwargs, "runtime_env": runtime_env}, json.dumps(job)


def _amended(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """A runtime_env with the variables of the overlay and of this library besides its own."""
    runtime_env = dict(given or {})
    theirs = dict(runtime_env.get("env_vars") or {})
    hooks = {HOOK: theirs.get(HOOK, os.environ.get(HOOK, ""))}
    ours = own_variables()
    if ours.get("PHALANX_TRACE"):  # other processes have other folders
        ours["PHALANX_TRACE"] = os.path.abspath(ours["PHALANX_TRACE"])
    return {**runtime_env, "env_vars": {**ours, **theirs, **carried(hooks)}}
