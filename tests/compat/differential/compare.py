"""Run the cases with verl and with the drop-in, each in its own interpreter, and say where they differ.

``python compare.py --verl .venv-verl/bin/python [cases_protocol cases_ray_groups:case_pools ...]``: every difference
must be in the module's INTENDED, with its reason, and everything listed there must differ. The exit status is 1
otherwise.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TIMEOUT = 600.0  # seconds, for the cases of one module with one library


def results(python: str, prefix: str, name: str) -> dict[str, Any]:
    """What the cases of a module give in the interpreter ``python``."""
    env = {**os.environ, "COMPAT_PREFIX": prefix, "PYTHONPATH": str(HERE.parents[2] / "src")}
    env |= {"RAY_ADDRESS": "local", "RAY_AUTH_MODE": "disabled"}  # not a cluster that happens to run here
    ran = subprocess.run(
        [python, "-W", "ignore", str(HERE / "run.py"), name],
        capture_output=True,
        text=True,
        env=env,
        timeout=TIMEOUT,
        check=False,
    )
    if ran.returncode:
        raise SystemExit(f"{python} {prefix} {name}: {ran.stderr[-3000:]}")
    return json.loads(ran.stdout.splitlines()[-1])


def reason_for(key: str, intended: dict[str, str]) -> str | None:
    """Why a difference is meant to be; keys of ``intended`` may be patterns, ``case_union/*``."""
    return next((why for pattern, why in intended.items() if fnmatch.fnmatch(key, pattern)), None)


def report(names: list[str], theirs: dict[str, Any], ours: dict[str, Any]) -> int:
    """Print the differences; the number of those that are not as listed."""
    intended: dict[str, str] = {}
    for name in names:
        module, _, only = name.partition(":")
        listed = getattr(importlib.import_module(module), "INTENDED", {})
        intended |= {f"{module}/{key}": why for key, why in listed.items() if key.startswith(only)}
    differing = [key for key in {**theirs, **ours} if _text(theirs.get(key)) != _text(ours.get(key))]
    unlisted = [key for key in differing if reason_for(key, intended) is None]
    idle = [pattern for pattern in intended if not fnmatch.filter(differing, pattern)]
    for key in unlisted:
        print(
            f"DIFFERS {key}\n   verl: {_text(theirs.get(key))[:600]}\n   ours: {_text(ours.get(key))[:600]}"
        )
    for pattern in idle:
        print(f"LISTED, but the same: {pattern}")
    for why in dict.fromkeys(filter(None, (reason_for(key, intended) for key in differing))):
        count = sum(reason_for(key, intended) == why for key in differing)
        print(f"intended, {count}: {why}")
    print(f"{len(ours)} results, {len(differing)} differ, {len(unlisted)} of them not listed as intended")
    return len(unlisted) + len(idle)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def main() -> None:
    """Compare all modules ``cases_*.py``, or the ones named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verl", required=True, help="the interpreter that has verl 0.9.1")
    parser.add_argument("names", nargs="*", default=sorted(path.stem for path in HERE.glob("cases_*.py")))
    given = parser.parse_args()
    sys.path.insert(0, str(HERE))
    theirs: dict[str, Any] = {}
    ours: dict[str, Any] = {}
    for name in given.names:
        theirs |= results(given.verl, "verl", name)
        ours |= results(sys.executable, "phalanx.compat.verl", name)
    sys.exit(1 if report(given.names, theirs, ours) else 0)


if __name__ == "__main__":
    main()
