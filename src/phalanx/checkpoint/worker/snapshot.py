"""Copies of the states of ranks in the memory of ranks: a rank's own, and those that it keeps for others."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from phalanx.checkpoint.storage.tensor_index import Catalogue, Path, Piece, StoredTensor, StoredValue
from phalanx.checkpoint.worker.rng import Generators
from phalanx.checkpoint.worker.state_components import Leaf, Part, Want
from phalanx.checkpoint.worker.write import pickled
from phalanx.errors import CheckpointError
from phalanx.weights.planning.boxes import whole
from phalanx.weights.planning.digests import tensor_digest
from phalanx.weights.planning.readers.plain import local_of
from phalanx.weights.planning.tensors import name_of

__all__ = ["Copies", "RoleCopy", "StateCopy", "copy_role", "drop_gradients", "restore_role", "state_now"]


@dataclass
class RoleCopy:
    """The state of one role of one rank: local tensors, all else pickled, and where each lies in the state."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    values: dict[str, bytes] = field(default_factory=dict[str, bytes])
    paths: dict[str, Path] = field(default_factory=dict[str, Path])

    @property
    def nbytes(self) -> int:
        """Of tensors and values."""
        tensors = sum(one.numel() * one.element_size() for one in self.tensors.values())
        return tensors + sum(map(len, self.values.values()))

    def catalogue(self) -> Catalogue:
        """The same as what a save would have listed, of one rank alone."""
        tensors = {
            key: StoredTensor(name_of(self.tensors[key].dtype), shape, (_piece(shape),))
            for key, shape in self.shapes.items()
        }
        values = {key: StoredValue((_piece(None),)) for key in self.values}
        return Catalogue(1, tensors, values, self.paths)


@dataclass
class StateCopy:
    """The state of one rank: its roles that have one, and its random numbers."""

    roles: dict[str, RoleCopy]
    rng: bytes

    @property
    def nbytes(self) -> int:
        """Of all roles."""
        return sum(one.nbytes for one in self.roles.values())


def _piece(shape: tuple[int, ...] | None) -> Piece:
    return Piece("memory", 0, 0, -1, "", None if shape is None else whole(shape))


def copy_role(leaves: Mapping[str, Leaf], buffers: RoleCopy | None) -> RoleCopy:
    """Copy a state into host memory, into the buffers of an older copy where they fit."""
    made = RoleCopy()
    for key, leaf in leaves.items():
        made.paths[key] = leaf.path
        if not isinstance(leaf.value, torch.Tensor):
            made.values[key] = pickled(leaf.value)
            continue
        local = local_of(leaf.value.detach())
        buffer = None if buffers is None else buffers.tensors.get(key)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
        buffer.copy_(local)
        made.tensors[key] = buffer
        made.shapes[key] = tuple(local.shape) if leaf.held is None else tuple(leaf.held.shape)
    return made


def restore_role(parts: list[Part], copy: RoleCopy, role: str) -> None:
    """Bring the parts of a role back to what was copied.

    Raises:
        CheckpointError: a tensor has another local shape now: the ranks share the state in another way.
        CheckpointMismatch: the state has other parts than it had.
    """
    catalogue = copy.catalogue()
    keys = {*copy.tensors, *copy.values}
    wants: list[Want] = [part.wanted(catalogue, keys) for part in parts]
    for want in wants:
        for key, (tensor, _) in want.tensors.items():
            if key not in copy.tensors or copy.tensors[key].shape != tensor.shape:
                was = tuple(copy.tensors[key].shape) if key in copy.tensors else "none"
                raise CheckpointError(
                    f"role {role!r}: {key} has the local shape {tuple(tensor.shape)} now and had {was} when the "
                    "snapshot was taken; make the model in rejoin() as the constructor does"
                )
    with torch.no_grad():
        for part, want in zip(parts, wants, strict=True):
            for key, (tensor, _) in want.tensors.items():
                tensor.copy_(copy.tensors[key])
            part.apply({key: _unpickled(copy.values[key]) for key in want.values})


def drop_gradients(worker: Any) -> None:
    """Forget the gradients that a step which failed has left in what a worker has as attributes: they are no state."""
    for value in list(vars(worker).values()) if hasattr(worker, "__dict__") else ():
        if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
            value.zero_grad(set_to_none=True)


