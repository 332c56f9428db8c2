"""Modules generated from the `rheostat.v1` schemas by tools/generate."""
