"""`phalanx explain FILE.py:object`: what a pool, a group, a worker class or a mesh of a file is."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.console import Console

from phalanx.cli.common import AsJson
from phalanx.errors import DeclarationError
from phalanx.runtime.api.explain import explain as explained
from phalanx.runtime.session.connection import shutdown


def explain(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:OBJECT", help="A file, or a module, and a name in it; dots lead further in."
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """What a pool, a group, a worker class, roles or a mesh of a file is, without running the file as a script.

    The file is imported: what stands under if __name__ == "__main__" does not run.

    Examples:

      phalanx explain train.py:Actor

      phalanx explain train.py:roles --json

    Exit codes: 0 done; 2 there is no such file or object, or it cannot be explained.
    """
    try:
        table = explained(found(target))
    finally:
        shutdown()  # what the file itself started when it was imported
    if as_json:
        typer.echo(json.dumps(table.to_dict(), indent=1, default=str))
    else:
        Console(width=None if sys.stdout.isatty() else 200, soft_wrap=False).print(table)


def found(target: str) -> Any:
    """The object that ``FILE.py:object`` or ``module:object`` names.

    Raises:
        DeclarationError: there is none, or importing the file raised.
    """
    place, _, name = target.rpartition(":")
    if not place:
        raise DeclarationError(f"{target}: expected FILE.py:OBJECT, such as train.py:Actor")
    module = _imported(place)
    value: Any = module
    for step in name.split("."):
        if not hasattr(value, step):
            names = [one for one in vars(module) if not one.startswith("_")] if value is module else []
            known = f"; it has: {', '.join(sorted(names))}" if names else ""
            raise DeclarationError(f"{target}: there is no {step!r}{known}")
        value = getattr(value, step)
    return value


def _imported(place: str) -> ModuleType:
    path = Path(place)
    if path.suffix != ".py" and not path.exists():
        return _run(place, lambda: importlib.import_module(place))
    if not path.is_file():
        raise DeclarationError(f"{place}: there is no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise DeclarationError(f"{place}: expected a Python file")
    module = importlib.util.module_from_spec(spec)
    loader = spec.loader
    sys.modules[path.stem] = module  # so that its classes are found by name
    sys.path.insert(0, str(path.resolve().parent))
    _run(place, lambda: loader.exec_module(module))
    return module


def _run(place: str, load: Any) -> Any:
    if "" not in sys.path:
        sys.path.insert(0, "")  # as with python -m
    try:
        return load()
    except Exception as error:
        traceback.print_exc(limit=-4)
        raise DeclarationError(f"{place} cannot be imported: {type(error).__name__}: {error}") from None
