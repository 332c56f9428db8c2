"""Compiled steering and captures, kept for requests that send the same bytes again.

Why
    A client sends the same steering with every prompt. Checking it, composing its acts and packing
    its tables takes about a millisecond on the event loop; finding it here takes some microseconds.
    Requests that share a compiled plan also share its entry in the capacity ledger.

What makes an entry valid
    The bytes of the steering, of each capture, probe and rule, the version of the server-wide
    steering, and the length of the prompt and of the answer, if a selector counts positions or a
    probe reads. An entry lists the vectors and names that it was compiled with. It is used only
    while the store still has them.

Not kept: requests that select tokens by id or text, because these depend on the prompt; requests
that replace rows by those of a run, and captures for sinks and runs, because these depend on other
requests; large requests and plans.

Requests that differ only in the numbers of their gates, such as thresholds, share all but these;
see `with_other_gates`.

The parts of a request that was admitted are not checked again either; see `CheckedParts`.

Invariant: a request that finds an entry is admitted exactly as if it were compiled again.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from rheostat_engine import MAX_COLUMNS, Gate, ModelSites, Plan
from rheostat_server.admission.global_steering import GlobalSteering
from rheostat_server.admission.planning import ObservedPlans
from rheostat_server.capture.specs import ResolvedCapture
from rheostat_server.limits import (
    CAPTURES,
    COMPILED_INLINE_BYTES,
    COMPILED_PLAN_COST,
    COMPILED_REQUEST_BYTES,
    COMPILED_REQUESTS,
    RULES,
)
from rheostat_server.monitors.parts import WatchPart
from rheostat_server.monitors.watch import Watch
from rheostat_server.selectors.selection import SelectionContext
from rheostat_server.steering.gates import gate_probe_names, resolve_gate
from rheostat_server.steering.interventions import INTERVENTION_PATH, Intervention
from rheostat_server.steering.probes import Probe
from rheostat_server.steering.rules import SignalPlan
from rheostat_server.vectors.store import Lookups, Vector, VectorStore
from rheostat_wire.v1 import (
    capture_pb2,
    gate_pb2,
    generation_service_pb2,
    selector_pb2,
    steering_pb2,
)

K = TypeVar("K")
V = TypeVar("V")


class Parts(NamedTuple):
    """The parts of a request that are compiled, serialized."""

    steering: bytes
    captures: tuple[bytes, ...]
    probes: tuple[bytes, ...]
    rules: tuple[bytes, ...]


class CheckedParts(NamedTuple):
    """The results of checking the parts of a request that was admitted.

    They depend on the parts alone, so they hold for every request with equal parts.
    """

    parts: Parts
    """These parts. None of their selectors depends on tokens, and they have no more than the
    allowed ranges."""
    counts: bool
    """Whether a selector counts positions."""
    work: int
    """Bytes that `offload` counts for them, for a prompt of any length."""


class Key(NamedTuple):
    """Everything that a compiled request depends on, except for vectors and names."""

    parts: Parts
    watches: tuple[str, ...]
    """The ids of the watches that read the request."""
    at_once: bool
    """Whether its readings must not wait for those of later steps; see `signals_wait`."""
    version: int
    """The version of the server-wide steering."""
    prompt_len: int
    """0 if no selector counts positions; the same holds for the next field."""
    max_tokens: int


@dataclass(frozen=True, slots=True)
class CompiledRequest:
    """The compiled steering and captures of a request."""

    own: tuple[Intervention, ...]
    """The request's interventions."""
    captures: tuple[ResolvedCapture, ...]
    """One per capture, in order."""
    server_wide: tuple[Intervention, ...]
    """The interventions of the server-wide steering."""
    server_wide_probes: tuple[Probe, ...]
    """Its probes."""
    plan: Plan
    """The packed plan, without an id."""
    vectors: tuple[Vector, ...]
    """Every vector that the workers need, each once."""
    signals: SignalPlan | None = None
    """What is done with its signals; None if it has none."""
    watch_parts: tuple[WatchPart, ...] = ()
    """What watches read."""
    read_count: int = 0
    """The number of readings in its plan, of its own probes and of its watches."""
    observed: ObservedPlans = field(default_factory=ObservedPlans)
    """The plan with the captures of observers."""


class KeptRequest(NamedTuple):
    """A compiled request, and what it was compiled with."""

    compiled: CompiledRequest
    lookups: Lookups
    """The vectors and names that were found."""
    probes: Mapping[str, Probe]
    """Its probes, by name."""


class _Recent(OrderedDict[K, V]):
    """The values that were used last, at most `COMPILED_REQUESTS`."""

    def find(self, key: K) -> V | None:
        """A value, which counts as used now."""
        value = self.get(key)
        if value is not None:
            self.move_to_end(key)
        return value

    def add(self, key: K, value: V) -> None:
        """Adds a value, and removes the oldest if there are too many."""
        self[key] = value
        if len(self) > COMPILED_REQUESTS:
            self.popitem(last=False)


