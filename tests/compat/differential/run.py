"""Print what the cases give with one library, as JSON: ``COMPAT_PREFIX=verl python run.py cases_protocol ...``.

``cases_protocol:case_union`` runs one case of a module.

Runs in the interpreter of that library, in this folder's own name space: no module of phalanx is needed for verl.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from typing import Any


def results_of(name: str) -> dict[str, Any]:
    """``{"module/case/key": plain value}`` of every function ``case_*`` in a module, or of the one that is named."""
    name, _, only = name.partition(":")
    module = importlib.import_module(name)
    found: dict[str, Any] = {}
    for case, function in vars(module).items():
        if not case.startswith("case_") or (only and case != only):
            continue
        try:
            given = function()
        except Exception:
            given = {"whole": ["the case itself failed", traceback.format_exc()]}
        values = given if isinstance(given, dict) else {"whole": given}
        found |= {f"{name}/{case}/{key}": value for key, value in values.items()}
    return found


def main() -> None:
    """Run the modules that are named on the command line."""
    collected: dict[str, Any] = {}
    for name in sys.argv[1:]:
        collected |= results_of(name)
    json.dump(collected, sys.stdout)


if __name__ == "__main__":
    main()
