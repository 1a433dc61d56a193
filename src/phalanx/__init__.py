"""Phalanx: one driver script commands groups of SPMD workers, one per accelerator, on a Ray cluster.

Every public name is here, ``import phalanx as px``. Names are loaded when first used, so that the import
itself costs next to nothing and loads neither ray nor torch nor numpy.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx import engines as engines
    from phalanx.collect.join import join_rows as join_rows
    from phalanx.declare.bind import ClassWithInitArgs as ClassWithInitArgs
    from phalanx.declare.bind import colocate as colocate
    from phalanx.declare.modes import Dispatch as Dispatch
    from phalanx.declare.modes import Execute as Execute
    from phalanx.declare.register import register as register
    from phalanx.declare.saving import register_state as register_state
    from phalanx.declare.weights import accept_weights as accept_weights
    from phalanx.declare.weights import publish_weights as publish_weights
    from phalanx.declare.weights import weights_version as weights_version
    from phalanx.declare.worker import Worker as Worker
    from phalanx.dispatch.modes import register_dispatch_mode as register_dispatch_mode
    from phalanx.dispatch.settings import ByPiece as ByPiece
    from phalanx.dispatch.shardable import register_shardable as register_shardable
    from phalanx.dispatch.shardable import replicate as replicate
    from phalanx.dispatch.split import count_rows as count_rows
    from phalanx.dispatch.split import split_rows as split_rows
    from phalanx.engines.endpoints import endpoints as endpoints
    from phalanx.errors import ArgumentLost as ArgumentLost
    from phalanx.errors import CallCancelled as CallCancelled
    from phalanx.errors import CallError as CallError
    from phalanx.errors import CallTimeout as CallTimeout
    from phalanx.errors import ChannelClosed as ChannelClosed
    from phalanx.errors import ChannelEmpty as ChannelEmpty
    from phalanx.errors import ChannelError as ChannelError
    from phalanx.errors import ChannelFull as ChannelFull
    from phalanx.errors import DeclarationError as DeclarationError
    from phalanx.errors import DispatchError as DispatchError
    from phalanx.errors import GroupBroken as GroupBroken
    from phalanx.errors import GroupClosed as GroupClosed
    from phalanx.errors import InternalError as InternalError
    from phalanx.errors import ItemsLost as ItemsLost
    from phalanx.errors import PhalanxError as PhalanxError
    from phalanx.errors import PlacementError as PlacementError
    from phalanx.errors import RankReport as RankReport
    from phalanx.errors import RanksDiverged as RanksDiverged
    from phalanx.errors import RemoteCallError as RemoteCallError
    from phalanx.errors import SaveDamaged as SaveDamaged
    from phalanx.errors import SaveError as SaveError
    from phalanx.errors import SaveHeld as SaveHeld
    from phalanx.errors import SaveMismatch as SaveMismatch
    from phalanx.errors import StaleEpoch as StaleEpoch
    from phalanx.errors import StalenessTimeout as StalenessTimeout
    from phalanx.errors import WeightsDiffer as WeightsDiffer
    from phalanx.errors import WeightsError as WeightsError
    from phalanx.errors import WeightsLost as WeightsLost
    from phalanx.errors import WeightsMismatch as WeightsMismatch
    from phalanx.errors import WeightsTorn as WeightsTorn
    from phalanx.errors import WorkerDiedError as WorkerDiedError
    from phalanx.errors import WorkerInitError as WorkerInitError
    from phalanx.runtime.api.attach import attach as attach
    from phalanx.runtime.api.explain import explain as explain
    from phalanx.runtime.api.explain import status as status
    from phalanx.runtime.api.group import WorkerGroup as WorkerGroup
    from phalanx.runtime.api.notices import notices as notices
    from phalanx.runtime.api.replace import replace as replace
    from phalanx.runtime.api.replace import restore as restore
    from phalanx.runtime.api.replace import snapshot as snapshot
    from phalanx.runtime.api.resize import resize as resize
    from phalanx.runtime.api.sticky import sticky as sticky
    from phalanx.runtime.calls.counts import statistics as statistics
    from phalanx.runtime.calls.future import CallFuture as CallFuture
    from phalanx.runtime.calls.future import gather as gather
    from phalanx.runtime.calls.values import put as put
    from phalanx.runtime.calls.values import readonly as readonly
    from phalanx.runtime.life.policy import Replace as Replace
    from phalanx.runtime.life.policy import Restart as Restart
    from phalanx.runtime.life.preemption import Notice as Notice
    from phalanx.runtime.links.channel import Channel as Channel
    from phalanx.runtime.links.staleness import Staleness as Staleness
    from phalanx.runtime.links.versions import Version as Version
    from phalanx.runtime.links.versions import weights as weights
    from phalanx.runtime.links.weight_sync import WeightSync as WeightSync
    from phalanx.runtime.pools.pool import ResourcePool as ResourcePool
    from phalanx.runtime.saving.future import SaveFuture as SaveFuture
    from phalanx.runtime.saving.run import Run as Run
    from phalanx.runtime.saving.verbs import Saved as Saved
    from phalanx.runtime.saving.verbs import load as load
    from phalanx.runtime.saving.verbs import save as save
    from phalanx.runtime.session.connection import init as init
    from phalanx.runtime.session.connection import shutdown as shutdown
    from phalanx.runtime.tools.profile import nsight as nsight
    from phalanx.runtime.tools.trace import trace as trace
    from phalanx.saving.copies import Snapshot as Snapshot
    from phalanx.show.progress import progress as progress
    from phalanx.topology.mesh import Mesh as Mesh
    from phalanx.tracing.spans import span as span
    from phalanx.transfer.fused import Fused as Fused
    from phalanx.transfer.readers.megatron import MegatronRank as MegatronRank
    from phalanx.transfer.readers.plain import Boxes as Boxes

_HOME = {
    "ArgumentLost": "phalanx.errors",
    "Boxes": "phalanx.transfer.readers.plain",
    "ByPiece": "phalanx.dispatch.settings",
    "CallCancelled": "phalanx.errors",
    "CallError": "phalanx.errors",
    "CallFuture": "phalanx.runtime.calls.future",
    "CallTimeout": "phalanx.errors",
    "Channel": "phalanx.runtime.links.channel",
    "ChannelClosed": "phalanx.errors",
    "ChannelEmpty": "phalanx.errors",
    "ChannelError": "phalanx.errors",
    "ChannelFull": "phalanx.errors",
    "ClassWithInitArgs": "phalanx.declare.bind",
    "DeclarationError": "phalanx.errors",
    "Dispatch": "phalanx.declare.modes",
    "DispatchError": "phalanx.errors",
    "Execute": "phalanx.declare.modes",
    "Fused": "phalanx.transfer.fused",
    "GroupBroken": "phalanx.errors",
    "GroupClosed": "phalanx.errors",
    "InternalError": "phalanx.errors",
    "ItemsLost": "phalanx.errors",
    "MegatronRank": "phalanx.transfer.readers.megatron",
    "Mesh": "phalanx.topology.mesh",
    "Notice": "phalanx.runtime.life.preemption",
    "PhalanxError": "phalanx.errors",
    "PlacementError": "phalanx.errors",
    "RankReport": "phalanx.errors",
    "RanksDiverged": "phalanx.errors",
    "RemoteCallError": "phalanx.errors",
    "ResourcePool": "phalanx.runtime.pools.pool",
    "Replace": "phalanx.runtime.life.policy",
    "Restart": "phalanx.runtime.life.policy",
    "Run": "phalanx.runtime.saving.run",
    "SaveDamaged": "phalanx.errors",
    "SaveError": "phalanx.errors",
    "SaveFuture": "phalanx.runtime.saving.future",
    "SaveHeld": "phalanx.errors",
    "SaveMismatch": "phalanx.errors",
    "Saved": "phalanx.runtime.saving.verbs",
    "Snapshot": "phalanx.saving.copies",
    "StaleEpoch": "phalanx.errors",
    "Staleness": "phalanx.runtime.links.staleness",
    "StalenessTimeout": "phalanx.errors",
    "Version": "phalanx.runtime.links.versions",
    "WeightSync": "phalanx.runtime.links.weight_sync",
    "WeightsDiffer": "phalanx.errors",
    "WeightsError": "phalanx.errors",
    "WeightsLost": "phalanx.errors",
    "WeightsMismatch": "phalanx.errors",
    "WeightsTorn": "phalanx.errors",
    "Worker": "phalanx.declare.worker",
    "WorkerDiedError": "phalanx.errors",
    "WorkerGroup": "phalanx.runtime.api.group",
    "WorkerInitError": "phalanx.errors",
    "accept_weights": "phalanx.declare.weights",
    "attach": "phalanx.runtime.api.attach",
    "colocate": "phalanx.declare.bind",
    "count_rows": "phalanx.dispatch.split",
    "endpoints": "phalanx.engines.endpoints",
    "explain": "phalanx.runtime.api.explain",
    "gather": "phalanx.runtime.calls.future",
    "init": "phalanx.runtime.session.connection",
    "join_rows": "phalanx.collect.join",
    "load": "phalanx.runtime.saving.verbs",
    "notices": "phalanx.runtime.api.notices",
    "nsight": "phalanx.runtime.tools.profile",
    "progress": "phalanx.show.progress",
    "publish_weights": "phalanx.declare.weights",
    "put": "phalanx.runtime.calls.values",
    "readonly": "phalanx.runtime.calls.values",
    "register": "phalanx.declare.register",
    "register_dispatch_mode": "phalanx.dispatch.modes",
    "register_shardable": "phalanx.dispatch.shardable",
    "register_state": "phalanx.declare.saving",
    "replicate": "phalanx.dispatch.shardable",
    "resize": "phalanx.runtime.api.resize",
    "restore": "phalanx.runtime.api.replace",
    "replace": "phalanx.runtime.api.replace",
    "save": "phalanx.runtime.saving.verbs",
    "snapshot": "phalanx.runtime.api.replace",
    "shutdown": "phalanx.runtime.session.connection",
    "span": "phalanx.tracing.spans",
    "split_rows": "phalanx.dispatch.split",
    "statistics": "phalanx.runtime.calls.counts",
    "status": "phalanx.runtime.api.explain",
    "sticky": "phalanx.runtime.api.sticky",
    "trace": "phalanx.runtime.tools.trace",
    "weights": "phalanx.runtime.links.versions",
    "weights_version": "phalanx.declare.weights",
}

_MODULES = {"engines": "phalanx.engines"}

__version__ = "0.1.0"
__all__ = sorted([*_HOME, *_MODULES])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(  # with name and obj a traceback says which name is near
            f"module 'phalanx' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
