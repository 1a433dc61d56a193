"""The driver's own state: objects, values and random generators."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import cloudpickle
import torch

from phalanx.declare.stateful import ways_of
from phalanx.errors import CheckpointError, CheckpointMismatch, DeclarationError
from phalanx.worker.rank_state import Generators

_SINGLE = "state"


class DriverState:
    """One object, or a dict of named objects and values.

    An object with a state is loaded in place. Any other value of a dict is saved, and put back into the dict.

    Raises:
        DeclarationError: if a single object has no state.
    """

    def __init__(self, state: Any) -> None:
        self._by_name = isinstance(state, MutableMapping) and ways_of(state) is None
        self._items: MutableMapping[str, Any] = (
            state if self._by_name else {} if state is None else {_SINGLE: state}
        )
        if not self._by_name and state is not None and ways_of(state) is None:
            raise DeclarationError(
                f"px.checkpoint.CheckpointManager(state={type(state).__name__}): give something with "
                "state_dict() and load_state_dict(), a random generator, or a dict of such things and of plain values"
            )

    def names(self) -> list[str]:
        """Return the names of its parts."""
        return [str(name) for name in self._items]

    def save(self) -> bytes:
        """Return its current content.

        Raises:
            CheckpointError: if a part cannot be pickled.
        """
        found: dict[str, bytes] = {}
        for name, value in self._items.items():
            ways = ways_of(value)
            try:
                found[name] = cloudpickle.dumps(value if ways is None else ways.get(), 5)
            except Exception as error:
                raise CheckpointError(f"{name!r} of the driver's state cannot be pickled: {error}") from error
        return pickle.dumps((self.names(), found, _generators().state_dict()), 5)

    def describe(self) -> dict[str, Any]:
        """Return its description for the manifest."""
        return {"kind": "driver", "text": ", ".join([*self.names(), "random numbers"])}

    def load(self, data: bytes) -> Callable[[], None]:
        """Read the content, check that it fits, and return a function that restores it.

        Raises:
            CheckpointMismatch: if it has other names.
            CheckpointError: if a part cannot be unpickled here.
        """
        names, found, generators = pickle.loads(data)
        if set(names) != set(self.names()):
            raise CheckpointMismatch(
                f"the driver's state was saved as {', '.join(names) or 'nothing'} and is "
                f"{', '.join(self.names()) or 'nothing'} now; give "
                "px.checkpoint.CheckpointManager(state=) the same names"
            )
        values: dict[str, Any] = {}
        for name, text in found.items():
            try:
                values[name] = pickle.loads(text)
            except Exception as error:
                raise CheckpointError(
                    f"{name!r} of the driver's state cannot be read here: {error}"
                ) from error

        def restore() -> None:
            for name, value in values.items():
                ways = ways_of(self._items[name])
                if ways is None:
                    self._items[name] = value
                else:
                    ways.put(value)
            _generators().load_state_dict(_converted(generators))  # last: loading may draw random numbers

        return restore


def _generators() -> Generators:
    return Generators("cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu")


def _converted(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of generators; steps of format 1 have torch's as bytes."""
    found = {name: value for name, value in state.items() if name != "cuda"}
    if isinstance(found.get("torch"), bytes):
        found["torch"] = torch.frombuffer(bytearray(found["torch"]), dtype=torch.uint8)
    return found
