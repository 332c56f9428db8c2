"""vLLM's GPU worker with sites."""

from typing import Any

from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from rheostat_engine.adapters.parent_watch import leave_group
from rheostat_engine.adapters.runner_v2 import GpuSiteRunner
from rheostat_engine.adapters.worker_rpc import SiteRpc
from rheostat_engine.process_end import skip_last_collection


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

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """As vLLM's; then leaves the server's process group."""
        times: CompilationTimes = super().compile_or_warm_up_model()
        # Not sooner, because only a signal to the group ends a worker that is still loading.
        leave_group()
        skip_last_collection()
        return times
