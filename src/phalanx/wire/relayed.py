"""What travels between a driver and the relays of a large group: one envelope down, one batch up."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from phalanx.wire.codec import Encoded
from phalanx.wire.value import Value

#: Outputs up to this many bytes travel in a batch; of larger ones a reference.
BY_VALUE_BYTES = 64 << 10

_SIZE = "I"

Raw = bytes
"""A pickled output: of an encoded value without what is in it, which no relay reads."""


class Envelope(NamedTuple):
    """One call for all ranks below a relay that take part in it.

    ``serial`` names the call to relays. ``ranks`` are those that take part; None: all of the relay's, in its order.
    ``messages`` are the distinct ones, each with the positions of its references among those that come with the
    envelope; ``which`` says which of them each rank gets, None: all the first. ``bare`` is how many calls without a
    message each rank has been sent before, where this is one. ``over`` are calls before it that nobody asks for any
    more.
    """

    serial: int
    role: str
    method: str
    returns: int
    ranks: Sequence[int] | None
    messages: Sequence[tuple[bytes, Sequence[int]]]
    which: Sequence[int] | None
    bare: Sequence[int] = ()
    over: Sequence[int] = ()

    def pack(self) -> bytes:
        """As bytes; numbers by rank as arrays."""
        ranks, which, bare = (
            None if some is None else _packed(some) for some in (self.ranks, self.which, self.bare)
        )
        return pickle.dumps(tuple(self._replace(ranks=ranks, which=which, bare=bare)), 5)  # type: ignore[arg-type]

    @staticmethod
    def unpack(data: bytes) -> Envelope:
        """What :meth:`pack` packed."""
        found = Envelope(*pickle.loads(data))
        ranks, which, bare = (
            None if some is None else _unpacked(some) for some in (found.ranks, found.which, found.bare)
        )
        return found._replace(ranks=ranks, which=which, bare=bare or ())


def _packed(numbers: Sequence[int]) -> bytes:
    return array(_SIZE, numbers).tobytes()


def _unpacked(data: Any) -> Sequence[int]:
    numbers = array(_SIZE)
    numbers.frombytes(data)
    return numbers


def part_of(
    envelope: Envelope, positions: Sequence[int] | None, ranks: Sequence[int] | None
) -> tuple[Envelope, list[int]]:
    """The envelope for some of its ranks, given by their positions in it, and which of its references go with it.

    ``positions`` None stands for all.
    """
    which, bare = envelope.which, envelope.bare
    if positions is not None:
        which = None if which is None else [which[position] for position in positions]
        bare = [bare[position] for position in positions] if bare else ()
    used = [0] if which is None else sorted(set(which))
    index = {message: at for at, message in enumerate(used)}
    refs = sorted({ref for message in used for ref in envelope.messages[message][1]})
    at = {ref: place for place, ref in enumerate(refs)}
    messages = [(envelope.messages[m][0], [at[ref] for ref in envelope.messages[m][1]]) for m in used]
    chosen = None if which is None or len(used) == 1 else [index[message] for message in which]
    return envelope._replace(ranks=ranks, messages=messages, which=chosen, bare=bare), refs


@dataclass
class Batch:
    """The outputs of ``count`` ranks, in the order of an envelope: equal ones once.

    ``which`` says which output is whose: below ``len(raw)`` one of these, else one of ``refs``; None: all the first.
    """

    count: int
    raw: list[Raw] = field(default_factory=list[Raw])
    refs: list[Any] = field(default_factory=list[Any])
    which: bytes | None = None

    def pack(self) -> bytes | Batch:
        """As bytes, which cost a backend less than an object; itself where it has references."""
        return self if self.refs else pickle.dumps((self.count, self.raw, self.which), 5)

    @staticmethod
    def unpack(packed: bytes | Batch) -> Batch:
        """What :meth:`pack` packed."""
        if isinstance(packed, Batch):
            return packed
        count, raw, which = pickle.loads(packed)
        return Batch(count, raw, which=which)

    def by_rank(self) -> Sequence[int]:
        """``which`` as numbers."""
        return [0] * self.count if self.which is None else _unpacked(self.which)


def packed_output(output: Encoded | Value) -> Raw | None:
    """A rank's output for a batch; None for one that is large, or has references within."""
    if isinstance(output, Encoded):
        return None if output.tokens or output.nbytes > BY_VALUE_BYTES else pickle.dumps(output, 5)
    if type(output) in (str, bytes) and len(output) > BY_VALUE_BYTES:
        return None
    return pickle.dumps(output, 5)


