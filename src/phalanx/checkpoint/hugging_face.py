"""A group's model saved as a folder in Hugging Face's format, and loaded from one."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.checkpoint import Metadata, SavePlan, TensorStorageMetadata

from phalanx.checkpoint import rank_checkpoint as handlers
from phalanx.checkpoint.group_checkpoint import GroupLoad, call_ranks, load_groups, plan_group
from phalanx.checkpoint.model_folder import ModelFiles
from phalanx.checkpoint.planners import merge_plans
from phalanx.checkpoint.rank_checkpoint import Source
from phalanx.checkpoint.storage import storage_errors
from phalanx.errors import CheckpointError
from phalanx.weights.sync_pairs import Ranks


def save_model(group: Ranks, path: str, shard_bytes: int) -> int:
    """Write the model of a role into a new folder. Each rank writes its boxes. Return the bytes.

    Raises:
        CheckpointError: if the folder exists, cannot be written, or the state is no model.
    """
    if "://" in path:
        raise CheckpointError(
            f"{path!r}: a model is written into files by all ranks at once, so give a path, not a URL"
        )
    path = os.path.abspath(os.path.expanduser(path))
    if os.path.exists(path) and (not os.path.isdir(path) or os.listdir(path)):
        raise CheckpointError(f"{path} is there already; give the path of a folder that is not")
    folder = f"{path}.{secrets.token_hex(4)}.part"
    title = f"save model of {group.name!r}"
    roles = plan_group(group, f"{title}: plan", folder, model=True)
    if len(roles) != 1:
        names = sorted(roles)
        raise CheckpointError(
            f"{group.name!r} has the roles {', '.join(names)}; give one of them, such as group.{names[0]}"
        )
    (role, offered), *_ = roles.items()
    plans, metadata = merge_plans(offered)
    files = ModelFiles.plan(_tensors(group, offered, metadata), shard_bytes)
    try:
        with storage_errors(path, "written"):
            files.make(Path(folder))
        written = call_ranks(
            group, f"{title}: write", handlers.write_model, plans, folder, role, files.places, folder
        )
        with storage_errors(path, "written"):
            if os.path.isdir(path):
                os.rmdir(path)
            os.rename(folder, path)
        return sum(written)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _tensors(
    group: Ranks, offered: Sequence[SavePlan], metadata: Metadata
) -> dict[str, TensorStorageMetadata]:
    """Return the tensors of a model, if it has nothing else, and no tensor that differs by rank."""
    stored = metadata.state_dict_metadata
    tensors = {name: one for name, one in stored.items() if isinstance(one, TensorStorageMetadata)}
    values = sorted(stored.keys() - tensors.keys())
    if values or not tensors:
        raise CheckpointError(
            f"the state of {group.name!r} is no model: {', '.join(values[:5]) or 'it has no tensors'}; "
            "register the model alone: px.register_state(self, model=...)"
        )
    differing = sorted(tensors.keys() - {key for plan in offered for key in plan.planner_data})
    if differing:
        raise CheckpointError(
            f"{', '.join(differing[:5])} differ by rank, and nothing says how they are sharded; declare it (DTensor, "
            "px.register_state(boxes=..., megatron=...))"
        )
    return tensors


def load_model(group: Ranks, path: str) -> int:
    """Load a folder of safetensors files into the model of a role. Return the bytes.

    Raises:
        CheckpointMismatch: if it does not fit. No rank was changed.
        CheckpointCorrupted: if a file is none of safetensors.
    """
    path = os.path.abspath(os.path.expanduser(path))
    sources = {group.role: Source(path, {}, 0)}
    return load_groups([GroupLoad(group, sources, None, f"load model of {group.name!r}")])
