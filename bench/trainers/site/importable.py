"""Import all modules of verl in a process, and print the importable names as JSON on the last line."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import pkgutil
import warnings
from collections.abc import Iterator


def main() -> None:
    """Import every module of verl. Print the importable modules, and the errors of the others."""
    warnings.simplefilter("ignore")
    could: list[str] = []
    could_not: dict[str, str] = {}
    for name in _names("verl"):
        with contextlib.redirect_stdout(io.StringIO()):
            reason = _reason(name)
        if reason is None:
            could.append(name)
        else:
            could_not[name] = reason
    print(json.dumps({"could": could, "could_not": could_not}))


def _names(package: str) -> Iterator[str]:
    """Yield the names below a package, and import only the packages on the way."""
    yield package
    try:
        folders = list(importlib.import_module(package).__path__)
    except BaseException:
        return  # its import is tried, and its reason told, by the caller
    for found in pkgutil.iter_modules(folders, f"{package}."):
        if found.name.endswith("__main__"):
            continue
        if found.ispkg:
            yield from _names(found.name)
        else:
            yield found.name


def _reason(name: str) -> str | None:
    try:
        importlib.import_module(name)
    except BaseException as error:  # some end the process at import
        return f"{type(error).__name__}: {error}"[:200]
    return None


if __name__ == "__main__":
    main()
