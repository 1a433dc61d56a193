"""verl's batches: their module, and their row types for dispatch.

The classes are the installed verl's own. Without verl, dispatch modes that split a ``DataProto`` raise an error.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from phalanx.dispatch.shardable import register_row_type
from phalanx.errors import DispatchError


class VerlNotInstalled(DispatchError, ModuleNotFoundError):
    """A value or a dispatch mode needs an installed verl."""


def protocol() -> Any:
    """Return ``verl.protocol``.

    Raises:
        VerlNotInstalled: if verl is not installed.
    """
    try:
        return importlib.import_module("verl.protocol")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("verl"):
            raise
        raise VerlNotInstalled(
            "this dispatch mode splits or joins a DataProto, which needs verl: pip install verl, or use a mode that "
            "takes lists, such as Dispatch.DP_COMPUTE",
        ) from error


def is_future(value: Any) -> bool:
    """Return whether ``value`` is verl's ``DataProtoFuture``. Does not import verl."""
    module = sys.modules.get("verl.protocol")
    return module is not None and isinstance(value, module.DataProtoFuture)


def register_row_types() -> None:
    """Register ``DataProto`` and ``BatchMeta`` for dispatch, if verl is imported. ``TensorDict`` is always known."""
    module = sys.modules.get("verl.protocol")
    if module is None or not hasattr(module, "DataProto"):
        return
    data_proto, batch_meta = module.DataProto, module.BatchMeta
    register_row_type(
        data_proto,
        count=_row_count,
        slice=data_proto.slice,
        concat=data_proto.concat,
        take=lambda data, indices: data.select_idxs(list(indices)),
    )
    if hasattr(batch_meta, "select_samples"):  # a stand-in without methods if TransferQueue is not installed
        register_row_type(
            batch_meta,
            count=len,
            slice=lambda meta, start, stop: meta.select_samples(list(range(start, stop))),
            concat=batch_meta.concat,
            take=lambda meta, indices: meta.select_samples(list(indices)),
        )


def _row_count(data: Any) -> int | None:
    """Return the number of rows, or None for a ``DataProto`` of ``meta_info`` alone, which is replicated."""
    return None if data.batch is None and not data.non_tensor_batch else len(data)
