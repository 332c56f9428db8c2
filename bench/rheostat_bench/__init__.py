"""Benchmarks: commands that measure against stock vLLM and write JSON. `rheostat bench` lists them.

They are a distribution of their own. Nothing of the product imports them.
"""
