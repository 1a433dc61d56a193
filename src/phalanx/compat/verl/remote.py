"""What a worker process of a drop-in group calls first."""

from __future__ import annotations

from typing import Any


def make_host(services: Any) -> Any:
    """The host of a worker process, in which ``import verl`` gives the drop-in before any user's class is read."""
    from phalanx.compat.verl import install_here
    from phalanx.compat.verl.single_controller.base.decorator import references_in
    from phalanx.execution.factory import make_host as native

    install_here(strict=False)
    services.upstream = references_in
    return native(services)
