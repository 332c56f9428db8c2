"""Steer, read out and run language models that a Rheostat server serves.

    with rheostat.connect("localhost:50051") as engine:
        joy = engine.vectors.put(array, points="resid_post", layers=range(2, 6), name="joy")
        out = engine.generate(
            "My day was",
            steering=[joy * 4.0],
            capture=rheostat.Capture("resid_post", layers="all"),
            max_tokens=32,
        )
        out.text, out.activations["resid_post", 3], out.receipt

`rheostat.aio.connect` gives the same client for asyncio.
"""

from rheostat import aio
from rheostat._activations import Activations, Rows
from rheostat._engine import Engine, Stream, Vectors, connect
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
from rheostat._model import Ability, EngineInfo, Limits, ModelInfo, SiteGroup, Stats
from rheostat._points import Point, Site
from rheostat._receipts import (
    AppliedIntervention,
    AppliedRows,
    AppliedSite,
    CapturedSite,
    CaptureReceipt,
    Dose,
    Receipt,
)
from rheostat._requests import Capture, ChatMessage, GenerateOptions
from rheostat._results import (
    Event,
    Finished,
    Generation,
    PromptLogprobs,
    Sample,
    Started,
    TokenLogprob,
    TokenLogprobs,
    Tokens,
)
from rheostat._selectors import Selector, generated, positions, span, token_ids, window
from rheostat._vectors import Steer, Vector, VectorInfo, inline, named

__all__ = [
    "Ability",
    "Aborted",
    "Activations",
    "AlreadyExists",
    "AppliedIntervention",
    "AppliedRows",
    "AppliedSite",
    "CacheKey",
    "Cancelled",
    "Capture",
    "CaptureReceipt",
    "CapturedSite",
    "ChatMessage",
    "DataLoss",
    "DeadlineExceeded",
    "Dose",
    "Engine",
    "EngineInfo",
    "Event",
    "Explanation",
    "Finished",
    "GenerateOptions",
    "Generation",
    "InvalidRequest",
    "Limits",
    "ModelInfo",
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
    "RheostatError",
    "Rows",
    "Sample",
    "Selection",
    "Selector",
    "ServerError",
    "Site",
    "SiteGroup",
    "Started",
    "Stats",
    "Steer",
    "Stream",
    "TextSpan",
    "TokenLogprob",
    "TokenLogprobs",
    "Tokenized",
    "Tokens",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "Vector",
    "VectorInfo",
    "Vectors",
    "Violation",
    "aio",
    "connect",
    "generated",
    "inline",
    "named",
    "positions",
    "span",
    "token_ids",
    "window",
]
