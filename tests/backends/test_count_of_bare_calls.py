"""Calls without a message have the number to which the sender and the rank count them."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.backends.backend_types import Endpoint
from phalanx.backends.ray.sending import submit
from phalanx.topology.slots import Slot, SlotFacts
from phalanx.wire.messages import BARE, ProcessInfo


class Method:
    """What Ray calls a rank by; an interrupt may come first."""

    def __init__(self, error: BaseException | None = None) -> None:
        self._error = error

    def remote(self) -> str:
        if self._error is not None:
            raise self._error
        return "a reference"


def sent_by(method: Method, endpoint: Endpoint) -> Any:
    endpoint.methods["//go"] = method
    return submit(endpoint, "", "go", BARE, ())


@pytest.fixture
def endpoint() -> Endpoint:
    return Endpoint(Slot(0, 0, ""), None, ProcessInfo(SlotFacts("node", "host", "127.0.0.1"), 1, 0.0, 0))


def test_a_call_that_was_sent_is_counted(endpoint: Endpoint) -> None:
    sent_by(Method(), endpoint)

    assert endpoint.bare_calls == 1


def test_a_call_that_was_not_sent_is_not_counted(endpoint: Endpoint) -> None:
    with pytest.raises(KeyboardInterrupt):
        sent_by(Method(KeyboardInterrupt()), endpoint)

    assert endpoint.bare_calls == 0
