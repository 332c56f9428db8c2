"""All that touches vLLM's internals: workers, model runners, CUDA graphs, the module tree."""
