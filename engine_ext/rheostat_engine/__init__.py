"""Rheostat's extension of vLLM: sites in the forward pass, and what the server needs to use them.

Importing this package imports neither torch nor vLLM; the workers load the parts that do.
"""

from rheostat_engine.capacity import CapacityLedger, Shortage
from rheostat_engine.channel import WorkerChannel
from rheostat_engine.events import Event, Installed, Released, Rows
from rheostat_engine.model_sites import ModelSites
from rheostat_engine.plan import EXTRA_ARG, MAX_EFFORT, OPEN_END, Addition, Capture, Plan, Spans
from rheostat_engine.points import Point, Site, site_count
from rheostat_engine.settings import EngineSettings, engine_kwargs

__all__ = [
    "EXTRA_ARG",
    "MAX_EFFORT",
    "OPEN_END",
    "Addition",
    "CapacityLedger",
    "Capture",
    "EngineSettings",
    "Event",
    "Installed",
    "ModelSites",
    "Plan",
    "Point",
    "Released",
    "Rows",
    "Shortage",
    "Site",
    "Spans",
    "WorkerChannel",
    "engine_kwargs",
    "site_count",
]
