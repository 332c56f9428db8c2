"""Vectors, the interventions that are made of them, and the steering that a request carries."""
