"""Whether a device has the memory for our buffers, beside the weights of the model.

The server cannot check it before the start, because only the loaded model shows its size.
"""

import torch
from vllm.config import VllmConfig

from rheostat_engine.settings import EngineSettings
from rheostat_engine.sites.block_layout import SiteError

_MIB = 1 << 20


def check_device_memory(config: VllmConfig, device: torch.device, weights: int) -> None:
    """Checks that a CUDA device has the memory for the bank and the ring, once the model is loaded.

    Args:
        config: the engine's configuration.
        device: the device.
        weights: bytes that the model has taken of it.

    Raises:
        SiteError: it has too little. The message names the flags of `rheostat serve`.
    """
    settings = EngineSettings.from_config(config.additional_config)
    free, total = torch.cuda.mem_get_info(device)
    left = free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if config.cache_config.kv_cache_memory_bytes is None:
        left = min(left, int(total * config.cache_config.gpu_memory_utilization) - weights)
    needed = settings.capture_bytes + settings.bank_bytes
    if needed < left:
        return
    ring = left // 2 - settings.bank_bytes
    lower = f"--capture-mib to {ring // _MIB} or less" if ring >= _MIB else "both"
    raise SiteError(
        f"captured rows (--capture-mib {settings.capture_bytes // _MIB}) and steering (--bank-mib "
        f"{settings.bank_bytes // _MIB}) do not fit into the {max(0, left) // _MIB} MiB of the "
        "device's memory that the model leaves to the engine (--gpu-memory-utilization). Lower "
        f"{lower}"
    )
