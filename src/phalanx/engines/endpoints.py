"""``px.engines.endpoints``: where the engines of a group are served by HTTP."""

from __future__ import annotations

from typing import Any

from phalanx.engines.engine_types import Endpoint
from phalanx.errors import DeclarationError

__all__ = ["endpoints"]


def endpoints(group: Any) -> list[Endpoint]:
    """Where each engine of a group is served, in the order of its ranks; they end with the group.

    Args:
        group: of a class whose engines serve, such as ``AsyncVllmRollout``, or a role of it.

    Raises:
        DeclarationError: its engines serve nobody.
    """
    method = getattr(group, "endpoint", None)
    if method is None:
        raise DeclarationError(
            f"px.engines.endpoints({group!r}): these engines have no server; AsyncVllmRollout has one for each"
        )
    found: list[Endpoint | None] = method()
    served = [one for one in found if one is not None]
    if not served:
        raise DeclarationError(f"px.engines.endpoints({group!r}): bind its class with serve=True")
    return served
