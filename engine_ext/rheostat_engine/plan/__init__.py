"""Plans: the interventions and captures of a request, as data. Imports neither torch nor vLLM."""
