"""State access of objects: with ``state_dict()``, of random generators, and of dicts of these and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple, Protocol

_PAIRS = (("state_dict", "load_state_dict"), ("get_state", "set_state"), ("getstate", "setstate"))
"""Modules and most of torch; its generators, numpy's old ones; those of ``random``."""
_ONE = "state"


class Ways(NamedTuple):
    """Functions that get and set the state of an object."""

    get: Callable[[], Any]
    put: Callable[[Any], Any]


class Stateful(Protocol):
    """Gives its state, and takes it."""

    def state_dict(self) -> Any:
        """The state as it is now."""
        ...

    def load_state_dict(self, state: Any) -> Any:
        """Go on from a state that was given."""
        ...


def ways_of(value: Any) -> Ways | None:
    """Return how to get and set the state of an object; None for a value that is its own state."""
    for get, put in _PAIRS:
        if callable(getattr(value, get, None)) and callable(getattr(value, put, None)):
            return Ways(getattr(value, get), getattr(value, put))
    bits = getattr(value, "bit_generator", None)  # numpy's generators
    if bits is not None and hasattr(bits, "state"):
        return Ways(lambda: bits.state, lambda state: setattr(bits, "state", state))
    return None


def stateful(value: Any) -> Stateful | None:
    """Return the object itself if it has ``state_dict()``, else an adapter with it; None if it has no state."""
    if all(callable(getattr(value, name, None)) for name in _PAIRS[0]):
        return value
    ways = ways_of(value)
    if ways is not None:
        return _One(ways)
    return _Named(value) if isinstance(value, MutableMapping) else None  # pyright: ignore[reportUnknownArgumentType]


class _One:
    """A generator."""

    def __init__(self, ways: Ways) -> None:
        self._ways = ways

    def state_dict(self) -> dict[str, Any]:
        return {_ONE: self._ways.get()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._ways.put(state[_ONE])


class _Named:
    """A dict: objects in it are loaded in place, plain values are put back into it."""

    def __init__(self, values: MutableMapping[str, Any]) -> None:
        self._values = values

    def state_dict(self) -> dict[str, Any]:
        found = {name: (value, ways_of(value)) for name, value in self._values.items()}
        return {name: value if ways is None else ways.get() for name, (value, ways) in found.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            ways = ways_of(self._values.get(name))
            if ways is None:
                self._values[name] = value
            else:
                ways.put(value)
