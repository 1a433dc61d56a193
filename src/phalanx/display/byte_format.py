"""Numbers of bytes, as people read them."""

from __future__ import annotations


def size(nbytes: float | None) -> str:
    """A number of bytes, such as "286.1 MiB"; "?" where it is not known."""
    if nbytes is None:
        return "?"
    amount, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{nbytes:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
