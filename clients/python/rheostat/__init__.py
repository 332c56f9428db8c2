"""Steer, read out and run language models that a Rheostat server serves.

    with rheostat.connect("localhost:50051") as engine:
        joy = engine.vectors.put(array, points="resid_post", layers=range(2, 6), name="joy")
        out = engine.generate(
            "My day was",
            steering=[joy * 0.5],
            capture=rheostat.Capture("resid_post", layers="all"),
            max_tokens=32,
        )
        out.text, out.activations["resid_post", 3], out.receipt

`rheostat.aio.connect` gives the same client for asyncio; `rheostat.captures` reads back rows that a
server's sink stored.
"""

from importlib.metadata import PackageNotFoundError, version

from rheostat import aio, captures
from rheostat._capture.activations import Activations, Rows
from rheostat._capture.artifacts import Artifact, SinkInfo
from rheostat._capture.captures import Capture, Sink
from rheostat._capture.encodings import Encoding
from rheostat._capture.projections import back_projected, projection_matrix
from rheostat._client.engine import Engine, Session, Steering, Stream, Vectors, connect
from rheostat._client.requests import GenerateOptions
from rheostat._client.run_calls import CapturedRun
from rheostat._client.sessions import SessionEvent
from rheostat._errors import (
    Aborted,
    AlreadyExists,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    OutOfRange,
    PermissionDenied,
    Refused,
    Resource,
    ResourceExhausted,
    RheostatError,
    ServerError,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    Violation,
)
from rheostat._event_streams.state import Heartbeat
from rheostat._files import load_sae_feature, load_vector, save_vector
from rheostat._points import Point, Site
from rheostat._prompts import ChatMessage
from rheostat._responses.explanations import (
    CacheKey,
    Explanation,
    ResolvedCapture,
    ResolvedIntervention,
    Selection,
    TextSpan,
    Tokenized,
)
from rheostat._responses.lens import Attribution, LensResult
from rheostat._responses.model import (
    Ability,
    ControllerStats,
    EngineInfo,
    Limits,
    ModelInfo,
    SiteGroup,
    Stats,
)
from rheostat._responses.receipts import (
    AppliedIntervention,
    AppliedRows,
    AppliedSite,
    CapturedSite,
    CaptureReceipt,
    ControllerReceipt,
    Dose,
    Receipt,
    ReplaceSource,
    RuleFirings,
    RuleReceipt,
    WatchChange,
    WatchReceipt,
)
from rheostat._responses.results import (
    Divergence,
    DroppedRows,
    Event,
    Finished,
    Generation,
    PromptLogprobs,
    Sample,
    Samples,
    Started,
    TokenLogprob,
    TokenLogprobs,
    Tokens,
)
from rheostat._responses.signals import SignalColumn, Signals
from rheostat._responses.updates import UpdateApplied, UpdateRefused
from rheostat._runs import Run, RunInfo
from rheostat._selectors import Selector, generated, positions, span, token_ids, window
from rheostat._steering.condition_fits import ConditionFit, ConditionFits
from rheostat._steering.derivations import Derivation, DerivedRow
from rheostat._steering.gates import Condition, Gate, Probe, Ramp, Sigmoid, gate, probe
from rheostat._steering.global_steering import GlobalSteering
from rheostat._steering.interventions import Ablate, Band, Clamp, NormAdd, Scale
from rheostat._steering.readouts import Readout, readout
from rheostat._steering.replacements import (
    FromRun,
    Noise,
    Replace,
    RunMean,
    Zeros,
    from_run,
    replace,
    run_mean,
)
from rheostat._steering.rules import Gain, Observe, Rule, Steer, Stop
from rheostat._steering.sae_features import SaeFeature
from rheostat._steering.steering import ablate, band, clamp, norm_add, scale
from rheostat._steering.token_directions import TokenDirection, token_direction
from rheostat._steering.vectors import Add, Intervention, Vector, VectorInfo, inline, named
from rheostat._subscriptions.events import (
    Attached,
    CapturedRows,
    Cursor,
    EndOfRequest,
    SubscriptionEvent,
)
from rheostat._subscriptions.requests import ResumeOptions, SubscribeOptions
from rheostat._subscriptions.subscription import Subscription
from rheostat._sweeps.grades import ProbeGrade
from rheostat._sweeps.pairs import NoisyPrompt, Pair
from rheostat._sweeps.paths import PathOptions, PathPatch
from rheostat._sweeps.requests import SweepOptions, Zoom
from rheostat._sweeps.result import Cell, SweepResult
from rheostat._watches.events import (
    Readings,
    SignalsDropped,
    SignalSummary,
    WatchedRequestBegun,
    WatchedRequestEnded,
    WatchedSignals,
    WatchEvent,
)
from rheostat._watches.requests import WatchOptions
from rheostat._watches.table import WatchTable
from rheostat._watches.watch import Watch

