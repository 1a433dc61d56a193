"""What a worker process gives back of an output that may be handed on by reference."""

from __future__ import annotations

import torch

from phalanx.wire.codec import decode
from phalanx.wire.messages import BackendRef
from phalanx.worker.call_values import encoded


class CountedByTheBackend:
    """A reference that only its backend may pickle: for anybody else it would live for ever."""

    def __reduce__(self) -> str:
        raise AssertionError("pickled past the backend")


def test_a_reference_within_an_output_is_left_for_the_backend_to_pickle() -> None:
    ref = BackendRef(CountedByTheBackend())
    made = encoded({"rows": torch.ones(3), "refs": [ref]})
    assert list(made.tokens) == [ref]
    assert decode(made)["refs"] == [ref]
