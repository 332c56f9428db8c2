"""The pairs of prompts of a sweep: tokens, answers, alignment, and the positions of each column.

Columns are positions of the clean prompt. In the corrupt prompt they are the aligned positions; see
`AlignedPrompts`.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rheostat_engine import Spans
from rheostat_server import validation
from rheostat_server.admission.admit import admit
from rheostat_server.admission.admitted_request import AdmittedRequest
from rheostat_server.derivation.prompt_rows import renamed_errors, request_for
from rheostat_server.errors import (
    InvalidPosition,
    InvalidValue,
    MissingField,
    NotSupported,
    RheostatError,
)
from rheostat_server.limits import (
    ID_BYTES,
    NOISES,
    SWEEP_COLUMNS,
    SWEEP_PAIRS,
    SWEEP_POSITIONS,
    SWEEP_RANGES,
    SWEEP_ROWS,
    SWEEP_TOKENS,
)
from rheostat_server.requests.manager import RequestManager
from rheostat_server.runs.targets import RUN_ID
from rheostat_server.selectors.selection import SelectionContext, needs_text, resolve_selector
from rheostat_server.selectors.spans import clipped, length
from rheostat_server.steering.replacements import AlignedPrompts, align
from rheostat_server.sweeps.answers import Answers, resolve_answers
from rheostat_server.sweeps.grades import Grade
from rheostat_server.tasks.offload import offload_plan
from rheostat_server.validation import field_path
from rheostat_wire.v1 import (
    generation_service_pb2,
    replace_pb2,
    selector_pb2,
    steering_pb2,
    sweep_pb2,
    sweep_service_pb2,
    types_pb2,
)

_DEFAULT_NOISES = 10

_TOKEN_BYTES = 32
"""Bytes that `offload` counts for a token in which a selector looks for text or ids."""


class ColumnPositions(NamedTuple):
    """Positions of a column."""

    base: tuple[int, ...]
    """In the prompt that is run."""
    source: tuple[int, ...]
    """In the prompt that the rows come from: one for each of `base`. -1: there is none."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A clean prompt and its corrupt versions."""

    message: sweep_pb2.SweepPair
    path: str
    """Its path in the request: "pairs[0]"."""
    answers: Answers
    clean: AdmittedRequest
    """The clean prompt under the sweep's steering."""
    corrupt: tuple[AdmittedRequest, ...]
    """The corrupt prompt, once for each noise. None: rows are replaced by zeros or a mean."""
    into_clean: bool
    """Whether cells run the clean prompt."""
    alignment: AlignedPrompts
    """Of the clean prompt with the corrupt one."""
    columns: tuple[tuple[int, ...], ...]
    """The positions of each column, in the clean prompt."""

    @property
    def token_count(self) -> int:
        """Tokens of the clean prompt and of its first corrupt version."""
        return sum(admitted.prompt_len for admitted in (self.clean, *self.corrupt[:1]))

    @property
    def bases(self) -> tuple[AdmittedRequest, ...]:
        """The prompts in which cells are run. A cell is averaged over them."""
        return (self.clean,) * max(1, len(self.corrupt)) if self.into_clean else self.corrupt

    def positions(self, column: int) -> ColumnPositions:
        """The positions of a column."""
        clean = self.columns[column]
        if not self.corrupt:
            return ColumnPositions(clean, clean)
        corrupt = tuple(map(self.alignment.partner, clean))
        base, source = (clean, corrupt) if self.into_clean else (corrupt, clean)
        return ColumnPositions(base, source)


async def resolve_pairs(
    request: sweep_service_pb2.SweepRequest,
    grades: Sequence[Grade],
    manager: RequestManager,
    *,
    background: bool,
) -> tuple[Pair, ...]:
    """The pairs of a sweep.

    Args:
        request: the sweep.
        grades: its grades.
        manager: runs its prompts.
        background: whether the prompts wait while other requests wait.

    Raises:
        RheostatError: something is malformed. The error names the field.
    """
    if not request.pairs:
        raise MissingField("at least one pair is required", field="pairs")
    validation.check_count(len(request.pairs), SWEEP_PAIRS, "pairs", "pairs")
    _check_labels(request)
    _check_ranges(request)
    pairs: list[Pair] = []
    room = _Room(SWEEP_TOKENS, SWEEP_POSITIONS, SWEEP_ROWS)
    for index, message in enumerate(request.pairs):
        path = f"pairs[{index}]"
        answers = resolve_answers(message, grades, manager.info.vocabulary, path)
        context = _Context(request, message, path, answers, grades, manager, room, background)
        pair = await _pair(context)
        if pairs and not request.group_labels and pair.columns != pairs[0].columns:
            raise InvalidValue(
                "it has other columns than the first pair: name groups of positions, one per "
                "column, in every pair",
                field=field_path(pair.path, "prompt"),
            )
        pairs.append(pair)
    return tuple(pairs)


