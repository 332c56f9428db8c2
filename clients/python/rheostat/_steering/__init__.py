"""Vectors, interventions, and the steering of a request."""
