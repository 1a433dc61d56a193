"""Numbers of bytes, and the first of many items, as text."""

from __future__ import annotations

from collections.abc import Sequence


def size(nbytes: float) -> str:
    """Return a number of bytes as text, such as "286.1 MiB"."""
    amount, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{nbytes:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"


def first_of(items: Sequence[object], most: int = 8) -> str:
    """Return the first items as text, with the number of the others: "a, b and 3 more"."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more
