"""Factories of the worker runtime for groups of this package."""

from __future__ import annotations

from typing import Any


def make_runtime(services: Any) -> Any:
    """Return the runtime of a worker process, in which ``import verl`` gives the tutorial's names."""
    from phalanx.compat.verl import install_here

    install_here(strict=False)
    return _host(services)


def make_overlay_runtime(services: Any) -> Any:
    """Return the runtime of a worker process with the overlay.

    Raises:
        UnfitVerl: if verl cannot be imported.
    """
    from phalanx.compat.verl import overlay

    overlay.install_here()
    overlay.import_verl()
    return _host(services)


def _host(services: Any) -> Any:
    from phalanx.compat.verl.single_controller.base.decorator import references_in
    from phalanx.worker.handlers import make_runtime as native

    services.upstream = references_in
    return native(services)
