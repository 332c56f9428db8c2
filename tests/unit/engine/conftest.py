"""Settings of the engine's unit tests."""

from hypothesis import settings

settings.register_profile("engine", deadline=None)
settings.load_profile("engine")
