"""vLLM's V1 model runner on CPU, with sites.

Invariant: sites are active only while the model runs a real step. Everything else is vLLM's.
"""

from typing import Any

import numpy as np
import torch
from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from rheostat_engine.adapters.assembly import Assembled, assemble
from rheostat_engine.adapters.gate_decisions import with_decisions
from rheostat_engine.adapters.runner import apply_scheduler_output
from rheostat_engine.worker.step_tokens import Batch


class CpuSiteRunner(CPUModelRunner):
    """The CPU runner with sites."""

    sites: Assembled

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Loads the model, then installs the sites before anything is compiled."""
        super().load_model(load_dummy_weights=load_dummy_weights)
        self.sites = assemble(self, self.model, self.vllm_config, self.device, self.max_num_tokens)
        self._scheduled: SchedulerOutput | None = None

    def execute_model(
        self,
        scheduler_output: SchedulerOutput,
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> Any:  # Any: vLLM's union of outputs, passed through
        """Applies the scheduler output to the runtime, then runs the step."""
        apply_scheduler_output(self.sites.runtime, scheduler_output)
        self._scheduled = scheduler_output
        try:
            return super().execute_model(scheduler_output, intermediate_tensors)
        finally:
            self._scheduled = None
            self.sites.runtime.send_gained()  # if the step had no forward pass

    def sample_tokens(  # type: ignore[override]  # vLLM's decorator has no types
        self, grammar_output: GrammarOutput | None
    ) -> Any:  # as above
        """As vLLM's. The output carries decisions of gates."""
        output = super().sample_tokens(grammar_output)  # type: ignore[type-var]  # as above
        return with_decisions(output, self.sites.runtime.decisions)

    def _model_forward(
        self,
        input_ids: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **model_kwargs: Any,  # vLLM's own, passed through
    ) -> Any:  # as above
        runtime = self.sites.runtime
        if self._scheduled is not None:
            runtime.begin(self._batch(self._scheduled))
        try:
            return super()._model_forward(
                input_ids, positions, intermediate_tensors, inputs_embeds, **model_kwargs
            )
        finally:
            runtime.end()

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:  # vLLM's, passed through
        """Samples, and restores the generators of requests with an unfinished prompt.

        vLLM undoes such a draw by moving the generator's offset. A CPU generator has none, so a
        seeded request with a chunked prompt would raise and end the engine.
        """
        generators = self.input_batch.generators
        count = self.input_batch.num_reqs
        unfinished = np.flatnonzero(self.discard_request_mask.np[:count]).tolist()
        before = {i: generators[i].get_state() for i in unfinished if i in generators}
        output = super()._sample(logits, spec_decode_metadata)
        for i, state in before.items():
            generators[i].set_state(state)
        return output

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:  # as above
        """As vLLM's, but without generators to move; see `_sample`."""
        generators = self.input_batch.generators
        self.input_batch.generators = {}
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            self.input_batch.generators = generators

    def _get_prompt_logprobs_dict(
        self, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, Any]:  # Any: vLLM's tensors, passed through
        """As vLLM's, but with the LoRA adapter of each prompt.

        vLLM uses the mapping of the sampled rows, one for each request of the step. A prompt has
        another number of rows, so computing its logits would raise and end the engine.
        """
        if self.lora_config is None:
            return super()._get_prompt_logprobs_dict(hidden_states, num_scheduled_tokens)
        batch, wanted = self.input_batch, self.num_prompt_logprobs
        adapters = set(batch.lora_id_to_lora_request.values())
        logprobs: dict[str, Any] = {}
        try:
            for name in [name for name in wanted if name in num_scheduled_tokens]:
                adapter = (int(batch.request_lora_mapping[batch.req_id_to_index[name]]),)
                self._set_active_loras(adapter, adapter, adapters)  # the same adapter for all rows
                self.num_prompt_logprobs = {name: wanted[name]}
                logprobs |= super()._get_prompt_logprobs_dict(hidden_states, num_scheduled_tokens)
                if not self.num_prompt_logprobs:  # vLLM removed it, because the prompt is finished
                    del wanted[name]
        finally:
            self.num_prompt_logprobs = wanted
        return logprobs

    def _batch(self, scheduled: SchedulerOutput) -> Batch:
        count = self.input_batch.num_reqs
        ids = self.input_batch.req_ids[:count]
        tokens = scheduled.num_scheduled_tokens
        return Batch(
            request_ids=ids,
            computed=self.input_batch.num_computed_tokens_cpu[:count],
            scheduled=np.fromiter((tokens[i] for i in ids), np.int64, count),
            padded_tokens=scheduled.total_num_scheduled_tokens,
            input_ids=self.input_ids.gpu,
        )
