"""Steering specs become interventions."""
