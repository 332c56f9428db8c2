"""A request that admission has checked and compiled."""

from collections.abc import Mapping

from rheostat_engine import Plan, Window
from rheostat_engine.immutable import immutable
from rheostat_server.admission.baseline import Baseline
from rheostat_server.admission.global_steering import GlobalSteering
from rheostat_server.capture.specs import ResolvedCapture, Target
from rheostat_server.engine.sampling import SamplingSettings
from rheostat_server.monitors.parts import WatchPart
from rheostat_server.prompts.prompts import PromptTokens
from rheostat_server.selectors.selection import SelectionContext
from rheostat_server.steering.controlled import ControlledBy
from rheostat_server.steering.interventions import Intervention
from rheostat_server.steering.rules import SignalPlan
from rheostat_server.subscriptions.observer_captures import ObserverCapture
from rheostat_server.vectors.store import Vector
from rheostat_wire.v1 import capture_pb2


@immutable()
class AdmittedRequest:
    """A request that can run."""

    request_id: str
    """Given or made."""
    labels: Mapping[str, str]
    """Labels, by which subscriptions select requests."""
    prompt: PromptTokens
    """The prompt."""
    context: SelectionContext
    """The context in which its selectors were resolved."""
    sampling: SamplingSettings
    """The sampling settings."""
    interventions: tuple[Intervention, ...]
    """The server-wide ones, then the request's, in order."""
    captures: tuple[ResolvedCapture, ...]
    """One per capture, in order."""
    observer_captures: tuple[ObserverCapture, ...]
    """The captures of subscriptions that observe it."""
    plan: Plan
    """The plan of every sample. Each sample has a copy with an id of its own."""
    unobserved: Plan
    """The plan without the captures of observers."""
    vectors: tuple[Vector, ...]
    """Every vector that it needs, each once, without the vectors of observers."""
    lora: str
    """Name of the adapter; empty if there is none."""
    server_wide: GlobalSteering
    """The server-wide steering that acts on it."""
    return_prompt_token_ids: bool
    """Whether `Started` returns the prompt's tokens."""
    waits: bool
    """Whether it waits if the engine has too little capacity."""
    baseline: Baseline | None
    """The baseline that it is compared with, if it asks for one."""
    work: int
    """Bytes that `offload` counts for each pass over the request and its plan."""
    read_count: int
    """Number of the plan's acts that read, which follow those of the interventions. It is the same
    in each update of its steering."""
    signals: SignalPlan | None = None
    """What is done with the signals of its own samples; None if it has none."""
    rule_names: tuple[str, ...] = ()
    """The names of its rules, in order."""
    hold_back: int = 0
    """Tokens of each running sample that are held back."""
    watch_parts: tuple[WatchPart, ...] = ()
    """What watches read of it."""
    unwatched: bool = False
    """Whether no watch reads it. True for the prompts of sweeps and derivations."""
    controlled: ControlledBy | None = None
    """Its controller."""
    in_session: bool = False
    """Whether its client may change its steering."""
    background: bool = False
    """Whether it is part of work in the background, which waits while other requests wait."""
    windows: tuple[Window, ...] = ()
    """The window of each sample's plan, if the samples are cells of a sweep. Empty: all samples use
    the window of `plan`."""

    def with_question(
        self,
        request_id: str,
        prompt: PromptTokens,
        sampling: SamplingSettings,
        plan: Plan,
        *,
        captures: bool,
        windows: tuple[Window, ...],
    ) -> "AdmittedRequest":
        """A copy that asks the model another question.

        Made field by field, because `replace` takes twice as long, and a sweep makes many copies.
        If `captures` is false, the copy captures nothing by itself. If there are windows,
        `sampling` has a sample for each window.
        """
        return AdmittedRequest(
            request_id,
            self.labels,
            prompt,
            self.context,
            sampling,
            self.interventions,
            self.captures if captures else (),
            self.observer_captures if captures else (),
            plan,
            self.unobserved if captures else plan,
            self.vectors,
            self.lora,
            self.server_wide,
            self.return_prompt_token_ids,
            self.waits,
            self.baseline,
            self.work,
            self.read_count,
            self.signals,
            self.rule_names,
            self.hold_back,
            self.watch_parts,
            self.unwatched,
            self.controlled,
            self.in_session,
            self.background,
            windows,
        )

    @property
    def of_client(self) -> bool:
        """Whether a client may wait for its tokens: it is no prompt of a sweep or a derivation."""
        return not (self.background or self.unwatched)

    @property
    def changeable(self) -> bool:
        """Whether its client or a watch may change its steering while it runs."""
        return self.in_session or any(part.steers for part in self.watch_parts)

    @property
    def outlives_controller(self) -> bool:
        """Whether it goes on if its controller is disabled."""
        return self.controlled is not None and self.controlled.goes_on

    @property
    def prompt_len(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt.token_ids)

    @property
    def inline_captures(self) -> dict[capture_pb2.Overload.ValueType, dict[int, ResolvedCapture]]:
        """The captures whose rows go into the response, by policy, then by index."""
        by_policy: dict[capture_pb2.Overload.ValueType, dict[int, ResolvedCapture]] = {}
        for index, capture in enumerate(self.captures):
            if capture.target is Target.INLINE:
                by_policy.setdefault(capture.overload, {})[index] = capture
        return by_policy
