"""What the methods of workers cost in a simulation: stated in words, in a file, or taken from a trace. Pure."""

from __future__ import annotations

import ast
import contextlib
import importlib
import math
import re
import statistics
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from phalanx.errors import DeclarationError
from phalanx.tracing.events import STARTING, Trace
from phalanx.tracing.files import load
from phalanx.wire.value import Value

#: Python has it from 3.11 on, and before under the name of the package that it was.
_toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_BYTES = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
_NUMBER = re.compile(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z%]*)\s*$")
_EXPECTED = (
    "expected NAME=SECONDS with any of out=SIZE, spread=PERCENT, per_mb=SECONDS, fail=PROBABILITY and last "
    'returns=VALUE, such as "Trainer.update=2.0s,out=4KB,spread=5%"'
)


@dataclass(frozen=True)
class Cost:
    """Of one method on one rank.

    ``seconds`` it takes, None where nobody said; ``spread`` is the standard deviation over ranks and calls as a part of
    that. ``per_mb`` is added for each MB (2**20) of its arguments. ``out`` are the bytes of its output, whose value is
    ``returns``, where ``gives``. It raises with the probability ``fail``.
    """

    seconds: float | None = None
    spread: float = 0.0
    per_mb: float = 0.0
    out: int | None = None
    fail: float = 0.0
    returns: Any = None
    gives: bool = False


UNKNOWN = Cost()


@dataclass
class Costs:
    """By name: ``Class.method``, ``role.method``, ``method`` or ``*``; of several that fit, the first of these."""

    stated: dict[str, Cost] = field(default_factory=dict[str, Cost])
    #: Methods that were called and of which nothing is stated.
    unknown: set[str] = field(default_factory=set[str])
    #: Names of ``stated`` that were looked up.
    used: set[str] = field(default_factory=set[str])
    _found: dict[tuple[str, str, str], Cost] = field(default_factory=dict[tuple[str, str, str], Cost])

    def of(self, cls: str, role: str, method: str) -> Cost:
        """What a call costs; 0 seconds for a method of which nothing is stated, and a note of that."""
        key = (cls, role, method)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._looked_up(cls, role, method)
        return found

    def _looked_up(self, cls: str, role: str, method: str) -> Cost:
        names = [f"{cls}.{method}", f"{role}.{method}", method]
        if method != STARTING:
            names.append("*")
        for name in names:
            if name in self.stated:
                self.used.add(name)
                return self.stated[name]
        if method != STARTING:
            self.unknown.add(f"{cls or role}.{method}")
        return UNKNOWN

    @property
    def unused(self) -> list[str]:
        """Names of which something is stated, and that no call had."""
        return sorted(self.stated.keys() - self.used - {"*"})

    def add(self, others: Mapping[str, Cost]) -> None:
        """State more; what was stated of the same name before is replaced."""
        self.stated.update(others)
        self._found.clear()


def parse(text: str) -> dict[str, Cost]:
    """``Trainer.update=2.0s,out=4KB,spread=5%``: one method's cost, by its name.

    Raises:
        DeclarationError: it is not written like that.
    """
    name, equals, rest = text.partition("=")
    if not equals or not name.strip():
        raise DeclarationError(f"cost {text!r}: {_EXPECTED}")
    head, marker, returns = rest.partition("returns=")
    given: dict[str, Any] = {}
    for index, word in enumerate(one.strip() for one in head.split(",") if one.strip()):
        key, has_key, value = word.partition("=")
        if not has_key and index == 0:
            key, value = "seconds", word
        given[key.strip()] = value
    if not given and not marker:
        raise DeclarationError(f"cost {text!r}: {_EXPECTED}")
    if marker:
        try:
            given["returns"] = ast.literal_eval(returns.strip())
        except (ValueError, SyntaxError):
            raise DeclarationError(
                f"cost {text!r}: returns={returns.strip()!r} is no Python literal, such as {{'loss': 0.1}}"
            ) from None
    return {name.strip(): _cost(name.strip(), given)}


