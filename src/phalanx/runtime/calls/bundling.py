"""Which pieces of a call are stored together."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

BUNDLE_BYTES = 8 << 20
"""As much as takes about as long to copy as it takes Ray to store one object more and to find it.

Not more, since the first rank cannot begin before all of its bundle is stored.
"""


def bundles(sizes: Sequence[int], places: Sequence[Hashable], most: int = BUNDLE_BYTES) -> Iterator[range]:
    """Ranges of pieces that are stored together, in order: neighbours for one place, ``most`` bytes at most.

    A piece that is larger than that is alone.
    """
    begin, total = 0, 0
    for index, (size, place) in enumerate(zip(sizes, places, strict=True)):
        if index > begin and (total + size > most or place != places[begin]):
            yield range(begin, index)
            begin, total = index, 0
        total += size
    if sizes:
        yield range(begin, len(sizes))
