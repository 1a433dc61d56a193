"""Weight synchronization between groups: sources, targets, layouts, versions and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.facade import lazy_names

if TYPE_CHECKING:
    from phalanx.declare.weight_declarations import accept as accept
    from phalanx.declare.weight_declarations import current_version as current_version
    from phalanx.declare.weight_declarations import publish as publish
    from phalanx.errors import WeightsError as WeightsError
    from phalanx.errors import WeightsMismatch as WeightsMismatch
    from phalanx.errors import WeightsTorn as WeightsTorn
    from phalanx.errors import WeightsTransferError as WeightsTransferError
    from phalanx.errors import WeightsVerificationError as WeightsVerificationError
    from phalanx.weights.planning.fused import Fused as Fused
    from phalanx.weights.planning.readers.megatron_layout import MegatronRank as MegatronRank
    from phalanx.weights.planning.readers.plain import ShardSpec as ShardSpec
    from phalanx.weights.versions import WeightsVersion as WeightsVersion
    from phalanx.weights.versions import status as status

_HOMES = {
    "Fused": "phalanx.weights.planning.fused",
    "MegatronRank": "phalanx.weights.planning.readers.megatron_layout",
    "ShardSpec": "phalanx.weights.planning.readers.plain",
    "WeightsError": "phalanx.errors",
    "WeightsMismatch": "phalanx.errors",
    "WeightsTorn": "phalanx.errors",
    "WeightsTransferError": "phalanx.errors",
    "WeightsVerificationError": "phalanx.errors",
    "WeightsVersion": "phalanx.weights.versions",
    "accept": "phalanx.declare.weight_declarations",
    "current_version": "phalanx.declare.weight_declarations",
    "publish": "phalanx.declare.weight_declarations",
    "status": "phalanx.weights.versions",
}

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
