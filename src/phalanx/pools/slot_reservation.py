"""Reservations behind pools: their slots, the groups on each slot, and the known facts about each slot."""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from phalanx.backends.backend_types import Backend, Reservation, ReserveRequest
from phalanx.config import is_number
from phalanx.errors import DeclarationError
from phalanx.session.session import session
from phalanx.topology.environment import resource_names
from phalanx.topology.placement import Resources, share
from phalanx.topology.slots import Slot, SlotInfo


class Tenant(Protocol):
    """A group, as far as its pool needs to know it."""

    number: int
    """Counts the groups in the order in which they were started."""

    @property
    def name(self) -> str: ...
    @property
    def world_size(self) -> int: ...
    @property
    def state(self) -> str: ...
    def close(self) -> None: ...


@dataclass
class SlotReservation:
    """A reservation with the groups on each slot, and the known facts about each slot.

    ``blocks`` has the size of each block, in slots. While ``open`` is True, groups may start on it; while ``held`` is
    True, its slots are reserved.
    """

    backend: Backend
    bundle: Resources
    resource: str | None
    max_colocate_count: int
    accelerators_per_slot: int
    detached: bool
    pool: str = ""
    blocks: tuple[int, ...] = ()
    reservation: Reservation = field(default_factory=lambda: Reservation(None))
    groups: defaultdict[Slot, list[Tenant]] = field(default_factory=lambda: defaultdict(list), init=False)
    facts: dict[Slot, SlotInfo] = field(default_factory=dict, init=False)
    accelerators: dict[Slot, tuple[str, ...]] = field(default_factory=dict, init=False)
    lock: threading.RLock = field(default_factory=threading.RLock, init=False)
    open: bool = field(default=True, init=False)
    held: bool = field(default=True, init=False)
    finalizer: weakref.finalize[..., Any] | None = field(default=None, init=False)

    def reserve(self, pool: str, blocks: tuple[int, ...], timeout: float) -> SlotReservation:
        """Reserve blocks of slots like these for a pool; they are released once no pool holds them any more.

        Raises:
            DeclarationError: if ``timeout`` is not a positive number.
            PlacementError: if the cluster cannot hold the slots, or not within ``timeout`` seconds; with a table.
        """
        if not is_number(timeout) or not timeout > 0:
            raise DeclarationError(f"timeout={timeout!r}: expected seconds as a positive number")
        name = f"px-{session.run_id}-{pool}"
        held = self.backend.reserve(ReserveRequest(name, blocks, self.bundle, self.detached, timeout))
        made = replace(self, pool=pool, reservation=held, blocks=blocks)
        if not self.detached:
            made.finalizer = weakref.finalize(made, _dropped, os.getpid(), self.backend, held.keys)
            made.finalizer.atexit = False  # the backend then frees everything
        return made

    def close(self, release: bool = True) -> None:
        """Take no more groups, and release the slots if ``release``. After an error, it can be called again."""
        self.open = False
        if self.held and release:
            self.backend.release(self.reservation.keys)
        self.held = False
        if self.finalizer is not None:
            self.finalizer.detach()

    def accelerator_text(self, slot: Slot) -> str | None:
        """Return the accelerators of a slot for a table."""
        if self.resource is None:
            return None
        ids = self.accelerators.get(slot)
        return f"{self.resource} {','.join(ids)}" if ids else f"{self.resource} (not known yet)"

    @cached_property
    def share(self) -> dict[str, float]:
        """The resources that a process of a group gets of its slot."""
        if self.resource is None:
            cpus = self.bundle.get("CPU")
            return {} if cpus is None else {"CPU": share(self.max_colocate_count, cpus)}
        if self.max_colocate_count == 1:
            return {self.resource: float(self.accelerators_per_slot)}
        # Ray grants a fraction of a single accelerator only: the process requests a fraction of one, for Ray's
        # accounting, and sees all accelerators of the slot.
        return {self.resource: share(self.max_colocate_count)}


def _dropped(pid: int, backend: Backend, keys: Sequence[str]) -> None:
    """Release the slots of a reservation that no pool holds any more; not in a fork of its process."""
    if os.getpid() == pid:
        session.queue.add(backend.release, keys)


def resource_of(backend: Backend, use_gpu: bool | str) -> str | None:
    """Return the name of the accelerator resource to request; None for slots without accelerators."""
    if use_gpu is False:
        return None
    nodes = backend.nodes()
    there = (name for name in resource_names() if sum(node.total.get(name, 0.0) for node in nodes) >= 1)
    return next(there, None if use_gpu == "auto" else "GPU")


def check_options(use_gpu: object, name_prefix: object) -> None:
    if use_gpu != "auto" and not isinstance(use_gpu, bool):
        raise DeclarationError(f'ResourcePool(use_gpu={use_gpu!r}): expected True, False or "auto"')
    if name_prefix is not None and not re.fullmatch(r"[\w.-]+", str(name_prefix)):
        raise DeclarationError(
            f"ResourcePool(name_prefix={name_prefix!r}): expected letters, digits, '_', '.' and '-' only"
        )


books = threading.Lock()
"""Held while slots are claimed or unclaimed: several threads may start groups."""
