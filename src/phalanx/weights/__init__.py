"""Weight synchronization between groups: sources, targets, layouts, versions and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.api.lazy_names import lazy_names

if TYPE_CHECKING:
    from phalanx.declare.weight_declarations import accept as accept
    from phalanx.declare.weight_declarations import current_version as current_version
    from phalanx.declare.weight_declarations import publish as publish
    from phalanx.errors import WeightsError as WeightsError
    from phalanx.errors import WeightsMismatch as WeightsMismatch
    from phalanx.errors import WeightsTorn as WeightsTorn
    from phalanx.errors import WeightsTransferError as WeightsTransferError
    from phalanx.errors import WeightsVerificationError as WeightsVerificationError
    from phalanx.weights.local_layout import MegatronRank as MegatronRank
    from phalanx.weights.local_layout import ShardSpec as ShardSpec
    from phalanx.weights.name_matching import Fused as Fused
    from phalanx.weights.versions import WeightsVersion as WeightsVersion
    from phalanx.weights.weight_sync import status as status

__getattr__, __dir__, __all__ = lazy_names(__name__)
