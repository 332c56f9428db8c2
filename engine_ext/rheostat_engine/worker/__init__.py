"""The worker's part of each step: steering, captures and transport. Does not import vLLM."""
