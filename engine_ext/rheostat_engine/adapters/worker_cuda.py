"""vLLM's GPU worker with sites."""

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from rheostat_engine.adapters.runner_v2 import GpuSiteRunner
from rheostat_engine.adapters.worker_rpc import SiteRpc


class GpuSiteWorker(SiteRpc, Worker):
    """Runs `GpuSiteRunner` in place of vLLM's V2 model runner."""

    def _make_model_runner(self) -> Any:  # Any: vLLM declares its first runner's type here
        if not self.use_v2_model_runner:
            raise RuntimeError(
                "rheostat needs vLLM's V2 model runner on GPUs; this model or configuration "
                "falls back to V1 (see vLLM's log), or VLLM_USE_V2_MODEL_RUNNER=0 is set"
            )
        assert self.device is not None
        return GpuSiteRunner(self.vllm_config, self.device)
