"""The switch that pads every batch."""

from __future__ import annotations

import os

from phalanx.compat.verl._proto.errors import require

#: Keyword under which a dispatch function tells how many rows it added.
_padding_size_key = "_padding_size_key_x123d"


class _DataProtoConfigMeta(type):
    auto_padding_key = "_verl_auto_padding"
    _enabled = False

    @property
    def auto_padding(cls) -> bool:
        """Whether every `DataProto` may be padded: set here, or by VERL_AUTO_PADDING=1 in the environment."""
        return os.environ.get("VERL_AUTO_PADDING", "").upper() in ("1", "TRUE") or cls._enabled

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        require(
            isinstance(enabled, bool),
            f"enabled must be a boolean, got {enabled} as {type(enabled)}: auto_padding must be True or False",
        )
        cls._enabled = enabled


class DataProtoConfig(metaclass=_DataProtoConfigMeta):
    """Settings of all batches in this process: ``DataProtoConfig.auto_padding = True``."""
