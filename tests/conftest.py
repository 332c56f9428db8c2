"""What all tests share."""

import os

from hypothesis import settings

_FACTOR = int(os.environ.get("RHEOSTAT_EXAMPLES", "1"))
"""Property tests run so many times their usual examples; `make soak` sets it."""

# No deadline, because machines are busy and no test asserts a time.
settings.register_profile("rheostat", deadline=None, max_examples=40 * _FACTOR)
settings.load_profile("rheostat")
