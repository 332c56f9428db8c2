"""vLLM's CPU worker with sites."""

import torch
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.worker_base import CompilationTimes

from rheostat_engine.adapters.parent_watch import leave_group
from rheostat_engine.adapters.runner_v1 import CpuSiteRunner
from rheostat_engine.adapters.worker_rpc import SiteRpc
from rheostat_engine.process_end import skip_last_collection


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

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """As vLLM's; then leaves the server's process group."""
        times: CompilationTimes = super().compile_or_warm_up_model()
        # Not sooner, because only a signal to the group ends a worker that is still loading.
        leave_group()
        skip_last_collection()
        return times
