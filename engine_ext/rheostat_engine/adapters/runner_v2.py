"""vLLM's V2 model runner on GPUs, with sites.

Invariant: the instructions of a step are enqueued on the device before its forward pass. No site is
active outside a real step, such as during warm-up, profiling and dummy batches.

Why the instructions come last
    Making them may wait for controllers, which decide from the readings of the step before. So
    vLLM first prepares everything else of a step, also its attention metadata. The last call before
    the launch is `prepare_inputs` of the model's state, and the instructions are made after it.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from rheostat_engine.adapters.assembly import Assembled, assemble
from rheostat_engine.adapters.attention_splits import fix_splits_for_full_graphs_only
from rheostat_engine.adapters.device_memory import check_device_memory
from rheostat_engine.adapters.gate_decisions import with_decisions
from rheostat_engine.adapters.graphs import site_graphs
from rheostat_engine.adapters.runner import apply_scheduler_output
from rheostat_engine.worker.step_tokens import Batch

_PREPARE_INPUTS = "prepare_inputs"


class GpuSiteRunner(GPUModelRunner):
    """The V2 runner with sites."""

    runner_name = "V2"
    sites: Assembled
    _prepared: InputBatch | None = None
    """The batch of the current step, until its instructions are made."""

    def load_model(
        self,
        load_dummy_weights: bool = False,
        *args: Any,  # vLLM's own, passed through
        model: nn.Module | None = None,
        **kwargs: Any,  # as above
    ) -> None:
        """Loads the model, then installs the sites before anything is compiled."""
        super().load_model(load_dummy_weights, *args, model=model, **kwargs)
        check_device_memory(self.vllm_config, self.device, int(self.model_memory_usage))
        call_after(self.model_state, self._begin_step)
        self.sites = assemble(self, self.model, self.vllm_config, self.device, self.max_num_tokens)

    def capture_model(self, *, profile_only: bool = False) -> int:
        """Captures CUDA graphs whose site kernels can be disabled in each step."""
        if self.cudagraph_manager is not None:
            fix_splits_for_full_graphs_only(self.cudagraph_manager, self.attn_groups)
        with site_graphs(self.sites.runtime.buffers.active):
            return super().capture_model(profile_only=profile_only)

    def execute_model(  # type: ignore[override]  # the rest is passed through
        self,
        scheduler_output: SchedulerOutput,
        intermediate_tensors: IntermediateTensors | None = None,
        dummy_run: bool = False,
        **kwargs: Any,  # vLLM's own, passed through
    ) -> Any:  # Any: vLLM's union of outputs, passed through
        """Applies the scheduler output to the runtime, then runs the step."""
        if dummy_run:
            return super().execute_model(
                scheduler_output, intermediate_tensors, dummy_run=True, **kwargs
            )
        apply_scheduler_output(self.sites.runtime, scheduler_output)
        try:
            output = super().execute_model(scheduler_output, intermediate_tensors, **kwargs)
            if self._prepared is not None:
                raise RuntimeError("vLLM ran a step without the instructions of its sites")
            return output
        finally:
            self._prepared = None
            self.sites.runtime.end()

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:  # as above
        """As vLLM's. The output carries decisions of gates."""
        return with_decisions(super().sample_tokens(grammar_output), self.sites.runtime.decisions)

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> InputBatch:  # vLLM's, passed through
        """Prepares the step's inputs. `_begin_step` makes the instructions of its sites."""
        self._prepared = super().prepare_inputs(*args, **kwargs)
        return self._prepared

    def _begin_step(self) -> None:
        """Makes the instructions of the step, if it is a real one."""
        batch, self._prepared = self._prepared, None
        if batch is None:
            return
        self.sites.runtime.begin(
            Batch(
                request_ids=batch.req_ids,
                computed=batch.num_computed_tokens_np,
                scheduled=batch.num_scheduled_tokens,
                padded_tokens=batch.num_tokens_after_padding,
                input_ids=batch.input_ids,
            )
        )


def call_after(model_state: object, begin: Callable[[], None]) -> None:
    """Makes a model state's `prepare_inputs` call `begin` before it returns."""
    stock = getattr(model_state, _PREPARE_INPUTS)

    def prepare_inputs(*args: Any, **kwargs: Any) -> Any:  # vLLM's, passed through
        inputs = stock(*args, **kwargs)
        begin()
        return inputs

    setattr(model_state, _PREPARE_INPUTS, prepare_inputs)
