"""What all tests share."""

from hypothesis import settings

settings.register_profile("rheostat", deadline=None)  # machines are busy; no test asserts a time
settings.load_profile("rheostat")
