"""The batch that most cases look at."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from plain import load

protocol = load("protocol")
DataProto = protocol.DataProto


def batch(rows: int = 6, **meta: Any) -> Any:
    """Two tensors, two object columns."""
    return DataProto.from_dict(
        tensors={"obs": torch.arange(rows * 2).reshape(rows, 2), "act": torch.arange(rows).float()},
        non_tensors={"labels": [chr(97 + i) for i in range(rows)], "n": np.arange(rows)},
        meta_info={"info": "here", **meta},
    )
