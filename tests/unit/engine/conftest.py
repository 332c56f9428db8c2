"""Settings of the engine's unit tests."""

import torch
from hypothesis import settings

settings.register_profile("engine", deadline=None)
settings.load_profile("engine")

# On a busy machine, threads that wait for each other make small operations 100 times slower.
torch.set_num_threads(1)
