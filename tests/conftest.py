"""Settings of all tests."""

import os

from hypothesis import settings

from .effort import FACTOR

# One thread for each process, because `make test` runs two workers on two cores. Threads of
# OpenMP spin while they wait for each other, so more threads than cores are many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No deadline, because machines are busy and no test asserts a time.
settings.register_profile("rheostat", deadline=None, max_examples=40 * FACTOR)
settings.load_profile("rheostat")
