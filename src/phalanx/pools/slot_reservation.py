"""The books of a pool: what is reserved, which groups are on which slot, what is known of each slot."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from phalanx.backends.api import Backend, Placing
from phalanx.backends.backend_types import Reservation
from phalanx.errors import DeclarationError
from phalanx.topology.accelerators import resource_names
from phalanx.topology.placement import share
from phalanx.topology.slots import Slot, SlotFacts


class Tenant(Protocol):
    """A group, as far as the pool that it is on needs to know it."""

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
    """One reservation and its books: which groups are on which slot, and what is known of each slot.

    ``blocks`` are their sizes, in slots.
    """

    pool: str
    backend: Backend
    reservation: Reservation
    blocks: tuple[int, ...]
    bundle: Mapping[str, float]
    resource: str | None
    max_colocate_count: int
    accelerators_per_slot: int
    detached: bool
    reservation_name: str = ""
    groups: dict[Slot, list[Tenant]] = field(default_factory=dict[Slot, list[Tenant]])
    facts: dict[Slot, SlotFacts] = field(default_factory=dict[Slot, SlotFacts])
    accelerators: dict[Slot, tuple[str, ...]] = field(default_factory=dict[Slot, tuple[str, ...]])
    lock: threading.RLock = field(default_factory=threading.RLock)
    open: bool = True

    def knows(self, slot: Slot) -> bool:
        """Return whether the accelerators of the slot are known (it may have none)."""
        return self.resource is None or slot in self.accelerators

    def share(self) -> dict[str, float]:
        """Return the share of its slot for one process of a group."""
        if self.resource is None:
            return {
                name: amount / self.max_colocate_count
                for name, amount in self.bundle.items()
                if name == "CPU"
            }
        if self.max_colocate_count == 1:
            return {self.resource: float(self.accelerators_per_slot)}
        # Of several accelerators Ray would give a fraction of one only: the process asks for a share of one, which
        # keeps Ray's books, and is shown all of the slot's.
        return {self.resource: share(self.max_colocate_count)}


def resource_of(backend: Placing, use_gpu: bool | str) -> str | None:
    """The name of the accelerator resource to ask for; None for slots without one."""
    if use_gpu is False:
        return None
    totals: dict[str, float] = {}
    for node in backend.nodes():
        for name, amount in node.total.items():
            totals[name] = totals.get(name, 0.0) + amount
    found = next((name for name in resource_names() if totals.get(name, 0) >= 1), None)
    if use_gpu == "auto":
        return found
    return found or "GPU"


def check_options(
    use_gpu: object,
    max_colocate_count: object,
    accelerators_per_slot: object,
    timeout: object,
    name_prefix: object,
) -> None:
    if use_gpu not in (True, False, "auto"):
        raise DeclarationError(f'ResourcePool(use_gpu={use_gpu!r}): expected True, False or "auto"')
    for option, value in (
        ("max_colocate_count", max_colocate_count),
        ("accelerators_per_slot", accelerators_per_slot),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise DeclarationError(f"ResourcePool({option}={value!r}): expected a whole number from 1")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout <= 0:
        raise DeclarationError(f"ResourcePool(timeout={timeout!r}): expected seconds as a positive number")
    if name_prefix is not None and not re.fullmatch(r"[\w.-]+", str(name_prefix)):
        raise DeclarationError(
            f"ResourcePool(name_prefix={name_prefix!r}): expected letters, digits, '_', '.' and '-' only"
        )


def accelerator_text(holding: SlotReservation, slot: Slot) -> str | None:
    if holding.resource is None:
        return None
    ids = holding.accelerators.get(slot)
    return f"{holding.resource} {','.join(ids)}" if ids else f"{holding.resource} (not known yet)"