class CompiledRequests:
    """The compiled requests that were used last. Used on the event loop alone."""

    def __init__(self, store: VectorStore) -> None:
        """Makes an empty cache. Requests look up their vectors in `store`."""
        self._store = store
        self._requests = _Recent[Key, KeptRequest]()
        self._templates = _Recent[Key, KeptRequest]()
        """Requests that others reuse which differ only in numbers of gates; by `gateless_key`."""
        self._checked = _Recent[Parts, CheckedParts]()
        self._seen = _Recent[int, bool]()
        """Hashes of the parts of admitted requests, oldest first."""
        self._version = 0
        """The only version whose compiled requests are kept."""
        store.follow(self._on_evict)

    def __len__(self) -> int:
        """The number of compiled requests."""
        return len(self._requests)

    def set_version(self, version: int) -> None:
        """Discards all compiled requests, because the server-wide steering has a new version.

        Requests that are still being admitted under an earlier version are not kept.
        """
        self._requests.clear()
        self._templates.clear()
        self._version = version

    def find(self, key: Key) -> KeptRequest | None:
        """The request under a key of `key_of`, if the store still has its vectors and names."""
        return self._find(self._requests, key)

    def template(self, key: Key) -> KeptRequest | None:
        """The last template added under a key of `gateless_key`, under the conditions of `find`."""
        return self._find(self._templates, key)

    def add(self, key: Key, gateless: Key | None, kept: KeptRequest) -> None:
        """Keeps a request, unless it is too large, or names or steering have changed.

        Args:
            key: the key of `key_of`.
            gateless: the key of `gateless_key`, if the request can be a template.
            kept: the request.
        """
        if self._keeps(key, kept.compiled, kept.lookups):
            self._requests.add(key, kept)
            if gateless is not None:
                self._templates.add(gateless, kept)

    def checked(self, parts: Parts) -> CheckedParts | None:
        """The results for parts; None if they are not kept."""
        return self._checked.find(parts)

    def add_checked(self, checked: CheckedParts) -> None:
        """Keeps the results for the parts of a request that was admitted."""
        self._checked.add(checked.parts, checked)

    def seen_before(self, parts: Parts) -> bool:
        """Whether a request with equal parts was admitted before. Remembers this one."""
        number = hash(parts)
        if number in self._seen:
            return True
        self._seen.add(number, True)
        return False

    def _find(self, kept: _Recent[Key, KeptRequest], key: Key) -> KeptRequest | None:
        found = kept.find(key)
        if found is None:
            return None
        if not self._store.still_has(found.lookups.names, found.lookups.vectors):
            del kept[key]
            return None
        return found

    def _keeps(self, key: Key, compiled: CompiledRequest, lookups: Lookups) -> bool:
        inline = sum(
            vector.size
            for intervention in compiled.own
            for vector in intervention.op.vectors
            if vector.digest not in lookups.vectors
        )
        return (
            key.version == self._version
            and compiled.plan.plan_cost <= COMPILED_PLAN_COST
            and inline <= COMPILED_INLINE_BYTES
            and self._store.still_has(lookups.names, lookups.vectors)
        )

    def _on_evict(self, digest: bytes) -> None:
        """Frees the memory of a vector that has left the store."""
        for kept in (self._requests, self._templates):
            for key in [key for key, one in kept.items() if digest in one.lookups.vectors]:
                del kept[key]


def parts_of(request: generation_service_pb2.GenerateRequest) -> Parts | None:
    """The parts of a request that are compiled; None if they are too many or too large to keep.

    A message may hold 8,000 empty parts, which would take 10 ms to serialize.
    """
    if (
        len(request.captures) > CAPTURES
        or len(request.probes) > MAX_COLUMNS
        or len(request.rules) > RULES
    ):
        return None
    steering = request.steering.SerializeToString() if request.HasField("steering") else b""
    captures = tuple([capture.SerializeToString() for capture in request.captures])
    probes = tuple([probe.SerializeToString() for probe in request.probes])
    rules = tuple([rule.SerializeToString() for rule in request.rules])
    size = len(steering) + sum(map(len, (*captures, *probes, *rules)))
    return None if size > COMPILED_REQUEST_BYTES else Parts(steering, captures, probes, rules)


def counts_of(request: generation_service_pb2.GenerateRequest) -> bool | None:
    """Whether a selector of a request counts positions; None if the request is not kept.

    It is not kept if more than positions and vectors matter.
    """
    steered = [part for rule in request.rules for part in rule.steer.interventions]
    steered += request.steering.interventions
    return _counts_positions([*steered, *request.captures], request.probes)


