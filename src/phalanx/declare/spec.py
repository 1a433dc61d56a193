"""Specification of a worker method, as a value that driver and workers share."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from functools import cached_property

from phalanx.declare.dispatch_modes import Dispatch, Execute, Mode


@dataclass(frozen=True)
class MethodSpec:
    """Name, dispatch mode and options of a worker method; see ``px.register``.

    ``title`` is displayed in place of the name, for functions of the library. ``streams`` is True for a generator,
    whose items a caller can stream. ``signature`` is without ``self``; None: unknown.
    """

    name: str
    mode: Mode = Dispatch.ONE_TO_ALL
    execute: Execute = Execute.ALL
    blocking: bool = True
    readonly: bool = False
    rerun_on_restart: bool = False
    replicated: bool = False
    pad_to_multiple: int | None = None
    to_device: bool = False
    is_async: bool = False
    needs_weights: bool = True
    title: str = ""
    streams: bool = False
    signature: inspect.Signature | None = field(default=None, compare=False)
    doc: str | None = field(default=None, compare=False)

    @cached_property
    def positional_names(self) -> tuple[str, ...]:
        """Names of the parameters that accept a positional argument."""
        known = self.signature.parameters if self.signature else {}
        return tuple(name for name, parameter in known.items() if parameter.kind in POSITIONAL)

    @cached_property
    def positional_counts(self) -> range:
        """Valid numbers of arguments if all are positional; empty if keywords are required or it is unknown."""
        if self.signature is None:
            return range(0)
        known = self.signature.parameters.values()
        needed = [p for p in known if p.default is p.empty and p.kind not in _VARIADIC]
        if any(p.kind not in POSITIONAL for p in needed):
            return range(0)
        return range(len(needed), len(self.positional_names) + 1)


POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