def changing_columns(pairs: Sequence[Pair]) -> tuple[Sequence[int], int]:
    """The columns in which cells may have an effect, and at how many of them the change begins.

    The rows of all other columns are the same in both prompts of each pair. The change begins at
    all of the first differing positions in a row.
    """
    each = [(pair.columns, _changed(pair)) for pair in pairs]
    every = range(len(pairs[0].columns))
    changing = [
        n for n in every if any(columns[n][-1] >= changed.start for columns, changed in each)
    ] or every
    begins = [all(columns[n][0] < changed.stop for columns, changed in each) for n in changing]
    return changing, sum(begins)


def column_labels(request: sweep_service_pb2.SweepRequest, pairs: Sequence[Pair]) -> list[str]:
    """The names of the columns."""
    if request.group_labels:
        return list(request.group_labels)
    return [str(position) for (position,) in pairs[0].columns]


def _check_labels(request: sweep_service_pb2.SweepRequest) -> None:
    path = "group_labels"
    validation.check_count(len(request.group_labels), SWEEP_COLUMNS, path, "columns")
    if len(set(request.group_labels)) < len(request.group_labels):
        raise InvalidValue("labels may not be repeated", field=path)
    for index, label in enumerate(request.group_labels):
        if not label:
            raise MissingField("a label is required", field=f"{path}[{index}]")
        validation.text_bytes(label, ID_BYTES, f"{path}[{index}]")
    if request.group_labels and request.HasField("where"):
        raise InvalidValue(
            "the columns are groups, whose positions are in the pairs: leave where out",
            field="where",
        )


def _check_ranges(request: sweep_service_pb2.SweepRequest) -> None:
    selectors = [request.where]
    for index, pair in enumerate(request.pairs):
        path = f"pairs[{index}]"
        validation.text_bytes(pair.label, ID_BYTES, field_path(path, "label"))
        validation.check_count(
            len(pair.groups), SWEEP_COLUMNS, field_path(path, "groups"), "groups"
        )
        selectors += [*pair.groups, pair.noise.where]
    count = sum(len(selector.include) + len(selector.exclude) for selector in selectors)
    validation.check_count(count, SWEEP_RANGES, "pairs", "ranges in all groups")


@dataclass
class _Room:
    """How many tokens, positions and rows further pairs may still have."""

    tokens: int
    positions: int
    rows: int
    counted: set[int] = field(default_factory=set)
    """The `id` of each counted vector. Prompts share a stored vector, so it is counted once."""

    def take_prompt(self, prompt: AdmittedRequest, path: str) -> None:
        """Counts a prompt's tokens, and the rows of its noise and steering.

        Raises:
            InvalidValue: the sweep's prompts have too many tokens or rows.
        """
        new = [vector for vector in prompt.vectors if id(vector) not in self.counted]
        self.counted.update(map(id, new))
        self.rows -= sum(vector.rows for vector in new)
        if self.rows < 0:
            raise InvalidValue(
                f"noise and steering put more than {SWEEP_ROWS} rows into the prompts of the "
                "sweep: choose fewer positions or sites, fewer noises, or fewer pairs in a call",
                field=path,
            )
        self.tokens -= prompt.prompt_len
        if self.tokens < 0:
            raise InvalidValue(
                f"the prompts of the sweep have more than {SWEEP_TOKENS} tokens: send fewer pairs, "
                "or fewer noises, in a call",
                field=path,
            )

    def take_columns(self, count: int, path: str) -> None:
        """Counts the positions of a pair's columns.

        Raises:
            InvalidValue: the sweep's columns have too many positions.
        """
        self.positions -= count
        if self.positions < 0:
            raise InvalidValue(
                f"the columns of all pairs have more than {SWEEP_POSITIONS} positions: choose "
                "fewer, or send fewer pairs in a call",
                field=path,
            )


class _Context(NamedTuple):
    """Everything that the resolution of a pair needs."""

    request: sweep_service_pb2.SweepRequest
    message: sweep_pb2.SweepPair
    path: str
    """The path of the pair."""
    answers: Answers
    grades: Sequence[Grade]
    manager: RequestManager
    room: _Room
    background: bool


async def _admit(
    context: _Context, run: generation_service_pb2.GenerateRequest, path: str
) -> AdmittedRequest:
    """Admits a prompt. First yields to the event loop, because a sweep may have thousands."""
    await asyncio.sleep(0)
    if context.manager.admission.server_wide.policy.rules:
        raise NotSupported("the server's policy has rules, which do not read the cells of sweeps")
    admitted = await admit(run, replace(context.manager.admission, watches=None))
    context.room.take_prompt(admitted, path)
    return replace(admitted, background=context.background)