def batch_of(outputs: Sequence[Raw | None], refs: Sequence[Any]) -> Batch:
    """The outputs of ranks, each with its reference, which travels where the output is None."""
    known: dict[Raw, int] = {}
    kept: list[Any] = []
    which: list[int] = []
    for output, ref in zip(outputs, refs, strict=True):
        if output is None:
            kept.append(ref)
            which.append(-len(kept))
        else:
            which.append(known.setdefault(output, len(known)))
    return _made(list(known), kept, which)


_IMMUTABLE = (type(None), bool, int, float, str, bytes)


def unpacked_outputs(batch: Batch, large: Sequence[Value]) -> list[Any]:
    """The outputs of a batch by rank, ``large`` those behind its references.

    Ranks that returned equal values get one each, unless nobody can change it.

    Raises:
        Exception: what unpickling an output raises.
    """
    given: list[Any] = [*map(pickle.loads, batch.raw), *large]
    if len(given) == 1 and type(given[0]) in _IMMUTABLE:
        return given * batch.count
    outputs: list[Any] = []
    taken = [False] * len(given)
    for index in batch.by_rank():
        again = taken[index] and type(given[index]) not in _IMMUTABLE
        outputs.append(pickle.loads(batch.raw[index]) if again else given[index])
        taken[index] = True
    return outputs


def merged(count: int, parts: Sequence[tuple[Sequence[int], Batch]]) -> Batch:
    """The batches of some relays as one, each with the positions that its ranks have in it."""
    if len({raw for _, part in parts for raw in part.raw}) == 1 and not any(part.refs for _, part in parts):
        return Batch(count, parts[0][1].raw)
    known: dict[Raw, int] = {}
    kept: list[Any] = []
    which = [0] * count
    for positions, part in parts:
        places = [known.setdefault(raw, len(known)) for raw in part.raw]
        places += [-len(kept) - 1 - index for index in range(len(part.refs))]
        kept += part.refs
        for position, index in zip(positions, part.by_rank(), strict=True):
            which[position] = places[index]
    return _made(list(known), kept, which)


def _made(raw: list[Raw], refs: list[Any], which: list[int]) -> Batch:
    if len(raw) + len(refs) == 1:
        return Batch(len(which), raw, refs)
    numbers = [index if index >= 0 else len(raw) - index - 1 for index in which]
    return Batch(len(which), raw, refs, _packed(numbers))


class Shares:
    """How calls to the ranks of a relay are divided among those below it, ``below`` their ranks in order."""

    def __init__(self, below: Sequence[Sequence[int]]) -> None:
        self._below = below
        self._of = {rank: index for index, ranks in enumerate(below) for rank in ranks}
        bounds = [0]
        for ranks in below:
            bounds.append(bounds[-1] + len(ranks))
        self._whole = [(i, range(bounds[i], bounds[i + 1]), None) for i in range(len(below))]
        self.count = bounds[-1]

    def of(self, ranks: Sequence[int] | None) -> Sequence[tuple[int, Sequence[int], Sequence[int] | None]]:
        """For each that gets some: its index, the positions of its ranks, and the ranks (None: all of its own)."""
        if ranks is None:
            return self._whole
        found: dict[int, list[int]] = {}
        for position, rank in enumerate(ranks):
            found.setdefault(self._of[rank], []).append(position)
        return [
            (index, positions, self._named(index, [ranks[p] for p in positions]))
            for index, positions in found.items()
        ]

    def _named(self, index: int, ranks: Sequence[int]) -> Sequence[int] | None:
        own = self._below[index]
        return (
            None if len(own) == len(ranks) and all(a == b for a, b in zip(own, ranks, strict=True)) else ranks
        )


class Gone(NamedTuple):
    """A relay that does not answer any more, as those above it know it."""

    relay: str
    why: str
