"""Copies of states in the memory of a rank: its own state, and states that it holds for other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import torch

from phalanx.errors import CheckpointError
from phalanx.wire.codec import decode, encode
from phalanx.worker.rank_state import LocalTensor, RankState, SavedLeaf

Place = tuple[str, str]
"""Role and key of a leaf."""
RNG = "random generators"
"""Key of the state of the process's random generators, in place of a role."""


@dataclass
class StateCopy:
    """The state of a rank: by role and key, each leaf, and its local tensor or encoded value.

    A copy that is sent to a holder lacks the data that the holder has.
    """

    leaves: dict[Place, SavedLeaf] = field(default_factory=dict)
    data: dict[Place, torch.Tensor | bytes] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of tensors and values of the roles."""
        data = [one for (role, _), one in self.data.items() if role != RNG]
        return sum(one.nbytes if isinstance(one, torch.Tensor) else len(one) for one in data)


def copy_state(states: Mapping[str, RankState], older: StateCopy | None = None) -> StateCopy:
    """Copy the states of roles into host memory, into the tensors of an ``older`` copy where they fit."""
    buffers, made = {} if older is None else older.data, StateCopy()
    for role, state in states.items():
        for key, (path, value) in state.leaves().items():
            place = role, key
            if not isinstance(value, LocalTensor):
                made.leaves[place], made.data[place] = SavedLeaf(path), encode(value).to_bytes()
                continue
            value.check(key)
            made.leaves[place] = SavedLeaf(path, value.local.dtype, value.shape)
            made.data[place] = host_copy(value.local, buffers.get(place))
    return made


def host_copy(tensor: torch.Tensor, buffer: Any) -> torch.Tensor:
    """Copy a tensor into host memory: into ``buffer`` if it is a tensor of the same shape and type."""
    if not _is_alike(buffer, tensor):
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return buffer.copy_(tensor)


def _is_alike(value: Any, tensor: torch.Tensor) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a tensor of the same shape and type."""
    return isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (tensor.shape, tensor.dtype)


def _is_unchanged(older: Any, tensor: torch.Tensor) -> bool:
    """Return whether a copy of a tensor has the bits of an older copy."""
    word = torch.uint8 if tensor.nbytes % 8 else torch.int64  # eight bytes at a time are ten times as fast
    return _is_alike(older, tensor) and torch.equal(*(one.reshape(-1).view(word) for one in (older, tensor)))


def _restore_role(state: RankState, copy: StateCopy, role: str) -> None:
    """Restore the state of a role from a copy.

    Raises:
        CheckpointError: if a tensor has another local shape: the ranks shard the state differently.
        CheckpointMismatch: if the state has other components.
    """
    leaves = {key: leaf for (owner, key), leaf in copy.leaves.items() if owner == role}
    values: dict[str, Any] = {}
    filled: list[tuple[torch.Tensor, torch.Tensor]] = []
    for key, target in state.targets(leaves, "the snapshot").items():
        data = copy.data[role, key]
        if isinstance(data, bytes):
            values[key] = decode(data)
        elif target is not None:
            if data.shape != target.local.shape:
                raise CheckpointError(
                    f"role {role!r}: {key} has the local shape {tuple(target.local.shape)} now and had "
                    f"{tuple(data.shape)} when the snapshot was taken; create the model in rejoin() as the constructor "
                    "does"
                )
            filled.append((target.local, data))
    with torch.no_grad():
        for target, data in filled:
            target.copy_(data)
        state.apply(values)


class StateCopies:
    """The copies in a rank: the last two of its own state, and up to two of each rank it holds copies for.

    A snapshot counts once all ranks have theirs. If a rank dies before, the previous snapshot is still complete.
    """

    def __init__(self) -> None:
        self._own: dict[int, StateCopy] = {}
        self._held: dict[int, dict[int, StateCopy]] = {}

    def take(
        self, number: int, last: int, states: Mapping[str, RankState], *, again: bool
    ) -> tuple[StateCopy, StateCopy]:
        """Copy the state of each role as snapshot ``number``; drop copies except ``last``, the last complete snapshot.

        Returns:
            The copy, and a copy with the data that its holder lacks: if ``again``, the changes since ``last``. A failed
            snapshot in between does not count: its data may not have reached the holder.
        """
        older = next((copy for at, copy in self._own.items() if at != last), None)
        self._own = {at: copy for at, copy in self._own.items() if at == last}
        # Drop the copies of ranks that left, or that have another holder by now: these are not of ``last``.
        self._held = {rank: copies for rank, copies in self._held.items() if last in copies}
        copy = self._own[number] = copy_state(states, older)
        before = self._own[last].data if again and last in self._own else {}
        changed = {
            place: data
            for place, data in copy.data.items()
            if isinstance(data, bytes) or not _is_unchanged(before.get(place), data)
        }
        return copy, replace(copy, data=changed)

    def hold(self, rank: int, number: int, last: int, copy: StateCopy) -> None:
        """Hold the copy of another rank. Tensors that were not sent are taken from the last copy."""
        before = self._held.get(rank, {}).get(last)
        data = copy.data if before is None else before.data | copy.data
        for place in copy.leaves:
            if place not in data:
                raise CheckpointError(
                    f"rank {rank} sent {place[1]} for snapshot {number} as unchanged since {last}, which is not here; "
                    "call px.snapshot again"
                )
        held = replace(copy, data={place: data[place] for place in copy.leaves})
        self._held[rank] = {number: held} if before is None else {last: before, number: held}

    def held(self, rank: int, number: int) -> StateCopy:
        """Return the copy held for another rank.

        Raises:
            CheckpointError: if there is none of that number.
        """
        return _numbered(self._held.get(rank, {}), number, f"the state of rank {rank}")

    def restore(
        self, number: int, held: StateCopy | None, states: Mapping[str, RankState], workers: Iterable[Any]
    ) -> None:
        """Restore ``states``, in their order, and drop the gradients of the failed step from the workers' attributes.

        Args:
            held: the copy that another rank held, from now on the rank's own; None: the rank has its copy.

        Raises:
            CheckpointError: if there is no copy of that number, or it does not fit.
        """
        if held is not None:
            self._own = {number: held}
        copy = _numbered(self._own, number, "its own state")
        for role, state in states.items():
            _restore_role(state, copy, role)
        for worker in workers:
            for value in list(getattr(worker, "__dict__", {}).values()):
                if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
                    value.zero_grad(set_to_none=True)


def _numbered(copies: Mapping[int, StateCopy], number: int, title: str) -> StateCopy:
    if number not in copies:
        raise CheckpointError(
            f"this rank has no copy of {title} of snapshot {number}; it has {sorted(copies) or 'none'}"
        )
    return copies[number]