def _unpickled(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def state_now(leaves: Mapping[str, Mapping[str, Leaf]]) -> StateCopy:
    """A copy of the states of roles, without the random numbers."""
    return StateCopy({role: copy_role(found, None) for role, found in leaves.items()}, b"")


class Copies:
    """What one rank holds: the last two copies of its own state, and the last two of each rank that it keeps them for.

    Two, since a snapshot counts once all ranks have theirs: if one dies before, the one before is still whole.
    """

    def __init__(self, device: Any) -> None:
        self._generators = Generators(device)
        self._own: dict[int, StateCopy] = {}
        self._held: dict[int, dict[int, StateCopy]] = {}
        self._digests: dict[int, dict[tuple[str, str], bytes]] = {}

    def take(self, number: int, last: int, leaves: Mapping[str, Mapping[str, Leaf]]) -> StateCopy:
        """Copy the state of each role as snapshot ``number``; the ``last`` whole one is kept."""
        spare = next((copy for at, copy in self._own.items() if at != last), None)
        self._own = {at: copy for at, copy in self._own.items() if at == last}
        roles = {
            role: copy_role(found, None if spare is None else spare.roles.get(role))
            for role, found in leaves.items()
        }
        self._own[number] = copy = StateCopy(roles, pickled(self._generators.state_dict()))
        return copy

    def changed(self, number: int, last: int, copy: StateCopy, *, again: bool) -> StateCopy:
        """Of a copy, what its holder does not have: all, or the tensors that are not as in the ``last`` whole snapshot.

        A snapshot that failed in between counts for nothing: its holder may have none of it.
        """
        before, now = self._digests.get(last, {}), dict[tuple[str, str], bytes]()
        self._digests = {last: before, number: now}
        roles: dict[str, RoleCopy] = {}
        for role, one in copy.roles.items():
            sent: dict[str, torch.Tensor] = {}
            for key, tensor in one.tensors.items():
                digest = now[role, key] = tensor_digest(tensor, verify="full")
                if not again or before.get((role, key)) != digest:
                    sent[key] = tensor
            roles[role] = RoleCopy(sent, one.shapes, one.values, one.paths)
        return StateCopy(roles, copy.rng)

    def hold(self, rank: int, number: int, last: int, copy: StateCopy) -> None:
        """Keep the copy of another rank; tensors that did not come are those of the last one."""
        before = self._held.get(rank, {}).get(last)
        roles: dict[str, RoleCopy] = {}
        for role, one in copy.roles.items():
            old = before.roles.get(role) if before else None
            tensors: dict[str, torch.Tensor] = {}
            for key in one.shapes:
                come = one.tensors.get(key)
                if come is not None:
                    tensors[key] = come.detach().clone()  # what came lies in memory of the object store
                elif old is not None and key in old.tensors:
                    tensors[key] = old.tensors[key]
                else:
                    raise CheckpointError(
                        f"rank {rank} sent {key} for snapshot {number} as not changed since {last}, "
                        "which is not here; call px.snapshot again"
                    )
            roles[role] = RoleCopy(tensors, one.shapes, one.values, one.paths)
        kept = {last: before} if before is not None else {}
        self._held[rank] = {**kept, number: StateCopy(roles, copy.rng)}

    def own(self, number: int) -> StateCopy:
        """This rank's own copy.

        Raises:
            CheckpointError: it has none of that number.
        """
        return self._found(self._own, number, "its own state")

    def held(self, rank: int, number: int) -> StateCopy:
        """What is kept for another rank.

        Raises:
            CheckpointError: there is none of that number.
        """
        return self._found(self._held.get(rank, {}), number, f"the state of rank {rank}")

    @staticmethod
    def _found(copies: Mapping[int, StateCopy], number: int, what: str) -> StateCopy:
        if number not in copies:
            raise CheckpointError(
                f"this rank has no copy of {what} of snapshot {number}; it has {sorted(copies) or 'none'}"
            )
        return copies[number]

    def put_back(self, number: int, copy: StateCopy) -> None:
        """Have a copy that another rank kept as this rank's own."""
        self._own, self._digests = {number: copy}, {}

    def draw_on(self, copy: StateCopy) -> None:
        """Go on with the random numbers of a copy."""
        self._generators.load_state_dict(_unpickled(copy.rng))
