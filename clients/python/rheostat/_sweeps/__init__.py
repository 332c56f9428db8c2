"""Sweeps: activation patching over a grid of sites and positions."""
