"""Rheostat's extension of vLLM: sites in the forward pass, and what the server needs to use them.

Importing this package imports neither torch nor vLLM; the workers load the parts that do.
"""

from rheostat_engine.acts import (
    OPEN_END,
    Act,
    Band,
    Capture,
    Condition,
    Kind,
    Spans,
    TokenSet,
)
from rheostat_engine.amend import amend, recapture
from rheostat_engine.block_keys import BlockKeys, SteeredBlocks
from rheostat_engine.capacity import Capacity, CapacityLedger, Shortage, capture_need
from rheostat_engine.channel import WorkerChannel
from rheostat_engine.composition import MAX_STEPS, MAX_TOKEN_SETS
from rheostat_engine.events import (
    Attached,
    Dose,
    Dropped,
    Event,
    Installed,
    Released,
    Report,
    Rows,
)
from rheostat_engine.front_end import prepare_front_end, receive_outputs, stop_front_end
from rheostat_engine.model_sites import ModelSites
from rheostat_engine.pieces import TooMuch
from rheostat_engine.plan import EXTRA_ARG, Plan
from rheostat_engine.points import ROUTERS, Point, Site, site_count
from rheostat_engine.row_forms import Coding, Directions, RowForm
from rheostat_engine.settings import EngineSettings, engine_kwargs
from rheostat_engine.staging import StagingError
from rheostat_engine.tables import (
    MAX_CAPTURE_EFFORT,
    MAX_EFFORT,
    MAX_PIECES,
    STEP_EFFORT,
    CaptureNeed,
)

__all__ = [
    "EXTRA_ARG",
    "MAX_CAPTURE_EFFORT",
    "MAX_EFFORT",
    "MAX_PIECES",
    "MAX_STEPS",
    "MAX_TOKEN_SETS",
    "OPEN_END",
    "ROUTERS",
    "STEP_EFFORT",
    "Act",
    "Attached",
    "Band",
    "BlockKeys",
    "Capacity",
    "CapacityLedger",
    "Capture",
    "CaptureNeed",
    "Coding",
    "Condition",
    "Directions",
    "Dose",
    "Dropped",
    "EngineSettings",
    "Event",
    "Installed",
    "Kind",
    "ModelSites",
    "Plan",
    "Point",
    "Released",
    "Report",
    "RowForm",
    "Rows",
    "Shortage",
    "Site",
    "Spans",
    "StagingError",
    "SteeredBlocks",
    "TokenSet",
    "TooMuch",
    "WorkerChannel",
    "amend",
    "capture_need",
    "engine_kwargs",
    "prepare_front_end",
    "recapture",
    "receive_outputs",
    "site_count",
    "stop_front_end",
]
