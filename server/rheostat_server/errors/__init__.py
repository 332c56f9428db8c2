"""What can go wrong in a call, as a tree of exceptions; `status` gives each its status code.

    RheostatError
    ├── InvalidArgument
    │   ├── MissingField · InvalidValue · UnknownEnum · UnknownField · NonFinite
    │   ├── EmptySelector · InvalidPosition · SpanNotFound · SpanAmbiguous
    │   ├── UnknownLayer · UnknownToken · PromptTooLong
    │   └── TensorPayload · VectorShape · ZeroVector · DigestMismatch · TruncatedUpload
    ├── AlreadyExists ── DuplicateRequest · RunExists · ArtifactExists
    ├── NotFound
    │   ├── VectorNotFound · NameNotFound · RunNotFound · RequestNotFound · LoraNotFound
    │   └── SubscriptionNotFound · SinkNotFound · ArtifactNotFound
    ├── FailedPrecondition
    │   ├── SiteNotServed · OpNotServed · NotSupported · NoTokenizer · NoChatTemplate
    │   └── VersionConflict · NameConflict · RunInUse
    ├── ResourceExhausted ── BankFull · QueueFull · StoreFull · MessageTooLarge · CaptureOverflow
    │                        · ResponseOverflow
    ├── DataLoss ── RowsLost
    ├── OutOfRange ── CursorExpired
    ├── Aborted ── Superseded
    ├── DeadlineExceeded ── DeadlinePassed
    ├── Unavailable ── WarmingUp · Draining · EngineLost · CacheSuspect
    ├── Unimplemented ── NotImplementedHere
    └── Internal ── Defect

Every leaf names its value of `rheostat.v1.Reason`. Texts are for people and hold no Python reprs.
"""

from rheostat_server.errors.kinds import (
    Aborted,
    AlreadyExists,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    OutOfRange,
    Resource,
    ResourceExhausted,
    RheostatError,
    Unavailable,
    Unimplemented,
)
from rheostat_server.errors.leaves import (
    ArtifactExists,
    ArtifactNotFound,
    BankFull,
    CacheSuspect,
    CaptureOverflow,
    CursorExpired,
    DeadlinePassed,
    Defect,
    DigestMismatch,
    Draining,
    DuplicateRequest,
    EmptySelector,
    EngineLost,
    InvalidPosition,
    InvalidValue,
    LoraNotFound,
    MessageTooLarge,
    MissingField,
    NameConflict,
    NameNotFound,
    NoChatTemplate,
    NonFinite,
    NotImplementedHere,
    NoTokenizer,
    NotSupported,
    OpNotServed,
    PromptTooLong,
    QueueFull,
    RequestNotFound,
    ResponseOverflow,
    RowsLost,
    RunExists,
    RunInUse,
    RunNotFound,
    SinkNotFound,
    SiteNotServed,
    SpanAmbiguous,
    SpanNotFound,
    StoreFull,
    SubscriptionNotFound,
    Superseded,
    TensorPayload,
    TruncatedUpload,
    UnknownEnum,
    UnknownField,
    UnknownLayer,
    UnknownToken,
    VectorNotFound,
    VectorShape,
    VersionConflict,
    WarmingUp,
    ZeroVector,
)
from rheostat_server.errors.startup import (
    EngineDied,
    EngineFailed,
    InvalidConfig,
    ModelNotFound,
    PortInUse,
    ServerFailed,
    SinksFailed,
    SpoolFailed,
    StartupError,
    VectorDirFailed,
)

__all__ = [
    "Aborted",
    "AlreadyExists",
    "ArtifactExists",
    "ArtifactNotFound",
    "BankFull",
    "CacheSuspect",
    "CaptureOverflow",
    "CursorExpired",
    "DataLoss",
    "DeadlineExceeded",
    "DeadlinePassed",
    "Defect",
    "DigestMismatch",
    "Draining",
    "DuplicateRequest",
    "EmptySelector",
    "EngineDied",
    "EngineFailed",
    "EngineLost",
    "FailedPrecondition",
    "Internal",
    "InvalidArgument",
    "InvalidConfig",
    "InvalidPosition",
    "InvalidValue",
    "LoraNotFound",
    "MessageTooLarge",
    "MissingField",
    "ModelNotFound",
    "NameConflict",
    "NameNotFound",
    "NoChatTemplate",
    "NoTokenizer",
    "NonFinite",
    "NotFound",
    "NotImplementedHere",
    "NotSupported",
    "OpNotServed",
    "OutOfRange",
    "PortInUse",
    "PromptTooLong",
    "QueueFull",
    "RequestNotFound",
    "Resource",
    "ResourceExhausted",
    "ResponseOverflow",
    "RheostatError",
    "RowsLost",
    "RunExists",
    "RunInUse",
    "RunNotFound",
    "ServerFailed",
    "SinkNotFound",
    "SinksFailed",
    "SiteNotServed",
    "SpanAmbiguous",
    "SpanNotFound",
    "SpoolFailed",
    "StartupError",
    "StoreFull",
    "SubscriptionNotFound",
    "Superseded",
    "TensorPayload",
    "TruncatedUpload",
    "Unavailable",
    "Unimplemented",
    "UnknownEnum",
    "UnknownField",
    "UnknownLayer",
    "UnknownToken",
    "VectorDirFailed",
    "VectorNotFound",
    "VectorShape",
    "VersionConflict",
    "WarmingUp",
    "ZeroVector",
]
