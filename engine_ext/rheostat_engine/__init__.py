"""Rheostat's extension of vLLM: sites in the forward pass, and the server's interface to them.

Importing this package imports neither torch nor vLLM. Modules that do are loaded by the processes
that run vLLM: the workers, the engine's core, and the server's process with its `AsyncLLM`.
"""

from typing import TYPE_CHECKING

from rheostat_engine.async_llm import adapt_async_llm as adapt_async_llm
from rheostat_engine.async_llm import prepare_async_llm as prepare_async_llm
from rheostat_engine.async_llm import receive_outputs as receive_outputs
from rheostat_engine.async_llm import request_template as request_template
from rheostat_engine.async_llm import send_gains as send_gains
from rheostat_engine.async_llm import send_holds as send_holds
from rheostat_engine.async_llm import stop_async_llm as stop_async_llm
from rheostat_engine.channel.events import Attached as Attached
from rheostat_engine.channel.events import ControllerDisabled as ControllerDisabled
from rheostat_engine.channel.events import Dose as Dose
from rheostat_engine.channel.events import Dropped as Dropped
from rheostat_engine.channel.events import Event as Event
from rheostat_engine.channel.events import Gained as Gained
from rheostat_engine.channel.events import Installed as Installed
from rheostat_engine.channel.events import Released as Released
from rheostat_engine.channel.events import Report as Report
from rheostat_engine.channel.events import Rows as Rows
from rheostat_engine.channel.events import SignalRows as SignalRows
from rheostat_engine.channel.staging import StagingError as StagingError
from rheostat_engine.channel.worker_channel import WorkerChannel as WorkerChannel
from rheostat_engine.model_sites import ModelSites as ModelSites
from rheostat_engine.output import Output as Output
from rheostat_engine.plan.acts import OPEN_END as OPEN_END
from rheostat_engine.plan.acts import Act as Act
from rheostat_engine.plan.acts import Band as Band
from rheostat_engine.plan.acts import Capture as Capture
from rheostat_engine.plan.acts import Kind as Kind
from rheostat_engine.plan.acts import Spans as Spans
from rheostat_engine.plan.acts import TokenCondition as TokenCondition
from rheostat_engine.plan.acts import largest_replaced as largest_replaced
from rheostat_engine.plan.block_keys import BlockKeys as BlockKeys
from rheostat_engine.plan.block_keys import SteeredBlocks as SteeredBlocks
from rheostat_engine.plan.capacity import Capacity as Capacity
from rheostat_engine.plan.capacity import CapacityLedger as CapacityLedger
from rheostat_engine.plan.capacity import Shortage as Shortage
from rheostat_engine.plan.controllers import CONTROLLERS_GROUP as CONTROLLERS_GROUP
from rheostat_engine.plan.controllers import MAX_CONTROLLED as MAX_CONTROLLED
from rheostat_engine.plan.controllers import Controller as Controller
from rheostat_engine.plan.controllers import ControllerStep as ControllerStep
from rheostat_engine.plan.gains import LARGEST_GAIN as LARGEST_GAIN
from rheostat_engine.plan.gains import MAX_GAIN_CHANGES as MAX_GAIN_CHANGES
from rheostat_engine.plan.gains import GainsUpdate as GainsUpdate
from rheostat_engine.plan.gains import merged_gains as merged_gains
from rheostat_engine.plan.gates import MAX_COLUMNS as MAX_COLUMNS
from rheostat_engine.plan.gates import MAX_CONDITIONS as MAX_CONDITIONS
from rheostat_engine.plan.gates import MAX_GATES as MAX_GATES
from rheostat_engine.plan.gates import MAX_TERMS as MAX_TERMS
from rheostat_engine.plan.gates import NEVER as NEVER
from rheostat_engine.plan.gates import NO_SIGNALS as NO_SIGNALS
from rheostat_engine.plan.gates import Activation as Activation
from rheostat_engine.plan.gates import Combine as Combine
from rheostat_engine.plan.gates import Form as Form
from rheostat_engine.plan.gates import Gate as Gate
from rheostat_engine.plan.gates import GateCondition as GateCondition
from rheostat_engine.plan.gates import Hold as Hold
from rheostat_engine.plan.gates import Normalise as Normalise
from rheostat_engine.plan.gates import Pool as Pool
from rheostat_engine.plan.gates import Reading as Reading
from rheostat_engine.plan.gates import Readout as Readout
from rheostat_engine.plan.gates import Signals as Signals
from rheostat_engine.plan.intervals import PlanTooLarge as PlanTooLarge
from rheostat_engine.plan.plan import EXTRA_ARG as EXTRA_ARG
from rheostat_engine.plan.plan import Control as Control
from rheostat_engine.plan.plan import PackedActs as PackedActs
from rheostat_engine.plan.plan import Plan as Plan
from rheostat_engine.plan.plan import SignalsWait as SignalsWait
from rheostat_engine.plan.plan import Window as Window
from rheostat_engine.plan.points import ROUTERS as ROUTERS
from rheostat_engine.plan.points import Point as Point
from rheostat_engine.plan.points import Site as Site
from rheostat_engine.plan.row_encodings import Codec as Codec
from rheostat_engine.plan.row_encodings import Directions as Directions
from rheostat_engine.plan.row_encodings import RowEncoding as RowEncoding
from rheostat_engine.plan.tables import MAX_PLAN_COST as MAX_PLAN_COST
from rheostat_engine.plan.tables import REQUEST_COST as REQUEST_COST
from rheostat_engine.plan.tables import SMALL_PLAN_COST as SMALL_PLAN_COST
from rheostat_engine.plan.tables import STEP_COST as STEP_COST
from rheostat_engine.plan.tables import CaptureNeed as CaptureNeed
from rheostat_engine.settings import EngineSettings as EngineSettings
from rheostat_engine.settings import engine_kwargs as engine_kwargs

if TYPE_CHECKING:
    from rheostat_engine.adapters.templates import RequestTemplate as RequestTemplate
