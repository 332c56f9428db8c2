"""What a worker does for requests in each step; no vLLM."""
