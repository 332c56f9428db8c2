"""Rheostat's extension of vLLM: sites in the forward pass, and the server's interface to them.

Importing this package imports neither torch nor vLLM. Modules that do are loaded by the processes
that run vLLM: the workers, the engine's core, and the server's process with its `AsyncLLM`.
"""

from rheostat_engine.async_llm import (
    add_requests_fast,
    keep_end_token,
    prepare_async_llm,
    receive_outputs,
    request_template,
    send_gains,
    send_holds,
    stop_async_llm,
    watch_scheduler,
)
from rheostat_engine.channel.events import (
    Attached,
    ControllerDisabled,
    Dose,
    Dropped,
    Event,
    Gained,
    Installed,
    Released,
    Report,
    Rows,
    SignalRows,
)
from rheostat_engine.channel.staging import StagingError
from rheostat_engine.channel.worker_channel import WorkerChannel
from rheostat_engine.model_sites import ModelSites
from rheostat_engine.output import Output
from rheostat_engine.plan.acts import (
    OPEN_END,
    Act,
    Band,
    Capture,
    Condition,
    Kind,
    Spans,
    TokenSet,
    largest_replaced,
)
from rheostat_engine.plan.block_keys import BlockKeys, SteeredBlocks
from rheostat_engine.plan.capacity import Capacity, CapacityLedger, Shortage
from rheostat_engine.plan.composition import MAX_STEPS, MAX_TOKEN_SETS
from rheostat_engine.plan.controllers import (
    CONTROLLERS_GROUP,
    MAX_CONTROLLED,
    Controller,
    ControllerStep,
)
from rheostat_engine.plan.gains import (
    LARGEST_GAIN,
    MAX_GAIN_CHANGES,
    MAX_GAINS,
    GainsUpdate,
    merged_gains,
)
from rheostat_engine.plan.gates import (
    MAX_COLUMNS,
    MAX_CONDITIONS,
    MAX_GATES,
    MAX_TERMS,
    NEVER,
    NO_SIGNALS,
    Activation,
    Combine,
    Form,
    Gate,
    Hold,
    Normalise,
    Pool,
    Reading,
    Readout,
    Signals,
)
from rheostat_engine.plan.gates import Condition as GateCondition
from rheostat_engine.plan.intervals import PlanTooLarge
from rheostat_engine.plan.plan import EXTRA_ARG, Control, PackedActs, Plan, SignalsWait, Window
from rheostat_engine.plan.points import ROUTERS, Point, Site, site_count
from rheostat_engine.plan.row_encodings import Codec, Directions, RowEncoding
from rheostat_engine.plan.tables import (
    MAX_CAPTURE_COST,
    MAX_INTERVALS,
    MAX_PLAN_COST,
    REQUEST_COST,
    SMALL_PLAN_COST,
    STEP_COST,
    CaptureNeed,
)
from rheostat_engine.plan.updates import update_captures, update_steering
from rheostat_engine.settings import EngineSettings, engine_kwargs

__all__ = [
    "CONTROLLERS_GROUP",
    "EXTRA_ARG",
    "LARGEST_GAIN",
    "MAX_CAPTURE_COST",
    "MAX_COLUMNS",
    "MAX_CONDITIONS",
    "MAX_CONTROLLED",
    "MAX_GAINS",
    "MAX_GAIN_CHANGES",
    "MAX_GATES",
    "MAX_INTERVALS",
    "MAX_PLAN_COST",
    "MAX_STEPS",
    "MAX_TERMS",
    "MAX_TOKEN_SETS",
    "NEVER",
    "NO_SIGNALS",
    "OPEN_END",
    "REQUEST_COST",
    "ROUTERS",
    "SMALL_PLAN_COST",
    "STEP_COST",
    "Act",
    "Activation",
    "Attached",
    "Band",
    "BlockKeys",
    "Capacity",
    "CapacityLedger",
    "Capture",
    "CaptureNeed",
    "Codec",
    "Combine",
    "Condition",
    "Control",
    "Controller",
    "ControllerDisabled",
    "ControllerStep",
    "Directions",
    "Dose",
    "Dropped",
    "EngineSettings",
    "Event",
    "Form",
    "Gained",
    "GainsUpdate",
    "Gate",
    "GateCondition",
    "Hold",
    "Installed",
    "Kind",
    "ModelSites",
    "Normalise",
    "Output",
    "PackedActs",
    "Plan",
    "PlanTooLarge",
    "Point",
    "Pool",
    "Reading",
    "Readout",
    "Released",
    "Report",
    "RowEncoding",
    "Rows",
    "Shortage",
    "SignalRows",
    "Signals",
    "SignalsWait",
    "Site",
    "Spans",
    "StagingError",
    "SteeredBlocks",
    "TokenSet",
    "Window",
    "WorkerChannel",
    "add_requests_fast",
    "engine_kwargs",
    "keep_end_token",
    "largest_replaced",
    "merged_gains",
    "prepare_async_llm",
    "receive_outputs",
    "request_template",
    "send_gains",
    "send_holds",
    "site_count",
    "stop_async_llm",
    "update_captures",
    "update_steering",
    "watch_scheduler",
]
