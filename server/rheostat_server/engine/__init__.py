"""The engine behind `Backend`: vLLM, its workers and their capacity."""
