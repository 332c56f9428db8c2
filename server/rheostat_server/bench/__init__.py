"""Benchmarks: commands that measure against stock vLLM and write JSON."""
