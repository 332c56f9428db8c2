"""Loads the controllers that the operator chose, and sends their decisions to all ranks."""

from importlib.metadata import entry_points

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed import get_tp_group

from rheostat_engine.plan.controllers import CONTROLLERS_GROUP
from rheostat_engine.settings import EngineSettings
from rheostat_engine.worker.controllers import ControllerHost


def load_controllers(settings: EngineSettings) -> dict[str, ControllerHost]:
    """Makes the controllers of the settings. What a plugin raises ends the start of the engine.

    Raises:
        ValueError: there is no such plugin.
    """
    hosts: dict[str, ControllerHost] = {}
    for name in settings.controllers:
        found = tuple(entry_points(group=CONTROLLERS_GROUP, name=name))
        if len({point.value for point in found}) != 1:
            raise ValueError(f"{len(found)} installed packages have a controller {name!r}")
        hosts[name] = ControllerHost(found[0].load()(), settings.controller_budget)
    return hosts


def share_decision(decision: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The array of the first tensor-parallel rank, on every rank.

    It goes over the group of the CPUs, because the host needs it before the next forward pass.
    """
    group = get_tp_group()
    if group.world_size == 1:
        return decision
    shared = torch.from_numpy(decision)
    torch.distributed.broadcast(shared, src=group.ranks[0], group=group.cpu_group)
    return shared.numpy()
