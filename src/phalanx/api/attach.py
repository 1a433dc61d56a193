"""Detached groups: found again by name, from any driver of the session."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.api.selection import Selection
from phalanx.api.view import GroupView, seen_from_here
from phalanx.debug.trace import from_environment
from phalanx.declare.bind import Colocation, WorkerClass, roles_of
from phalanx.declare.spec import MethodSpec
from phalanx.errors import DeclarationError, PlacementError, RankReport, WorkerDiedError
from phalanx.group.epoch import GroupCard
from phalanx.group.group import Group
from phalanx.group.roster import Roster, detached_key, refresh
from phalanx.members.processes import close
from phalanx.members.replacement import lost_ranks
from phalanx.session.session import session


class AttachedGroup(GroupView):
    """A detached group as another driver sees it; calls go to the same processes."""

    def __init__(self, core: Group) -> None:
        super().__init__(Selection.whole(core))
        self.__dict__.update(
            {role: GroupView(Selection.whole(core, role)) for role in core.card.methods if role}
        )

    @property
    def state(self) -> str:
        """ "ready", "broken" or "closed", as far as this driver knows."""
        return self.core.lifecycle.state.value

    def close(self, *, pool: bool = False) -> None:
        """End the group: each worker's own ``close()``, then the processes. Idempotent.

        Args:
            pool: give back the slots of its detached pool too.
        """
        newest = refresh(self.core)
        if newest is not None and self.core.begin_close():
            self.core.extras = dict(newest.extras)
            close(self.core)
            if pool:
                self.core.backend.release(newest.reservations)


def attach(name: str, cls: WorkerClass | Colocation | None = None) -> AttachedGroup:
    """The detached group of that name. Where ranks of it are gone, it is broken: it can be closed, and made anew.

    Args:
        name: as given to ``px.WorkerGroup(..., name=..., detached=True)``.
        cls: the class, ``Cls.bind(...)`` or ``px.colocate({...})`` that it is expected to be made of; its methods
            are compared with the group's.

    Raises:
        PlacementError: there is no such group on this session.
        DeclarationError: its methods are not the expected ones, or another version of the library started it.
    """
    published = session.get_backend().published(detached_key(name))
    if published is None:
        raise PlacementError(
            f"px.attach({name!r}): there is no detached group of that name on this cluster; make it with "
            f"px.WorkerGroup(pool, Cls, name={name!r}, detached=True) on a pool with detached=True"
        )
    roster = Roster.from_bytes(name, published)
    if cls is not None:
        _check_methods(name, roster.card, cls)
    from_environment()
    core = seen_from_here(roster)
    if missing := lost_ranks(core):
        reports = tuple(RankReport(rank, "died") for rank in missing)
        core.broken(WorkerDiedError(f"ranks {missing} are gone", group=name, failures=reports))
    return AttachedGroup(core)


def _check_methods(name: str, card: GroupCard, cls: WorkerClass | Colocation) -> None:
    expected = _signatures({role: bound.methods for role, bound in roles_of(cls).items()})
    found = _signatures(card.methods)
    if expected != found:
        keys = [key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key)]
        differing = sorted(".".join(filter(None, key)) for key in keys)
        raise DeclarationError(
            f"group {name!r} runs {', '.join(card.classes.values())}, whose registered methods are not those "
            f"expected: {', '.join(differing)} differ in name, signature or dispatch mode. Attach with the class that "
            "the group was made of, or close the group and make it anew"
        )


def _signatures(methods: Mapping[str, Mapping[str, MethodSpec]]) -> dict[tuple[str, str], tuple[str, str]]:
    """Return mode and signature of each method, by role and name."""
    specs = {(role, name): spec for role, named in methods.items() for name, spec in named.items()}
    return {key: (repr(spec.mode), str(spec.signature)) for key, spec in specs.items()}
