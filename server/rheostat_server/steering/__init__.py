"""Resolves steering specs to interventions."""
