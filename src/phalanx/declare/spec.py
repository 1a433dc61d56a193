"""What a declared method is, as a value that the driver and the workers share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from phalanx.declare.modes import CustomMode, Dispatch, DispatchMode, Execute


@dataclass(frozen=True)
class MethodSpec:
    """One worker method as a group sees it.

    ``pad_to_multiple`` is the number that each piece's row count is padded up to a multiple of;
    ``pad_mask`` names a keyword argument in which the worker receives a bool tensor, True for real rows.
    """

    name: str
    mode: DispatchMode | CustomMode = Dispatch.ONE_TO_ALL
    execute: Execute = Execute.ALL
    blocking: bool = True
    readonly: bool = False
    replay: bool = False
    replicated: bool = False
    pad_to_multiple: int | None = None
    pad_mask: str | None = None
    to_device: bool = False
    is_async: bool = False
    signature: inspect.Signature | None = field(default=None, compare=False)
    doc: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class ClassSpec:
    """A worker class, unwrapped, with the methods that a group of it offers."""

    cls: type
    methods: dict[str, MethodSpec]
    ray_options: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def name(self) -> str:
        return self.cls.__name__


Function = Callable[..., Any]
