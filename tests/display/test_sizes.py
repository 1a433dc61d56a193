"""Sizes, as they stand in every table and message."""

from __future__ import annotations

import pytest

from phalanx.display.byte_format import size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (None, "?"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (300_000_000, "286.1 MiB"),
        (2**31, "2.0 GiB"),
        (2**60, "1048576.0 TiB"),
    ],
)
def test_a_size_has_the_unit_that_fits(nbytes: int | None, text: str) -> None:
    assert size(nbytes) == text
