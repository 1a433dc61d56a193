"""What a worker process of a drop-in group calls first."""

from __future__ import annotations

from typing import Any


def make_host(services: Any) -> Any:
    """The host of a worker process, in which ``import verl`` gives the drop-in before any user's class is read."""
    from phalanx.compat.verl import install_here

    install_here(strict=False)
    return _host(services)


def make_overlay_host(services: Any) -> Any:
    """The same for the real verl, whose controller is this package."""
    from phalanx.compat.verl import overlay
    from phalanx.execution.imports import importing

    overlay.install_here()
    with importing():
        # Whole and first: a plugin of verl's may import what needs the modules below, while they need a part of verl.
        import verl  # noqa: F401

    return _host(services)


def _host(services: Any) -> Any:
    from phalanx.compat.verl.single_controller.base.decorator import references_in
    from phalanx.execution.factory import make_host as native

    services.upstream = references_in
    return native(services)
