"""Copies of the states of ranks in the memory of ranks: its own state, and states it holds for other ranks."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from phalanx.errors import CheckpointError
from phalanx.weights.digests import tensor_digest
from phalanx.worker.rank_state import Generators, LocalTensor, RankState, SavedLeaf


@dataclass
class RoleCopy:
    """The state of a role of a rank: local tensors, pickled values, and the saved leaf of each key."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    values: dict[str, bytes] = field(default_factory=dict[str, bytes])
    leaves: dict[str, SavedLeaf] = field(default_factory=dict[str, SavedLeaf])

    @property
    def nbytes(self) -> int:
        """Bytes of tensors and values."""
        tensors = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())
        return tensors + sum(map(len, self.values.values()))


@dataclass
class StateCopy:
    """The state of a rank: its roles with a state, and its random generators."""

    roles: dict[str, RoleCopy]
    rng: bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all roles."""
        return sum(role.nbytes for role in self.roles.values())


def copy_role(state: RankState, buffers: RoleCopy | None) -> RoleCopy:
    """Copy a state into host memory, into the buffers of an older copy where they fit."""
    made = RoleCopy()
    for key, (path, value) in state.leaves().items():
        if not isinstance(value, LocalTensor):
            made.leaves[key] = SavedLeaf(path)
            made.values[key] = _pickled(value)
            continue
        local = value.local
        buffer = None if buffers is None else buffers.tensors.get(key)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
        made.tensors[key] = buffer.copy_(local)
        made.leaves[key] = SavedLeaf(path, local.dtype, value.shape)
    return made


def copy_state(states: Mapping[str, RankState]) -> StateCopy:
    """Copy the states of roles, without the random generators."""
    return StateCopy({role: copy_role(state, None) for role, state in states.items()}, b"")


def restore_role(state: RankState, copy: RoleCopy, role: str) -> None:
    """Restore the state of a role from its copy.

    Raises:
        CheckpointError: if a tensor has another local shape: the ranks shard the state differently.
        CheckpointMismatch: if the state has other components.
    """
    targets = state.targets(copy.leaves, "the snapshot")
    for key, target in targets.items():
        if target is not None and copy.tensors[key].shape != target.local.shape:
            raise CheckpointError(
                f"role {role!r}: {key} has the local shape {tuple(target.local.shape)} now and had "
                f"{tuple(copy.tensors[key].shape)} when the snapshot was taken; create the model in rejoin() as the "
                "constructor does"
            )
    with torch.no_grad():
        for key, target in targets.items():
            if target is not None:
                target.local.copy_(copy.tensors[key])
        state.apply({key: _unpickled(data) for key, data in copy.values.items()})


def drop_gradients(worker: Any) -> None:
    """Drop the gradients of a failed step from a worker's attributes: they are no state."""
    for value in list(vars(worker).values()) if hasattr(worker, "__dict__") else ():
        if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
            value.zero_grad(set_to_none=True)


class StateCopies:
    """The copies in a rank: the last two of its own state, and the last two of each rank it holds copies for.

    A snapshot counts once all ranks have theirs. If a rank dies before, the previous snapshot is still complete.
    """

    def __init__(self, device: Any) -> None:
        self._generators = Generators(device)
        self._own: dict[int, StateCopy] = {}
        self._held: dict[int, dict[int, StateCopy]] = {}
        self._digests: dict[int, dict[tuple[str, str], bytes]] = {}

    def take(self, number: int, last: int, states: Mapping[str, RankState]) -> StateCopy:
        """Copy the state of each role as snapshot ``number``. The ``last`` complete snapshot is kept."""
        spare = next((copy for at, copy in self._own.items() if at != last), None)
        self._own = {at: copy for at, copy in self._own.items() if at == last}
        roles = {
            role: copy_role(state, None if spare is None else spare.roles.get(role))
            for role, state in states.items()
        }
        self._own[number] = copy = StateCopy(roles, _pickled(self._generators.state_dict()))
        return copy

    def changed(self, number: int, last: int, copy: StateCopy, *, again: bool) -> StateCopy:
        """Return the part of a copy that its holder lacks: with ``again``, tensors that changed since ``last``.

        A failed snapshot in between does not count: its holder may have none of it.
        """
        before, now = self._digests.get(last, {}), dict[tuple[str, str], bytes]()
        self._digests = {last: before, number: now}
        roles: dict[str, RoleCopy] = {}
        for role, state in copy.roles.items():
            sent: dict[str, torch.Tensor] = {}
            for key, tensor in state.tensors.items():
                digest = now[role, key] = tensor_digest(tensor, verify="full")
                if not again or before.get((role, key)) != digest:
                    sent[key] = tensor
            roles[role] = RoleCopy(sent, state.values, state.leaves)
        return StateCopy(roles, copy.rng)

    def hold(self, rank: int, number: int, last: int, copy: StateCopy) -> None:
        """Hold the copy of another rank. Tensors that were not sent are taken from the last copy."""
        before = self._held.get(rank, {}).get(last)
        roles: dict[str, RoleCopy] = {}
        for role, sent in copy.roles.items():
            old = before.roles.get(role) if before else None
            tensors: dict[str, torch.Tensor] = {}
            for key, leaf in sent.leaves.items():
                if leaf.dtype is None:
                    continue
                if key in sent.tensors:
                    tensors[key] = sent.tensors[key].detach().clone()  # it is memory of the object store
                elif old is not None and key in old.tensors:
                    tensors[key] = old.tensors[key]
                else:
                    raise CheckpointError(
                        f"rank {rank} sent {key} for snapshot {number} as unchanged since {last}, which is not here; "
                        "call px.snapshot again"
                    )
            roles[role] = RoleCopy(tensors, sent.values, sent.leaves)
        kept = {last: before} if before is not None else {}
        self._held[rank] = {**kept, number: StateCopy(roles, copy.rng)}

    def own(self, number: int) -> StateCopy:
        """Return the copy of this rank's own state.

        Raises:
            CheckpointError: if there is none of that number.
        """
        return _numbered(self._own, number, "its own state")

    def held(self, rank: int, number: int) -> StateCopy:
        """Return the copy held for another rank.

        Raises:
            CheckpointError: if there is none of that number.
        """
        return _numbered(self._held.get(rank, {}), number, f"the state of rank {rank}")

    def put_back(self, number: int, copy: StateCopy) -> None:
        """Take a copy that another rank held as this rank's own."""
        self._own, self._digests = {number: copy}, {}

    def restore_generators(self, copy: StateCopy) -> None:
        """Set the random generators to the states of a copy."""
        self._generators.load_state_dict(_unpickled(copy.rng))


def _numbered(copies: Mapping[int, StateCopy], number: int, title: str) -> StateCopy:
    if number not in copies:
        raise CheckpointError(
            f"this rank has no copy of {title} of snapshot {number}; it has {sorted(copies) or 'none'}"
        )
    return copies[number]


def _pickled(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _unpickled(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
