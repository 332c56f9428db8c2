"""The runner-neutral core: plans, bank, capture and the per-step program, on any device."""
