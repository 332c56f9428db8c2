"""vLLM's CPU worker with sites."""

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from rheostat_engine.adapters.runner_v1 import CpuSiteRunner
from rheostat_engine.adapters.worker_rpc import SiteRpc


class CpuSiteWorker(SiteRpc, CPUWorker):
    """Runs `CpuSiteRunner` in place of vLLM's CPU runner."""

    def init_device(self) -> None:
        """As vLLM's, with our runner."""
        super().init_device()
        if self.use_v2_model_runner:
            raise RuntimeError(
                "rheostat runs vLLM's V1 model runner on CPU; unset VLLM_USE_V2_MODEL_RUNNER"
            )
        self.model_runner = CpuSiteRunner(self.vllm_config, torch.device("cpu"))
