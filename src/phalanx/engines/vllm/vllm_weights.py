"""Weights of vLLM's model: expected tensors, the memory from which its workers read them, and the load in a worker.

vLLM imports this module in its workers, as ``worker_extension_cls``. A ``WeightTransferEngine`` would call vLLM's
layer-by-layer reload too, with more code, and an update would take three rounds of calls instead of a single round.
vLLM's ``reload_weights`` only logs parameters that got no weights, which are an error here.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from pkgutil import resolve_name
from typing import Any

import torch

from phalanx.errors import WeightsError
from phalanx.weights.shared_memory import open_tensors

EXTENSION = f"{__name__}.WorkerExtension"
_RELOAD = "vllm.model_executor.model_loader.reload"


def expected_weights(model_config: Any) -> torch.nn.Module:
    """Return the model of vLLM's configuration on the meta device. Each tensor has its checkpoint name, tied ones too.

    A sync compares them with its source before it sends anything, since vLLM does not recover from a failed load.
    """
    transformers: Any = resolve_name("transformers")  # only engines need it
    trusts = model_config.trust_remote_code
    config = transformers.AutoConfig.from_pretrained(model_config.model, trust_remote_code=trusts)
    with torch.device("meta"):
        models = transformers.AutoModelForCausalLM
        return models.from_config(config, dtype=model_config.dtype, trust_remote_code=trusts)


_opened = functools.lru_cache(maxsize=1)(open_tensors)
"""Opens the tensors of a connection once: to map them for each load takes half as long as a copy of them."""


class WorkerExtension:
    """Methods that vLLM adds to its workers, for ``collective_rpc``."""

    vllm_config: Any
    model_runner: Any

    def phalanx_load(self, location: bytes) -> None:
        """Load all weights from a location, layer by layer, into the memory of the old weights.

        Raises:
            WeightsError: if a parameter of the model got no weights.
        """
        model = self.model_runner.get_model()
        # vLLM warns of layers without weights in every sync; missing weights are an error below.
        logging.getLogger(f"{_RELOAD}.layerwise").setLevel(logging.ERROR)
        with resolve_name("vllm.config:set_current_vllm_config")(self.vllm_config):
            resolve_name(f"{_RELOAD}:initialize_layerwise_reload")(model)
            loaded = model.load_weights(_opened(location).items())
            resolve_name(f"{_RELOAD}:finalize_layerwise_reload")(model, self.model_runner.model_config)
        names = {name for name, _ in model.named_parameters()}
        if loaded is not None and (missing := sorted(names - loaded)):
            raise WeightsError(
                f"vLLM loaded nothing into {len(missing)} parameters: {', '.join(missing[:5])}"
            )

    def phalanx_shared_memory(self) -> list[str]:
        """Return the paths of vLLM's shared memory and semaphores in this worker.

        The memory for collectives on CPUs is unlinked, since vLLM never removes it.
        """
        if not os.path.exists("/proc/self/maps"):
            return []
        with open("/proc/self/maps") as maps:  # by inode: a semaphore is mapped under its temporary name
            inodes = {int(line.split(maxsplit=5)[4]) for line in maps if "/dev/shm/" in line}
        mapped = [entry.path for entry in os.scandir("/dev/shm") if entry.inode() in inodes]
        for path in mapped:
            if "cpushm" in path:
                with contextlib.suppress(FileNotFoundError):  # another worker was faster
                    os.unlink(path)
        return [path for path in mapped if path.startswith(("/dev/shm/psm_", "/dev/shm/sem.mp-"))]
