"""Benchmarks: commands that measure against stock vLLM and write JSON. `rheostat bench` lists them.

They are a distribution of their own, so that users of the server do not install them. The product
does not import them.
"""
