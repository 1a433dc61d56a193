"""`DataProto`, the batch that code written for verl passes to groups, and what belongs to it.

Importing this module makes `DataProto` known to dispatch: modes that split rows (``px.Dispatch.DP_COMPUTE_PROTO`` and
the mesh modes of the library itself, too) split and join it.
"""

from __future__ import annotations

from phalanx.compat.verl._proto.columns import union_numpy_dict
from phalanx.compat.verl._proto.config import DataProtoConfig, _padding_size_key
from phalanx.compat.verl._proto.data import DataProto, DataProtoItem
from phalanx.compat.verl._proto.future import BatchData, DataProtoFuture
from phalanx.compat.verl._proto.gather import all_gather_data_proto
from phalanx.compat.verl._proto.padding import (
    collate_fn,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)
from phalanx.compat.verl._proto.serial import (
    deserialize_single_tensor,
    deserialize_tensordict,
    serialize_single_tensor,
    serialize_tensordict,
)
from phalanx.compat.verl._proto.tensors import union_tensor_dict
from phalanx.compat.verl.rows import register_rows
from phalanx.compat.verl.utils.device import get_device_id, get_torch_device
from phalanx.compat.verl.utils.py_functional import list_of_dict_to_dict_of_list, union_two_dict
from phalanx.compat.verl.utils.transferqueue_utils import BatchMeta, KVBatchMeta

__all__ = [
    "BatchData",
    "BatchMeta",
    "DataProto",
    "DataProtoConfig",
    "DataProtoFuture",
    "DataProtoItem",
    "KVBatchMeta",
    "_padding_size_key",
    "all_gather_data_proto",
    "collate_fn",
    "deserialize_single_tensor",
    "deserialize_tensordict",
    "fold_batch_dim",
    "get_device_id",
    "get_torch_device",
    "list_of_dict_to_dict_of_list",
    "pad_dataproto_to_divisor",
    "serialize_single_tensor",
    "serialize_tensordict",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "union_two_dict",
    "unpad_dataproto",
]

register_rows(DataProto)
