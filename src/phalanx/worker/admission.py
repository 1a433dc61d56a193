"""Which calls a rank takes: those of its epoch, on weights that are of one version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.declare.classes import class_spec
from phalanx.errors import StaleEpoch, WeightsTorn
from phalanx.wire.messages import ANY_EPOCH, RUN, RankCall, is_library_call
from phalanx.wire.method_names import full_name


class Admission:
    """Of one rank. ``instances`` are its objects by role, as they are made and closed."""

    def __init__(self, instances: Mapping[str, Any]) -> None:
        self._instances = instances
        self._group = ""
        self._epoch = ANY_EPOCH
        #: Whether the rank leaves its group, and takes no more calls.
        self.leaves = False
        #: Why methods of a role may not run, by role: its weights are of no one version.
        self.unusable: Mapping[str, str] = {}

    def enter(self, group: str, epoch: int) -> None:
        """Belong to that epoch of a group from now on."""
        self._group, self._epoch = group, epoch

    def refusal(self, call: RankCall) -> StaleEpoch | WeightsTorn | None:
        """Why a call does not run here; None for one that does."""
        if self.leaves and not is_library_call(call.method):
            return self.stale(call.role, call.method, call.epoch)
        if call.epoch not in (ANY_EPOCH, self._epoch) and not is_library_call(call.method):
            return self.stale(call.role, call.method, call.epoch)
        return self.torn(call.role, call.method) if self.unusable else None

    def stale(self, role: str, method: str, epoch: int) -> StaleEpoch:
        """Why a call of all ranks of another epoch does not run: they could not make it together."""
        of = "an earlier epoch" if epoch == ANY_EPOCH else f"epoch {epoch}"
        return StaleEpoch(
            f"group {self._group!r} has other ranks by now: this call of {full_name(role, method)} belongs to {of}, "
            f"the group is in epoch {self._epoch}; make the call again",
            group=self._group,
            epoch=epoch,
            current=self._epoch,
        )

    def torn(self, role: str, method: str) -> WeightsTorn | None:
        """Why a method does not run on the weights that its role has now, unless it says that it needs none."""
        why = self.unusable.get(role)
        if why is None or method == RUN or is_library_call(method):
            return None
        instance = self._instances.get(role)
        spec = None if instance is None else class_spec(type(instance)).methods.get(method)
        if spec is not None and not spec.needs_weights:
            return None
        return WeightsTorn(f"{full_name(role, method)}: {why}")
