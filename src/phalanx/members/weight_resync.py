"""Resync weights to new ranks before they receive calls, by the syncs that the group got its weights from."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from phalanx.errors import PhalanxError
from phalanx.group.group import Group, Resync
from phalanx.group.lifecycle import State

_log = logging.getLogger("phalanx")


def mend_sources(core: Group) -> None:
    """Recover the broken source groups of a group's weights, as their policies say.

    Must not run while members of the group change, since locks of several groups are taken in another order there.
    """
    for one in _all_brought(core):
        one.mend_source()


def bring_to_joined(core: Group) -> None:
    """Bring weights to ranks that join, and with them to all others.

    Raises:
        Errors of a sync.
    """
    for one in _all_brought(core):
        one.bring(core)


def bring_to_replaced(core: Group, new: Collection[int]) -> None:
    """Bring weights to ranks that are ``new`` in place of others, and with them to all.

    Where that cannot be, the group works on without: the new ranks refuse methods that need weights.

    Raises:
        PhalanxError: the group lost a rank during the sync.
    """
    made: dict[Resync, str] = {}
    for (role, name), found in _brought(core).items():
        why = "" if found else "no px.WeightSync that brought them is there any more"
        for one in found:
            if one not in made:
                made[one] = one.doubt() or _tried(core, one)
            why = why or made[one]
        if why:
            _log.warning(
                "group %r: ranks %s are new, and have not got weights %r%s: %s. They refuse methods that need them; "
                "sync them once the source has what they are to have",
                core.name,
                sorted(new),
                name,
                f" of role {role!r}" if role else "",
                why,
            )


def _tried(core: Group, one: Resync) -> str:
    """Sync weights; return the reason of a failure as text."""
    try:
        with core.preparing():
            one.bring(core)
    except PhalanxError as error:
        if core.lifecycle.state is not State.RESTARTING:
            raise  # the replacement itself has failed
        return f"their sync failed: {str(error).partition(chr(10))[0]}"
    return ""


def _all_brought(core: Group) -> set[Resync]:
    return {by for found in _brought(core).values() for by in found}


def _brought(core: Group) -> dict[tuple[str, str], Sequence[Resync]]:
    """Return the syncs that the group's weights came from, by role and name of the weights."""
    by = list(core.syncs)
    found: dict[tuple[str, str], Sequence[Resync]] = {}
    for key, number in core.had_weights.items():
        sent = {one: newest for one in by if (newest := one.newest(key)) is not None}
        # A newer sync may replace the sync that sent them.
        found[key] = [one for one in sent if sent[one] >= number] or [one for one in sent if not sent[one]]
    return found