async def _pair(context: _Context) -> Pair:
    request, message = context.request, context.message
    clean_field = field_path(context.path, "prompt")
    if not message.HasField("prompt"):
        raise MissingField("a clean prompt is required", field=clean_field)
    with renamed_errors(lambda error: _rename(error, clean_field, context.grades)):
        clean = await _admit(context, _run(context, message.prompt), clean_field)
    corrupt = await _corrupt(context, clean)
    tokens = clean.prompt.token_ids
    others = corrupt[0].prompt.token_ids if corrupt else tokens
    return Pair(
        message=message,
        path=context.path,
        answers=context.answers,
        clean=clean,
        corrupt=corrupt,
        into_clean=_into_clean(request, corrupts=bool(corrupt)),
        alignment=_alignment(request, tokens, others),
        columns=await _columns(context, clean),
    )


def _into_clean(request: sweep_service_pb2.SweepRequest, *, corrupts: bool) -> bool:
    """Whether a pair's cells run the clean prompt."""
    if not request.HasField("direction"):
        return not corrupts
    validation.known_enum(request.direction, sweep_pb2.SweepDirection.values(), "direction")
    denoises = request.direction == sweep_pb2.SWEEP_DIRECTION_DENOISE
    if denoises and not corrupts:
        raise InvalidValue(
            "a pair has no corrupt prompt, into which clean rows could be put: zeros and means "
            "are put into the clean prompt",
            field="direction",
        )
    return not denoises


def _alignment(
    request: sweep_service_pb2.SweepRequest, tokens: tuple[int, ...], others: tuple[int, ...]
) -> AlignedPrompts:
    """How the positions of the clean prompt correspond to those of the corrupt one."""
    identity = len(tokens) == len(others)
    if request.HasField("alignment"):
        validation.known_enum(request.alignment, replace_pb2.Alignment.values(), "alignment")
        identity = request.alignment == replace_pb2.ALIGNMENT_IDENTITY
    if identity:
        shorter = min(len(tokens), len(others))
        return AlignedPrompts(shorter, 0, len(tokens), len(others))
    return align(tokens, others)


def _changed(pair: Pair) -> range:
    """The first positions, in a row, at which the corrupt prompt differs from the clean one.

    Before them, both prompts have the same rows. `range(1)` if that is not known: the rows of
    stored runs may come from other steering, and zeros and means differ everywhere.
    """
    kind, steering = pair.message.WhichOneof("corruption"), pair.clean.unobserved.acts
    acts = [admitted.unobserved.acts for admitted in pair.corrupt]
    own = [acts_of_run[len(steering) :] for acts_of_run in acts]
    alike = all(acts_of_run[: len(steering)] == steering for acts_of_run in acts)
    alignment = pair.alignment
    if kind == "noise" and alike:
        spans = (
            clipped(act.spans, 0, alignment.length) for acts_of_run in own for act in acts_of_run
        )
        differing = {position for spans_of_act in spans for position in _expanded(spans_of_act)}
    elif kind == "corrupt" and alike and not any(own):
        clean, corrupt = pair.clean.prompt.token_ids, pair.corrupt[0].prompt.token_ids
        both = enumerate(zip(clean, corrupt, strict=False))
        differing = {position for position, (token, other) in both if token != other}
    else:
        return range(1)
    if not differing:
        return range(1)
    start = end = min(differing)
    if alignment.suffix:
        # Positions in between have no partner. The first one after them shows the change.
        return range(start, alignment.length - alignment.suffix + 1)
    while end in differing:
        end += 1
    return range(start, end)


async def _corrupt(context: _Context, clean: AdmittedRequest) -> tuple[AdmittedRequest, ...]:
    """The corrupt versions of a pair's prompt."""
    message = context.message
    kind = validation.required(
        message.WhichOneof("corruption"), context.path, "corrupt, noise, zeros, mean and run_id"
    )
    field = field_path(context.path, kind)
    runs: Iterable[generation_service_pb2.GenerateRequest] = ()
    with renamed_errors(lambda error: _rename(error, field, context.grades)):
        match kind:
            case "corrupt":
                runs = [_run(context, message.corrupt)]
            case "noise":
                runs = _noisy(context, clean, field)
            case "run_id":
                store = context.manager.runs
                stored = store.hold(validation.matches(message.run_id, RUN_ID, field), field)
                ids = types_pb2.TokenIds(ids=stored.prompt_token_ids.tolist())
                store.release(stored)
                runs = [_run(context, types_pb2.Prompt(token_ids=ids))]
        admitted = [await _admit(context, run, field) for run in runs]
    if kind == "noise":
        admitted = [replace(version, prompt=clean.prompt) for version in admitted]
    return tuple(admitted)