def key_of(
    request: generation_service_pb2.GenerateRequest,
    context: SelectionContext,
    server_wide: GlobalSteering,
    watches: Sequence[Watch] = (),
    parts: Parts | None = None,
    checked: CheckedParts | None = None,
) -> Key | None:
    """The key of a request in the cache; None if it is not kept.

    Args:
        request: the request.
        context: its prompt and settings.
        server_wide: the server-wide steering that acts on it.
        watches: the watches that read it.
        parts: its serialized parts, if they are known.
        checked: the results of earlier checks of equal parts; None if there were none.
    """
    if not watches and server_wide.empty and not may_select(request):
        return Key(_NO_PARTS, (), False, server_wide.version, 0, 0)
    if any(watch.settings.readings.reads_tokens for watch in watches):
        return None
    counts: bool | None
    if not may_select(request):
        parts, counts = _NO_PARTS, False
    elif checked is not None:
        parts, counts = checked.parts, checked.counts
    else:
        parts = parts_of(request) if parts is None else parts
        if parts is None:
            return None
        counts = counts_of(request)
    if counts is not None and not server_wide.empty:
        steered = [part for steering in server_wide.steerings for part in steering.interventions]
        always = _counts_positions(steered, server_wide.policy.probes)
        counts = None if always is None else counts or always
    if counts is None:
        return None
    counts = counts or bool(watches)
    length, most = (context.prompt_len, context.max_tokens) if counts else (0, 0)
    names = tuple([watch.name for watch in watches])
    at_once = request.hold_back > 0 or any(watch.reads_at_once for watch in watches)
    return Key(parts, names, at_once, server_wide.version, length, most)


def gateless_key(
    request: generation_service_pb2.GenerateRequest, key: Key, server_wide: GlobalSteering
) -> Key | None:
    """The key of a request without the gates of its steering; None if no template can serve it.

    It can't if the steering has no gates, or if the request has rules, watches or server-wide
    steering, because these depend on gates or probes too.

    Args:
        request: the request.
        key: the key that `key_of` returned for it.
        server_wide: the server-wide steering that acts on it.
    """
    if not request.probes or request.rules or key.watches or not server_wide.empty:
        return None
    if not any(one.HasField("gate") for one in request.steering.interventions):
        return None
    steering = steering_pb2.Steering()
    steering.CopyFrom(request.steering)
    for intervention in steering.interventions:
        intervention.ClearField("gate")
    return key._replace(parts=key.parts._replace(steering=steering.SerializeToString()))


def with_other_gates(
    template: KeptRequest,
    steering: steering_pb2.Steering,
    context: SelectionContext,
    model: ModelSites,
) -> CompiledRequest | None:
    """A template's compiled request with the gates of another steering.

    Returns None if the gates differ in more than the numbers that readings are compared with. Then
    the request must be compiled.

    Raises:
        RheostatError: a gate is malformed. Everything else was checked with the template.
    """
    compiled = template.compiled
    own = list(compiled.own)
    gates: dict[Gate, Gate] = {}
    for index, message in enumerate(steering.interventions):
        before = own[index]
        if message.HasField("gate") != (before.gate is not None):
            return None
        if before.gate is None:
            continue
        if message.gate.signals != before.signals:
            return None
        if gate_probe_names(message.gate) != before.gate_probes:
            return None
        path = f"{INTERVENTION_PATH}[{index}]"
        gate = resolve_gate(message, before.op.sites, template.probes, model, context, path)
        if gate.shape != before.gate.shape or gates.setdefault(before.gate, gate) != gate:
            return None
        own[index] = before.with_gate(gate)
    if len(set(gates.values())) < len(gates):
        return None
    plan = compiled.plan.with_gates(gates)
    return replace(compiled, own=tuple(own), plan=plan, observed=ObservedPlans())


_NO_PARTS = Parts(b"", (), (), ())


def may_select(request: generation_service_pb2.GenerateRequest) -> bool:
    """Whether a request has parts that may have selectors."""
    return bool(request.HasField("steering") or request.captures or request.probes or request.rules)


def _counts_positions(
    parts: Sequence[steering_pb2.Intervention | capture_pb2.CaptureSpec],
    probes: Sequence[gate_pb2.Probe],
) -> bool | None:
    """Whether a selector counts positions; None if more than positions and vectors matter."""
    selecting = [part for part in (*parts, *probes) if part.HasField("where")]
    if any(map(_reads_requests, parts)) or any(_reads_tokens(part.where) for part in selecting):
        return None
    return bool(selecting or probes)  # a gate may be decided at the prompt's end


def _reads_requests(part: steering_pb2.Intervention | capture_pb2.CaptureSpec) -> bool:
    """Whether a part depends on other requests: on a run, or on the recordings of a sink."""
    if isinstance(part, capture_pb2.CaptureSpec):
        return part.HasField("sink") or part.HasField("run")
    return part.HasField("replace") and (
        part.replace.HasField("run") or part.replace.HasField("mean")
    )


def _reads_tokens(selector: selector_pb2.Selector) -> bool:
    return any(
        token_range.HasField("token_ids") or token_range.HasField("text")
        for ranges in (selector.include, selector.exclude)
        for token_range in ranges
    )