def read(path: Path) -> dict[str, Cost]:
    """The costs in a file: TOML with a table for each method, or a trace (.json, .jsonl) of a real run.

    Raises:
        DeclarationError: the file cannot be read, or says something else.
    """
    try:
        if path.suffix == ".toml":
            tables = _toml.loads(path.read_text(encoding="utf-8"))
            return {name: _cost(name, table) for name, table in _tables(tables, "")}
        return of_trace(load(path))
    except _toml.TOMLDecodeError as error:
        raise DeclarationError(f"{path} is no TOML: {error}") from error
    except OSError as error:
        raise DeclarationError(f"{path}: {error.strerror or error}") from error


def of_trace(trace: Trace) -> dict[str, Cost]:
    """What each method took in a real run: the median over its calls and ranks, and how far they lay apart."""
    seconds: dict[str, list[float]] = {}
    sizes: dict[str, list[int]] = {}
    for call in trace.calls:
        for part in call.parts:
            if part.started is not None and part.finished is not None and part.error is None:
                seconds.setdefault(call.name, []).append((part.finished - part.started) / 1e9)
                sizes.setdefault(call.name, []).append(part.result_bytes)
    found: dict[str, Cost] = {}
    for name, taken in seconds.items():
        middle = statistics.median(taken)
        apart = statistics.median([abs(one - middle) for one in taken]) * 1.4826  # as a standard deviation
        found[name] = Cost(middle, apart / middle if middle else 0.0, out=int(statistics.median(sizes[name])))
    return found


def _tables(tables: Mapping[str, Any], before: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """``[Trainer.update]`` and ``["Trainer.update"]`` alike."""
    names = {one.name for one in fields(Cost)}
    for name, table in tables.items():
        full = f"{before}.{name}" if before else name
        if not isinstance(table, Mapping):
            raise DeclarationError(
                f"{full} = {table!r}: expected a table for each method, such as [Trainer.update]"
            )
        inner = {
            key: value for key, value in table.items() if isinstance(value, Mapping) and key not in names
        }
        own = {key: value for key, value in table.items() if key not in inner}
        if own or not inner:
            yield full, own
        yield from _tables(inner, full)


def _cost(name: str, given: Mapping[str, Value]) -> Cost:
    made = UNKNOWN
    for key, value in given.items():
        where = f"cost of {name}: {key}={value!r}"
        match key:
            case "seconds":
                made = replace(made, seconds=quantity(value, _SECONDS, where))
            case "per_mb":
                made = replace(made, per_mb=quantity(value, _SECONDS, where))
            case "out":
                made = replace(made, out=int(quantity(value, _BYTES, where)))
            case "spread" | "fail":
                part = quantity(value, {"": 1.0, "%": 0.01}, where)
                if key == "fail" and part > 1:
                    raise DeclarationError(f"{where}: expected a probability, from 0 to 1 or to 100%")
                made = replace(made, spread=part) if key == "spread" else replace(made, fail=part)
            case "returns":
                made = replace(made, returns=value, gives=True)
            case _:
                raise DeclarationError(f"{where}: {_EXPECTED}")
    return made


def quantity(value: Value, units: Mapping[str, float], where: str) -> float:
    """A number, or one with a unit behind it.

    Raises:
        DeclarationError: something else, below 0 or without end.
    """
    number = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
    found = _NUMBER.match(value) if isinstance(value, str) else None
    if found is not None and (found[2] in units or not found[2]):
        with contextlib.suppress(ValueError):
            number = float(found[1]) * units.get(found[2], 1.0)
    if math.isfinite(number) and number >= 0:
        return number
    named = ", ".join(filter(None, units))
    raise DeclarationError(
        f"{where}: expected a number, 0 or more" + (f", with one of these units: {named}" if named else "")
    )
