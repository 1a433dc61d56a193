"""A group's model as a folder in Hugging Face's format, and from one."""

from __future__ import annotations

import os
import secrets
import shutil
import struct
from collections.abc import Mapping
from typing import Any

from phalanx.checkpoint.checkpoint_rpc import answers_of, ask_same, outputs_of, send_each
from phalanx.checkpoint.group_load import check_taken
from phalanx.checkpoint.storage.safetensors_layout import INDEX, Place, Shards, plan_shards
from phalanx.checkpoint.storage.storage import advice
from phalanx.checkpoint.storage.tensor_index import Path
from phalanx.checkpoint.storage.write_plan import Offer, Spread, spread
from phalanx.checkpoint.worker import checkpoint_handlers as questions
from phalanx.checkpoint.worker.checkpoint_requests import Loaded, LoadOrder, WriteModel
from phalanx.errors import CheckpointCorrupted, CheckpointError
from phalanx.weights.sync_sides import Ranks

__all__ = ["load_model", "save_model"]


def save_model(group: Ranks, path: str, shard_bytes: int) -> int:
    """Write the model of a role into a new folder, in whose files every rank writes its boxes; bytes written.

    Raises:
        CheckpointError: there is a folder already, it cannot be written, or the state is no model.
    """
    if "://" in path:
        raise CheckpointError(
            f"{path!r}: a model is written into files by all ranks at once, so give a path, not a URL"
        )
    path = os.path.abspath(os.path.expanduser(path))
    if os.path.exists(path) and (not os.path.isdir(path) or os.listdir(path)):
        raise CheckpointError(f"{path} is there already; give the path of a folder that is not")
    role, plan, names = _planned(group)
    shards = plan_shards({names[key]: form for key, form in _forms(plan, names).items()}, shard_bytes)
    places = {key: shards.places[name] for key, name in names.items()}
    folder = f"{path}.{secrets.token_hex(4)}.part"
    try:
        _make(folder, shards)
        written = _written(group, role, plan, places, folder)
        if os.path.isdir(path):
            os.rmdir(path)
        os.rename(folder, path)
        return sum(written)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {advice(error)}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _planned(group: Ranks) -> tuple[str, Spread, dict[str, str]]:
    """The role, who writes what, and the name of each key in the folder."""
    title = f"save model of {group.name!r}: plan"
    offers: list[dict[str, Offer]] = ask_same(
        group, title, questions.offer, group.role, len(group.ranks) == 1
    )
    roles = sorted({role for one in offers for role in one})
    if len(roles) != 1:
        raise CheckpointError(
            f"{group.name!r} has the roles {', '.join(roles)}; give one of them, such as group.{roles[0]}"
        )
    found = [one[roles[0]] for one in offers]
    paths = {key: path for one in found for key, path in one.paths.items()}
    apart = any(path and path[0] == "model" for path in paths.values())
    names = {key: _name(path, apart) for key, path in paths.items() if not apart or path[:1] == ("model",)}
    values = sorted({key for one in found for key in one.values if key in names})
    if values or not names:
        raise CheckpointError(
            f"the state of {group.name!r} is no model: {', '.join(values[:5]) or 'it has no tensors'}; register the "
            "model alone: px.register_state(self, model=...)"
        )
    plan = spread(
        [
            Offer(
                {key: held for key, held in one.tensors.items() if key in names},
                {key: plain for key, plain in one.plain.items() if key in names},
                {},
                {key: path for key, path in one.paths.items() if key in names},
            )
            for one in found
        ]
    )
    if plan.by_rank:
        raise CheckpointError(
            f"{', '.join(sorted(plan.by_rank)[:5])} differ by rank, and nothing says how they are sharded; tell it "
            "(DTensor, px.register_state(boxes=..., megatron=...))"
        )
    return roles[0], plan, names


def _name(path: Path, apart: bool) -> str:
    steps = path[1:] if apart else path
    return ".".join(str(step[1]) if isinstance(step, tuple) else str(step) for step in steps)


def _forms(plan: Spread, names: Mapping[str, str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for offer in plan.offers:
        for key, one in (*offer.tensors.items(), *offer.plain.items()):
            if key in names:
                found[key] = (one.dtype, one.shape)
    return found


def _make(folder: str, shards: Shards) -> None:
    """The files with their headers, in their sizes: a disk that is too small is found here."""
    os.makedirs(folder)
    for file, header in shards.headers.items():
        with open(f"{folder}/{file}", "wb") as made:
            os.posix_fallocate(made.fileno(), 0, shards.sizes[file])
            made.write(header)
    if len(shards.headers) > 1:
        with open(f"{folder}/{INDEX}", "wb") as made:
            made.write(shards.index())


def _written(group: Ranks, role: str, plan: Spread, places: Mapping[str, Place], folder: str) -> list[int]:
    orders = [
        WriteModel(role, orders, {one.key: places[one.key] for one in orders}, folder, config=index == 0)
        for index, orders in enumerate(plan.orders)
    ]
    title = f"save model of {group.name!r}: write"
    return outputs_of(group, send_each(group, title, questions.write_model, orders), title)


def load_model(group: Ranks, path: str) -> list[Loaded]:
    """Load a folder of safetensors files into the model of a role; what each rank read.

    Raises:
        CheckpointMismatch: it does not fit; nothing was changed.
        CheckpointCorrupted: a file is none of safetensors.
    """
    path = os.path.abspath(os.path.expanduser(path))
    headers = _headers(path)
    role = group.role
    count = len(group.ranks)
    orders = [LoadOrder({role: path}, {}, None, index, count, {role: headers}) for index in range(count)]
    title = f"load model of {group.name!r}"
    planned = send_each(group, f"{title}: plan", questions.plan_load, orders)
    left: list[dict[str, Any]] = answers_of(group, planned)
    check_taken(left, {role: path})
    return outputs_of(group, send_each(group, f"{title}: read", questions.load, orders), title)


def _headers(path: str) -> dict[str, bytes]:
    try:
        files = sorted(name for name in os.listdir(path) if name.endswith(".safetensors"))
        found = {name: _header(f"{path}/{name}") for name in files}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {advice(error)}") from error
    if not found:
        raise CheckpointError(f"{path} has no safetensors files")
    return found


def _header(file: str) -> bytes:
    with open(file, "rb") as opened:
        start = opened.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if 0 <= length <= os.stat(file).st_size - 8:
            return start + opened.read(length)
    raise CheckpointCorrupted(f"{file} is damaged: its header is none of safetensors", files=(file,))
