"""Calls on a group's handles that are looked after: what they are to the library."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from phalanx.compat.verl.single_controller.ray.calls import _future_class
from phalanx.errors import WorkerDiedError


@dataclass
class Future:
    """verl's own."""

    collect_fn: Callable[..., Any]
    futures: list[Any]
    dispatch_fn: Callable[..., Any] | None = None

    def get(self) -> Any:
        """The batch."""
        if not self.futures:
            raise OSError("what Ray says")
        return self.collect_fn(self.futures)


class Call:
    """A call that is over, well or not."""

    over = True

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def result(self, timeout: float | None) -> None:
        """Raise its one error."""
        if self._error is not None:
            raise self._error


def future(call: Call, *outputs: int) -> Any:
    made = _future_class(Future)(sum, list(outputs))
    made._call = call
    return made


def test_a_future_gives_the_batch() -> None:
    assert future(Call(), 1, 2).get() == 3


def test_a_future_raises_the_one_error_of_its_call() -> None:
    with pytest.raises(WorkerDiedError, match="rank 1"):
        future(Call(WorkerDiedError("rank 1 died", group="g"))).get()


def test_an_error_that_is_not_of_the_call_stays_what_it_is() -> None:
    with pytest.raises(OSError, match="what Ray says"):
        future(Call()).get()


def test_a_future_is_verls_own_in_another_process() -> None:
    assert type(pickle.loads(pickle.dumps(future(Call(), 1)))) is Future
