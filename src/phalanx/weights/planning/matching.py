"""Which source tensor feeds which target tensor: renames, fused names, ties and casts. No boxes are looked at."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from phalanx.errors import DeclarationError
from phalanx.weights.planning.fused import Fused, View
from phalanx.weights.planning.layout_mismatch import Fault
from phalanx.weights.planning.shard_index import Form, ShardIndex
from phalanx.weights.planning.shard_manifest import FLOATS

__all__ = ["Feed", "Match", "Rename", "match_names", "renamer"]

Rename = Mapping[str, str] | Callable[[str], str]
"""Source name to target name: exact names, patterns with ``*`` on both sides, or a function."""


class Feed(NamedTuple):
    """How tensors of one source form feed those of one target form; ``None`` for a view is the whole tensor."""

    source: int
    target: int
    source_view: View | None = None
    target_view: View | None = None


class _Part(NamedTuple):
    """A tensor that exists within a fused one only."""

    fused: str
    rule: Fused
    place: int


@dataclass
class Match:
    """Pairs (source name, target name) by how they feed; and what is told to people.

    ``echoes`` are (target name, its twin): tied at the source, two storages at the target: travels once and is
    copied there. ``surplus`` are source names that no target asks for.
    """

    feeds: dict[Feed, list[tuple[str, str]]] = field(default_factory=lambda: defaultdict(list))
    echoes: list[tuple[str, str]] = field(default_factory=list)
    surplus: list[str] = field(default_factory=list)
    ties: list[tuple[str, str]] = field(default_factory=list)


def match_names(
    source: ShardIndex, target: ShardIndex, rename: Rename | None, fused: Sequence[Fused], faults: list[Fault]
) -> Match:
    """Find a source for every name of ``target``; what has none, or another shape, goes to ``faults``."""
    return _Matching(source, target, rename, tuple(fused), faults).run()


class _Matching:
    def __init__(
        self,
        source: ShardIndex,
        target: ShardIndex,
        rename: Rename | None,
        rules: tuple[Fused, ...],
        faults: list[Fault],
    ) -> None:
        self.source, self.target, self.rules, self.faults = source, target, rules, faults
        self.match = Match()
        self.named = self._renamed(rename)
        self.parts = dict(self._source_parts())
        self.used: set[str] = set()
        self.twins: dict[str, list[str]] = defaultdict(list)
        for alias, name in target.ties.items():
            self.twins[name].append(alias)

    def run(self) -> Match:
        first: dict[tuple[str, int], str] = {}
        for name, form in self.target.forms.items():
            found = self._plain(name)
            if found is None:
                self._through_rules(name, form)
            elif (twin := first.setdefault((found, form), name)) != name:
                self.match.echoes.append((twin, name))
            else:
                self.used.add(found)
                self.match.feeds[Feed(self.source.forms[found], form)].append((found, name))
        self._check_forms()
        self.match.surplus = [name for name in self.source.forms if name not in self.used]
        self.match.ties = sorted(self.target.ties.items())
        return self.match

    def _renamed(self, rename: Rename | None) -> dict[str, str]:
        """Name for the target -> the source name whose storage it is."""
        as_target = renamer(rename)
        found: dict[str, str] = {}
        held = self.source.forms
        aliases = ((alias, name) for alias, name in self.source.ties.items() if alias not in held)
        for alias, name in (*((name, name) for name in held), *aliases):
            renamed = as_target(alias)
            if renamed in found:
                self.faults.append(
                    Fault(renamed, "one source", f"{found[renamed]} and {alias}, both renamed", "source")
                )
            found[renamed] = name
        return found

    def _source_parts(self) -> Iterator[tuple[str, _Part]]:
        for name in self.named:
            if name in self.target.forms:
                continue
            for rule in self.rules:
                if rule.name in name and (parts := rule.names(name)):
                    yield from ((part, _Part(name, rule, index)) for index, part in enumerate(parts))

    def _plain(self, name: str) -> str | None:
        """The source of ``name``, or of a name that is the same storage at the target."""
        found = self.named.get(name)
        for twin in self.twins.get(name, ()):
            other = self.named.get(twin)
            if found is not None and other is not None and found != other:
                self.faults.append(
                    Fault(
                        name,
                        f"one source: {twin} is the same storage at the target",
                        f"{found} and {other}",
                        "source",
                    )
                )
            found = found or other
        return found

    def _through_rules(self, name: str, form: int) -> None:
        part = self.parts.get(name)
        if part is not None:
            self._feed(name, form, part, None)
            return
        for rule in self.rules:
            names = rule.names(name) if rule.name in name else None
            if names and all(one in self.named or one in self.parts for one in names):
                self._split_target(name, form, rule, names)
                return
        wanted = self.target.table[form]
        ranks = _ranks(rank for rank, _ in wanted.holders)
        close = [one for one in self.named if one.rpartition(".")[2] == name.rpartition(".")[2]][:1]
        found = "no such name at the source" + (f" (it has, for one, {close[0]})" if close else "")
        self.faults.append(Fault(name, _describe(wanted), found, f"target {ranks}"))

    def _split_target(self, name: str, form: int, rule: Fused, names: Sequence[str]) -> None:
        rows = self.target.table[form].shape[rule.dim]
        sizes = rule.sizes(rows) or tuple(self._length(one, rule.dim) for one in names)
        views = rule.views(sizes) if sum(sizes) == rows else None
        if views is None:
            self._refuse_sizes(name, rule, rows, names, sizes, "target")
            return
        for one, view in zip(names, views, strict=True):
            part = self.parts.get(one) if one not in self.named else None
            if part is not None:
                self._feed(name, form, part, view)
            else:
                self.used.add(self.named[one])
                feed = Feed(self.source.forms[self.named[one]], form, None, view)
                self.match.feeds[feed].append((self.named[one], name))

    def _feed(self, name: str, form: int, part: _Part, view: View | None) -> None:
        """``name``, or its part under ``view``, comes out of a fused source tensor."""
        origin = self.named[part.fused]
        self.used.add(origin)
        cut = self._view(part)
        if cut is not None:
            self.match.feeds[Feed(self.source.forms[origin], form, cut, view)].append((origin, name))

    def _view(self, part: _Part) -> View | None:
        names = part.rule.names(part.fused) or ()
        rows = self.source.form(self.named[part.fused]).shape[part.rule.dim]
        sizes = part.rule.sizes(rows)
        if sizes is None and all(one in self.target.forms for one in names):
            sizes = tuple(self.target.form(one).shape[part.rule.dim] for one in names)
        views = part.rule.views(sizes) if sizes is not None and sum(sizes) == rows else None
        if views is None:
            self._refuse_sizes(part.fused, part.rule, rows, names, sizes or (), "source")
            return None
        return views[part.place]

    def _length(self, part: str, dim: int) -> int:
        if part in self.named:
            return self.source.form(self.named[part]).shape[dim]
        view = self._view(self.parts[part])
        return sum(length for _, _, length in view.segments) if view else 0

    def _refuse_sizes(
        self, name: str, rule: Fused, rows: int, names: Sequence[str], sizes: Sequence[int], side: str
    ) -> None:
        known = " + ".join(str(size) for size in sizes) or "parts of unknown size"
        groups = f", in {rule.groups} groups" if rule.groups > 1 else ""
        wanted = f"{rows} along dim {rule.dim} from {', '.join(names)}{groups}"
        self.faults.append(Fault(name, wanted, known, side))

    def _check_forms(self) -> None:
        """Types can be cast and shapes are equal, once per way in which tensors feed."""
        for feed, pairs in list(self.match.feeds.items()):
            source, target = self.source.table[feed.source], self.target.table[feed.target]
            given, asked = _seen(source.shape, feed.source_view), _seen(target.shape, feed.target_view)
            castable = source.dtype == target.dtype or {source.dtype, target.dtype} <= FLOATS.keys()
            if given == asked and castable:
                continue
            del self.match.feeds[feed]
            ranks = _ranks(rank for rank, _ in target.holders)
            for origin, name in pairs:
                asked_for = f"{target.dtype} {list(asked)}"
                found = f"{source.dtype} {list(given)}" + (f" as {origin}" if origin != name else "")
                self.faults.append(Fault(name, asked_for, found, f"target {ranks}"))


def _seen(shape: tuple[int, ...], view: View | None) -> tuple[int, ...]:
    if view is None:
        return shape
    length = sum(length for _, _, length in view.segments)
    return (*shape[: view.dim], length, *shape[view.dim + 1 :])


def _describe(form: Form) -> str:
    return f"{form.dtype} {list(form.shape)}"


def _ranks(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    if len(listed) == 1:
        return f"rank {listed[0]}"
    return f"ranks {', '.join(map(str, listed[:4]))}{', ...' if len(listed) > 4 else ''}"


def renamer(rename: Rename | None) -> Callable[[str], str]:
    """The target's name of each name of the source.

    Raises:
        DeclarationError: it is neither a mapping of texts nor a function, or a pattern has more ``*`` in the new name
            than in the old one. From the function that is given: its own gave something else than a text.
    """
    if rename is None:
        return lambda name: name
    if callable(rename):
        return _told(rename)
    if not isinstance(rename, Mapping):
        raise DeclarationError(
            f"rename={rename!r}: give a mapping of names of the source to names of the target, or a function"
        )
    patterns: list[tuple[re.Pattern[str], list[str]]] = []
    for old, new in rename.items():
        if not isinstance(old, str) or not isinstance(new, str) or new.count("*") > old.count("*"):
            raise DeclarationError(
                f"rename={{{old!r}: {new!r}}}: expected texts, with no more * in the new name than in the old one: "
                "what each * stands for is put in their order"
            )
        if "*" in old:
            patterns.append((re.compile(re.escape(old).replace(r"\*", "(.*)")), new.split("*")))
    exact = {old: new for old, new in rename.items() if "*" not in old}

    def renamed(name: str) -> str:
        if name in exact:
            return exact[name]
        for pattern, (first, *rest) in patterns:
            if found := pattern.fullmatch(name):
                return first + "".join(map("".join, zip(found.groups(), rest)))  # noqa: B905  # what is left out
        return name

    return renamed


def _told(rename: Callable[[str], str]) -> Callable[[str], str]:
    def renamed(name: str) -> str:
        found = rename(name)
        if not isinstance(found, str):
            raise DeclarationError(
                f"rename({name!r}) gave {found!r}; expected the target's name, the same one where it stays"
            )
        return found

    return renamed