def _noisy(
    context: _Context, clean: AdmittedRequest, path: str
) -> Iterator[generation_service_pb2.GenerateRequest]:
    """The clean prompt with each of a pair's noises."""
    noise = context.message.noise
    count = noise.noise_count if noise.HasField("noise_count") else _DEFAULT_NOISES
    if not 1 <= count <= NOISES:
        raise InvalidValue(f"must be 1 to {NOISES}", field=field_path(path, "noise_count"))
    for name in ("noise", "sites", "where"):
        if not noise.HasField(name):
            raise MissingField("is required", field=field_path(path, name))
    prompt = context.message.prompt
    if not needs_text(noise.where):  # then the prompt need not be tokenised again
        prompt = types_pb2.Prompt(token_ids=types_pb2.TokenIds(ids=clean.prompt.token_ids))
    for number in range(count):
        source = replace_pb2.NoiseSource()
        source.CopyFrom(noise.noise)
        source.seed = (noise.noise.seed + number) % 2**64
        run = _run(context, prompt)
        run.steering.interventions.append(
            steering_pb2.Intervention(
                sites=noise.sites, where=noise.where, replace=replace_pb2.Replace(noise=source)
            )
        )
        yield run


def _run(context: _Context, prompt: types_pb2.Prompt) -> generation_service_pb2.GenerateRequest:
    """The request of a prompt under the sweep's steering.

    Its answers are asked for, and the rows that grades need are captured.
    """
    request = context.request
    return request_for(
        prompt,
        [grade.capture for grade in context.grades if grade.capture is not None],
        lora_name=request.lora_name,
        steering=request.steering if request.HasField("steering") else None,
        max_tokens=context.answers.longest,
    )


async def _columns(context: _Context, clean: AdmittedRequest) -> tuple[tuple[int, ...], ...]:
    """The positions of each column, in the clean prompt."""
    request, message, path = context.request, context.message, context.path
    manager = context.manager
    if len(message.groups) != len(request.group_labels):
        raise InvalidValue(
            f"{len(message.groups)} groups for {len(request.group_labels)} labels; give each "
            "label its positions, in every pair",
            field=field_path(path, "groups"),
        )
    selectors = [*message.groups]
    if request.HasField("where"):
        selectors.append(request.where)
    prompt = clean.prompt
    if any(map(needs_text, selectors)):
        prompt = await manager.prompts.decode(prompt)
    selection = SelectionContext(prompt, 1, manager.info.vocabulary)
    work = _TOKEN_BYTES * selection.prompt_len * max(1, len(selectors))
    paths = [f"{path}.groups[{index}]" for index in range(len(message.groups))]
    spans = await offload_plan(work, _spans, selectors, selection, paths or ["where"])
    context.room.take_columns(sum(map(length, spans)), path)
    columns = [_expanded(spans_of_column) for spans_of_column in spans]
    if request.group_labels:
        return tuple(columns)
    (where,) = columns or [tuple(range(selection.prompt_len))]
    validation.check_count(len(where), SWEEP_COLUMNS, "where", "columns")
    return tuple((position,) for position in where)


def _spans(
    selectors: Sequence[selector_pb2.Selector], context: SelectionContext, paths: Sequence[str]
) -> list[Spans]:
    """The positions that each selector selects in a prompt.

    Raises:
        InvalidArgument: a selector is malformed, or selects none.
    """
    found = []
    for selector, path in zip(selectors, paths, strict=False):
        spans = clipped(resolve_selector(selector, context, path).spans, 0, context.prompt_len)
        if not spans:
            raise InvalidPosition("no token of the prompt is selected", field=path)
        found.append(spans)
    return found


def _expanded(spans: Spans) -> tuple[int, ...]:
    return tuple(position for start, end in spans for position in range(start, end))


def _rename(error: RheostatError, path: str, grades: Sequence[Grade]) -> None:
    """Makes an error of a prompt's request name the fields of the sweep."""
    captured = [grade.path for grade in grades if grade.capture is not None]
    field = error.field
    for index, grade_path in enumerate(captured):
        if field.startswith(prefix := f"captures[{index}]"):
            error.field = grade_path + field.removeprefix(prefix)
            error.message = f"{path}: {error.message}"
            return
    if field.startswith(("text", "token_ids", "chat")):
        error.field = f"{path}.{field}"
    elif field.startswith("sampling"):
        error.field = path
    elif field.startswith("steering") and not path.endswith("noise"):
        error.message = f"{path}: {error.message}"
    elif not field.startswith(("lora_name", path)):
        error.field = path
