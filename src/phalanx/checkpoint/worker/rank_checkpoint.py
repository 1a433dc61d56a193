"""A rank's part of saves and loads: what it keeps from one question of the driver to the next."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from phalanx.checkpoint.storage.manifest import FileFacts, digest
from phalanx.checkpoint.storage.read_plan import (
    check_forms,
    check_values,
    fetches,
    keys_for,
    nbytes_of,
    selected,
)
from phalanx.checkpoint.storage.safetensors_layout import stored_in
from phalanx.checkpoint.storage.storage import place_at
from phalanx.checkpoint.storage.tensor_index import CATALOGUE, Catalogue, Path
from phalanx.checkpoint.storage.write_plan import Offer, PlainTensor, WriteOrder
from phalanx.checkpoint.worker.checkpoint_requests import (
    Loaded,
    LoadOrder,
    RankFiles,
    WriteFiles,
    WriteModel,
    file_of,
    note_of,
    title_of,
)
from phalanx.checkpoint.worker.read import Files
from phalanx.checkpoint.worker.roles import has_state, parts_of
from phalanx.checkpoint.worker.safetensors_writer import save_config, write_boxes
from phalanx.checkpoint.worker.snapshot import Copies
from phalanx.checkpoint.worker.state_components import Leaf, Part, Want
from phalanx.checkpoint.worker.tree import key_of, value_digest
from phalanx.checkpoint.worker.write import pickled, write_file
from phalanx.declare.context import WorkerContext
from phalanx.declare.state_declarations import StateDeclared
from phalanx.errors import CheckpointCorrupted, CheckpointError, CheckpointMismatch, PhalanxError
from phalanx.tracing.saves import span_attributes
from phalanx.tracing.spans import span
from phalanx.weights.planning.readers.plain import local_of
from phalanx.weights.planning.tensors import cut, name_of

__all__ = ["RankSaving"]

_END_S = 2.0


class RankSaving:
    """Of one rank. Not for several threads, but for the one that it makes itself."""

    def __init__(self, context: WorkerContext, instances: Mapping[str, Any], device: Any) -> None:
        self._context = context
        self._instances = instances
        self._device = device
        self._buffers: dict[tuple[str, str, Any], torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._ended = False
        self._given_up = ""
        self._told: tuple[str, RankFiles | str] = ("", "")
        self._loads: dict[str, tuple[Catalogue, list[Part], list[Want]]] = {}
        self.copies = Copies(device)

    def roles(self, role: str) -> list[str]:
        """The roles that have a state, of the one named, or of all where a colocated group is meant.

        Raises:
            CheckpointError: none has.
        """
        if role or "" in self._instances:
            self.parts(role)
            return [role]
        found: list[str] = []
        first: CheckpointError | None = None
        for one in self._instances:
            try:
                self.parts(one)
                found.append(one)
            except CheckpointError as error:
                first = first or error
        if not found and first is not None:
            raise first
        return found

    def has_state(self) -> bool:
        """Whether any role has a state."""
        declared = StateDeclared.of(self._context).roles
        return any(has_state(instance, declared.get(role)) for role, instance in self._instances.items())

    def parts(self, role: str) -> list[Part]:
        """The parts of the state of a role. Raises CheckpointError where it has none."""
        declared = StateDeclared.of(self._context).roles.get(role)
        return parts_of(self._instances[role], declared, self._device)

    def leaves(self, role: str) -> dict[str, Leaf]:
        """What a role has to save, by key."""
        found: dict[str, Leaf] = {}
        for part in self.parts(role):
            for leaf in part.offered():
                found[key_of(leaf.path)] = leaf
        return found

    def offer(self, role: str, *, alone: bool) -> Offer:
        """What a role has. Where the rank is ``alone`` nothing has to be compared, and is not digested."""
        tensors, plain, values, paths = {}, dict[str, PlainTensor](), dict[str, str](), {}
        for key, leaf in self.leaves(role).items():
            paths[key] = leaf.path
            if leaf.held is not None:
                tensors[key] = leaf.held
            elif isinstance(leaf.value, torch.Tensor):
                local = local_of(leaf.value)
                _check_dense(key, local)
                told = "" if alone else value_digest(local)
                plain[key] = PlainTensor(name_of(local.dtype), tuple(local.shape), told)
            else:
                with _pickling(key, leaf.value):
                    values[key] = "" if alone else value_digest(leaf.value)
        return Offer(tensors, plain, values, paths)

    def write(self, order: WriteFiles) -> RankFiles:
        """Write now, from the tensors as they are."""
        self.wait()
        return self._written(order, {role: self._items(role, order.orders[role]) for role in order.folders})

    def stage(self, order: WriteFiles) -> int:
        """Copy what is to be written, and have a thread write it; the bytes that were copied."""
        self.wait()
        staged: dict[str, list[torch.Tensor | bytes]] = {}
        for role in order.folders:
            items = self._items(role, order.orders[role])
            pairs = zip(order.orders[role], items, strict=True)
            staged[role] = [self._copied(role, one, item) for one, item in pairs]
        thread = threading.Thread(
            target=self._write_staged, args=(order, staged), name="phalanx-save", daemon=True
        )
        self._thread = thread
        thread.start()
        return sum(
            len(item) if isinstance(item, bytes) else item.numel() * item.element_size()
            for items in staged.values()
            for item in items
        )

    def wait(self) -> None:
        """Until the thread of the save before has ended."""
        thread = self._thread
        if thread is not None:
            thread.join()
            self._thread = None

    def rest(self, notes: str) -> None:
        """The driver has given up the save whose thread tells its end in ``notes``; returns once that has ended."""
        self._given_up = notes
        self.wait()

    def told(self, notes: str) -> RankFiles | str | None:
        """What came of the save whose thread tells it in ``notes``; None where it has not ended."""
        return self._told[1] if self._told[0] == notes else None

    def end(self) -> None:
        """The rank ends: what its thread writes is of no use any more."""
        self._ended = True
        if self._thread is not None:
            self._thread.join(_END_S)

    def _items(self, role: str, orders: tuple[WriteOrder, ...]) -> Iterator[torch.Tensor | bytes]:
        leaves = self.leaves(role)
        for order in orders:
            if order.key not in leaves:
                raise CheckpointError(
                    f"{order.key} is not in the state of this rank any more: a call changed it; save again"
                )
            value = leaves[order.key].value
            with _pickling(order.key, value):
                changed = bool(order.digest) and value_digest(value) != order.digest
            if changed:
                raise CheckpointError(
                    f"{order.key} changed while the save was planned, by another call to the group; save again"
                )
            if order.box is None:
                with _pickling(order.key, value):
                    item = pickled(local_of(value).cpu() if isinstance(value, torch.Tensor) else value)
                yield item
            else:
                yield cut(local_of(value.detach()), order.at, order.box.sizes)

    def _copied(self, role: str, order: WriteOrder, item: torch.Tensor | bytes) -> torch.Tensor | bytes:
        if isinstance(item, bytes):
            return item
        key = (role, order.key, order.box)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != item.shape or buffer.dtype != item.dtype:
            buffer = torch.empty(item.shape, dtype=item.dtype, pin_memory=item.is_cuda)
            self._buffers[key] = buffer
        buffer.copy_(item)
        return buffer

    def _written(
        self, order: WriteFiles, items: Mapping[str, Iterator[torch.Tensor | bytes] | list[Any]]
    ) -> RankFiles:
        began = time.monotonic()
        written, files = {}, dict[str, FileFacts]()
        for role, folder in order.folders.items():
            with span("write", **span_attributes(title_of(role), order.nbytes.get(role, 0))):
                found, facts = write_file(
                    f"{folder}/{file_of(order.index)}", self._until_end(order, items[role])
                )
            written[role], files[role] = tuple(found), facts
        return RankFiles(written, files, time.monotonic() - began)

    def _until_end(self, order: WriteFiles, items: Any) -> Iterator[Any]:
        for item in items:
            if self._ended:
                raise CheckpointError("the group was closed before its state was written")
            if order.notes and order.notes == self._given_up:
                raise CheckpointError("the driver gave it up")
            yield item

    def _write_staged(self, order: WriteFiles, staged: Mapping[str, list[torch.Tensor | bytes]]) -> None:
        try:
            told: RankFiles | str = self._written(order, staged)
        except BaseException as error:
            told = str(error) if isinstance(error, PhalanxError) else f"{type(error).__name__}: {error}"
        self._told = (order.notes, told)
        with suppress(PhalanxError):  # the driver asks for what cannot be told so: the disk may be full
            place_at(order.notes).write(note_of(order.index), pickle.dumps(told))

    def plan_load(self, order: LoadOrder) -> dict[str, list[str]]:
        """See whether everything fits, before anything is changed; what this rank does not take, by role."""
        left: dict[str, list[str]] = {}
        self._loads = {}
        for role, folder in order.folders.items():
            if role not in self._instances:
                raise CheckpointMismatch(f"{folder} is of a role {role!r}, which this group does not have")
            chosen, names = self._catalogue(role, folder, order)
            check_values(chosen, order.world_size)
            keys = keys_for(chosen, order.index, order.world_size)
            parts = [part for part in self.parts(role) if not part.name or _is_chosen(part.name, names)]
            missing = [part.name for part in parts if part.name and part.name not in chosen.parts()]
            if missing:
                # Generators are by rank: whoever asks for parts seldom wants them.
                alone = [name for name in chosen.parts() if name != "rng"]
                raise CheckpointMismatch(
                    f"{folder} has no part {missing[0]!r}, which the worker has; it has {', '.join(chosen.parts())}. "
                    f"Load those alone: parts={alone!r}"
                )
            wants = [part.wanted(chosen, keys, names) for part in parts]
            taken = {key for want in wants for key in (*want.tensors, *want.values)}
            for want in wants:
                check_forms(chosen, {key: held for key, (_, held) in want.tensors.items()})
            left[role] = sorted((chosen.tensors.keys() | chosen.values.keys()) - taken)
            self._loads[role] = (chosen, parts, wants)
        return left

    def _catalogue(
        self, role: str, folder: str, order: LoadOrder
    ) -> tuple[Catalogue, tuple[str, ...] | None]:
        """What is to be loaded, and the outermost keys of the state that it is for."""
        if role not in order.models:
            return selected(_catalogue(folder, order.catalogues[role]), order.parts, folder), order.parts
        apart = any(leaf.path[:1] == ("model",) for leaf in self.leaves(role).values())
        prefix: Path = ("model",) if apart else ()
        return stored_in(order.models[role], prefix), ("model",) if apart else None

    def write_model(self, order: WriteModel) -> int:
        """Write boxes of a model into files that are there already; their bytes."""
        self.wait()
        items = self._items(order.role, order.orders)
        boxes = (
            (one.key, one.box, item)
            for one, item in zip(order.orders, items, strict=True)
            if one.box is not None and isinstance(item, torch.Tensor)
        )
        if order.config:
            declared = StateDeclared.of(self._context).roles.get(order.role)
            model = (
                getattr(self._instances[order.role], "model", None) if declared is None else declared.model
            )
            save_config(model, order.folder)
        with span("write", **span_attributes(title_of(order.role), 0)):
            return write_boxes(order.folder, order.places, boxes)

    def load(self, order: LoadOrder) -> Loaded:
        """Read what was planned, and take it over."""
        began, nbytes = time.monotonic(), 0
        loads, self._loads = self._loads, {}
        for role, (catalogue, parts, wants) in loads.items():
            wanted = [
                fetches(catalogue, {key: held for key, (_, held) in want.tensors.items()}) for want in wants
            ]
            attributes = span_attributes(title_of(role), sum(map(nbytes_of, wanted)))
            with span("read", **attributes), Files(order.folders[role]) as files:
                values: list[dict[str, Any]] = []
                for want, pieces in zip(wants, wanted, strict=True):
                    local = {key: tensor for key, (tensor, _) in want.tensors.items()}
                    files.fill(catalogue, pieces, local)
                    values.append(_values(files, catalogue, want, order))
                nbytes += files.nbytes
            for part, found in zip(parts, values, strict=True):
                part.apply(found)
        return Loaded(nbytes, time.monotonic() - began)


def _check_dense(key: str, tensor: torch.Tensor) -> None:
    """Raises CheckpointError of a tensor that has no memory of its own for each element."""
    if tensor.is_meta or tensor.layout is not torch.strided:
        kind = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"
        raise CheckpointError(
            f"{key} of the state is a tensor {kind}, which cannot be saved; give it dense, or leave it out of the state"
        )


@contextmanager
def _pickling(key: str, value: Any) -> Generator[None]:
    """Whatever goes wrong there is said of the value that it went wrong with."""
    try:
        yield
    except (PhalanxError, MemoryError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"{key} of the state, a {type(value).__qualname__}, cannot be pickled: {error}; leave it out of the "
            "state, or give what it consists of"
        ) from error


def _values(files: Files, catalogue: Catalogue, want: Want, order: LoadOrder) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in sorted(want.values):
        stored = catalogue.values[key]
        piece = stored.of(order.index, order.world_size)
        if piece is None and not stored.by_rank:
            piece = stored.pieces[0]
        if piece is None:
            raise CheckpointMismatch(
                f"{key} was not saved by rank {order.index}, and differed between those that did"
            )
        found[key] = files.value(piece)
    return found


def _is_chosen(name: str, parts: tuple[str, ...] | None) -> bool:
    return parts is None or name in parts


def _catalogue(folder: str, facts: FileFacts) -> Catalogue:
    path = f"{folder}/{CATALOGUE}"
    data = place_at(folder).read(CATALOGUE)
    if data is None:
        raise CheckpointError(
            f"{path} cannot be seen from this rank's node, though the driver sees it; choose a path that the driver "
            "and all ranks share"
        )
    if FileFacts(len(data), digest(data)) != FileFacts(*facts):
        raise CheckpointCorrupted(
            f"{path} is damaged: it is not what was written; load another step (step=)", files=(path,)
        )
    return Catalogue.from_bytes(data, path)
