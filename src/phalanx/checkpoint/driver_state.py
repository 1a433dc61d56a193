"""What a driver itself has: objects that tell and take their state, and its random numbers."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, MutableMapping
from typing import Any

import cloudpickle

from phalanx.declare.stateful import ways_of
from phalanx.errors import CheckpointError, CheckpointMismatch, DeclarationError

__all__ = ["Driver"]

_ALL = "state"


class Driver:
    """The state of a driver: one object, or a dict of named ones.

    An object that gives its state keeps its identity: it is loaded in place. Any other value of a dict is saved as it
    is, and put back into the dict.

    Raises:
        DeclarationError: a single object gives no state.
    """

    def __init__(self, state: Any) -> None:
        self._state = state
        if state is not None and not isinstance(state, MutableMapping) and ways_of(state) is None:
            raise DeclarationError(
                f"px.checkpoint.CheckpointManager(state={type(state).__name__}): give something with "
                f"state_dict() and load_state_dict(), a "
                "random generator, or a dict of such things and of plain values"
            )

    def names(self) -> list[str]:
        """Of what it consists."""
        state: Any = self._state
        return [str(name) for name in state] if self._by_name else [_ALL] if state is not None else []

    @property
    def _by_name(self) -> bool:
        return isinstance(self._state, MutableMapping) and ways_of(self._state) is None

    def save(self) -> bytes:
        """All of it, as it is now.

        Raises:
            CheckpointError: something cannot be pickled; it says what.
        """
        found: dict[str, bytes] = {}
        items: dict[str, Any] = dict(self._state) if self._by_name else {_ALL: self._state}
        for name, value in items.items():
            ways = ways_of(value)
            try:
                found[name] = cloudpickle.dumps(value if ways is None else ways.get(), 5)
            except Exception as error:
                raise CheckpointError(f"{name!r} of the driver's state cannot be pickled: {error}") from error
        return pickle.dumps((self.names(), found, rng_state()), 5)

    def described(self) -> dict[str, Any]:
        """What the manifest has of it."""
        return {"kind": "driver", "text": ", ".join([*self.names(), "random numbers"])}

    def load(self, data: bytes) -> Callable[[], None]:
        """Read what :meth:`save` gave, and check that it fits; what is given does the rest.

        Raises:
            CheckpointMismatch: it was saved with other names.
            CheckpointError: something cannot be unpickled here.
        """
        names, found, rng = pickle.loads(data)
        if set(names) != set(self.names()):
            raise CheckpointMismatch(
                f"the driver's state was saved as {', '.join(names) or 'nothing'} and is "
                f"{', '.join(self.names()) or 'nothing'} now; give "
                f"px.checkpoint.CheckpointManager(state=) the same names"
            )
        values: dict[str, Any] = {}
        for name, text in found.items():
            try:
                values[name] = pickle.loads(text)
            except Exception as error:
                raise CheckpointError(
                    f"{name!r} of the driver's state cannot be read here: {error}"
                ) from error
        return lambda: self._put(values, rng)

    def _put(self, values: dict[str, Any], rng: dict[str, Any]) -> None:
        if not self._by_name:
            ways = ways_of(self._state)
            if ways is not None:
                ways.put(values[_ALL])
        else:
            for name in self._state:
                ways = ways_of(self._state[name])
                if ways is None:
                    self._state[name] = values[name]
                else:
                    ways.put(values[name])
        load_rng(rng)  # last: loading may draw


def rng_state() -> dict[str, Any]:
    """The random numbers of this process to come: of ``random``, and of numpy and torch where they are loaded."""
    state: dict[str, Any] = {"random": random.getstate()}
    if "numpy" in sys.modules:
        import numpy as np  # loaded already: nobody else draws from it

        state["numpy"] = np.random.get_state()
    if "torch" in sys.modules:
        import torch  # loaded already: nobody else draws from it

        state["torch"] = torch.get_rng_state().numpy().tobytes()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = [each.numpy().tobytes() for each in torch.cuda.get_rng_state_all()]
    return state


def load_rng(state: dict[str, Any]) -> None:
    """Draw on from there."""
    random.setstate(state["random"])
    if "numpy" in state:
        import numpy as np  # what was saved drew from it

        np.random.set_state(state["numpy"])
    if "torch" in state:
        import torch  # what was saved drew from it

        def tensor(text: bytes) -> torch.Tensor:
            return torch.frombuffer(bytearray(text), dtype=torch.uint8)

        torch.set_rng_state(tensor(state["torch"]))
        if "cuda" in state and torch.cuda.is_available():
            for device, text in enumerate(state["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(tensor(text), device)
