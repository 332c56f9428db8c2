"""What is done to a request, as data: no torch and no vLLM."""
