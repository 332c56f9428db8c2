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
from rheostat._activations import Activations, Rows
from rheostat._artifacts import Artifact, SinkInfo
from rheostat._captures import Capture, Sink
from rheostat._derivations import Derivation, DerivedRow
from rheostat._encodings import Encoding
from rheostat._engine import Engine, Session, Steering, Stream, connect
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
from rheostat._explanations import (
    CacheKey,
    Explanation,
    ResolvedCapture,
    ResolvedIntervention,
    Selection,
    TextSpan,
    Tokenized,
)
from rheostat._files import load_vector, save_vector
from rheostat._global_steering import GlobalSteering
from rheostat._interventions import Ablate, Add, Band, Clamp, Intervention, NormAdd, Scale
from rheostat._model import Ability, EngineInfo, Limits, ModelInfo, SiteGroup, Stats
from rheostat._points import Point, Site
from rheostat._projections import back_projected, projection_matrix
from rheostat._receipts import (
    AppliedIntervention,
    AppliedRows,
    AppliedSite,
    CapturedSite,
    CaptureReceipt,
    Dose,
    Receipt,
)
from rheostat._requests import ChatMessage, GenerateOptions
from rheostat._results import (
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
from rheostat._runs import Run, RunInfo
from rheostat._selectors import Selector, generated, positions, span, token_ids, window
from rheostat._sessions import SessionEvent, UpdateApplied, UpdateRefused
from rheostat._steering import ablate, band, clamp, norm_add, scale
from rheostat._subscribe_requests import ResumeOptions, SubscribeOptions
from rheostat._subscribed import (
    Attached,
    CapturedRows,
    Cursor,
    EndOfRequest,
    Heartbeat,
    SubscriptionEvent,
)
from rheostat._subscription import Subscription
from rheostat._vector_store import Vectors
from rheostat._vectors import Vector, VectorInfo, inline, named

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
    "Band",
    "CacheKey",
    "Cancelled",
    "Capture",
    "CaptureReceipt",
    "CapturedRows",
    "CapturedSite",
    "ChatMessage",
    "Clamp",
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
    "GenerateOptions",
    "Generation",
    "GlobalSteering",
    "Heartbeat",
    "Intervention",
    "InvalidRequest",
    "Limits",
    "ModelInfo",
    "NormAdd",
    "NotFound",
    "OutOfRange",
    "PermissionDenied",
    "Point",
    "PromptLogprobs",
    "Receipt",
    "Refused",
    "ResolvedCapture",
    "ResolvedIntervention",
    "Resource",
    "ResourceExhausted",
    "ResumeOptions",
    "RheostatError",
    "Rows",
    "Run",
    "RunInfo",
    "Sample",
    "Samples",
    "Scale",
    "Selection",
    "Selector",
    "ServerError",
    "Session",
    "SessionEvent",
    "Sink",
    "SinkInfo",
    "Site",
    "SiteGroup",
    "Started",
    "Stats",
    "Steering",
    "Stream",
    "SubscribeOptions",
    "Subscription",
    "SubscriptionEvent",
    "TextSpan",
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
    "ablate",
    "aio",
    "back_projected",
    "band",
    "captures",
    "clamp",
    "connect",
    "generated",
    "inline",
    "load_vector",
    "named",
    "norm_add",
    "positions",
    "projection_matrix",
    "save_vector",
    "scale",
    "span",
    "token_ids",
    "window",
]