try:
    __version__ = version("rheostat")
except PackageNotFoundError:  # imported from a checkout that is not installed
    __version__ = "0+unknown"

__all__ = [
    "Ability",
    "Ablate",
    "Aborted",
    "Activations",
    "Add",
    "AlreadyExists",
    "AppliedIntervention",
    "AppliedRows",
    "AppliedSite",
    "Artifact",
    "Attached",
    "Attribution",
    "Band",
    "CacheKey",
    "Cancelled",
    "Capture",
    "CaptureReceipt",
    "CapturedRows",
    "CapturedRun",
    "CapturedSite",
    "Cell",
    "ChatMessage",
    "Clamp",
    "Condition",
    "ConditionFit",
    "ConditionFits",
    "ControllerReceipt",
    "ControllerStats",
    "Cursor",
    "DataLoss",
    "DeadlineExceeded",
    "Derivation",
    "DerivedRow",
    "Divergence",
    "Dose",
    "DroppedRows",
    "Encoding",
    "EndOfRequest",
    "Engine",
    "EngineInfo",
    "Event",
    "Explanation",
    "Finished",
    "FromRun",
    "Gain",
    "Gate",
    "GenerateOptions",
    "Generation",
    "GlobalSteering",
    "Heartbeat",
    "Intervention",
    "InvalidRequest",
    "LensResult",
    "Limits",
    "ModelInfo",
    "Noise",
    "NoisyPrompt",
    "NormAdd",
    "NotFound",
    "Observe",
    "OutOfRange",
    "Pair",
    "PathOptions",
    "PathPatch",
    "PermissionDenied",
    "Point",
    "Probe",
    "ProbeGrade",
    "PromptLogprobs",
    "Ramp",
    "Readings",
    "Readout",
    "Receipt",
    "Refused",
    "Replace",
    "ReplaceSource",
    "ResolvedCapture",
    "ResolvedIntervention",
    "Resource",
    "ResourceExhausted",
    "ResumeOptions",
    "RheostatError",
    "Rows",
    "Rule",
    "RuleFirings",
    "RuleReceipt",
    "Run",
    "RunInfo",
    "RunMean",
    "SaeFeature",
    "Sample",
    "Samples",
    "Scale",
    "Selection",
    "Selector",
    "ServerError",
    "Session",
    "SessionEvent",
    "Sigmoid",
    "SignalColumn",
    "SignalSummary",
    "Signals",
    "SignalsDropped",
    "Sink",
    "SinkInfo",
    "Site",
    "SiteGroup",
    "Started",
    "Stats",
    "Steer",
    "Steering",
    "Stop",
    "Stream",
    "SubscribeOptions",
    "Subscription",
    "SubscriptionEvent",
    "SweepOptions",
    "SweepResult",
    "TextSpan",
    "TokenDirection",
    "TokenLogprob",
    "TokenLogprobs",
    "Tokenized",
    "Tokens",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "UpdateApplied",
    "UpdateRefused",
    "Vector",
    "VectorInfo",
    "Vectors",
    "Violation",
    "Watch",
    "WatchChange",
    "WatchEvent",
    "WatchOptions",
    "WatchReceipt",
    "WatchTable",
    "WatchedRequestBegun",
    "WatchedRequestEnded",
    "WatchedSignals",
    "Zeros",
    "Zoom",
    "ablate",
    "aio",
    "back_projected",
    "band",
    "captures",
    "clamp",
    "connect",
    "from_run",
    "gate",
    "generated",
    "inline",
    "load_sae_feature",
    "load_vector",
    "named",
    "norm_add",
    "positions",
    "probe",
    "projection_matrix",
    "readout",
    "replace",
    "run_mean",
    "save_vector",
    "scale",
    "span",
    "token_direction",
    "token_ids",
    "window",
]
