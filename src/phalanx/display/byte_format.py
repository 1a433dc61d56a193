"""Numbers of bytes as text."""

from __future__ import annotations


def size(nbytes: float | None) -> str:
    """Return a number of bytes as text, such as "286.1 MiB"; "?" if it is not known."""
    if nbytes is None:
        return "?"
    amount, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{nbytes:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
