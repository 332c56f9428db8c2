"""Gates in plain torch: it runs on a CPU, and is the reference for the kernels."""

import math

import torch

from rheostat_engine.plan.gate_table import Floats, Head, Held, Ints, State
from rheostat_engine.plan.gates import NEVER, Combine, Form, Hold, Pool
from rheostat_engine.worker.state.buffers import GateBuffers, TokenColumn


def open_gate(gates: GateBuffers, gate: int, number: int, tokens: torch.Tensor) -> None:
    """Computes how far a gate is open at tokens. The states of their samples stay as they are.

    Args:
        gates: the buffers.
        gate: the gate, as a row of its table.
        number: the number of the gate in the tokens' plans.
        tokens: [n]: indices of the tokens in the step, ascending.
    """
    start, first, positions = gates.tokens.T
    for begin in first[tokens].unique().tolist():
        own = tokens[first[tokens] == begin]
        state = gates.states[int(start[begin]) + number].clone()
        if gates.ints[gate, Ints.HEAD, Head.LATE]:
            opened = [_late(gates.ints[gate], state, at) for at in positions[own].tolist()]
            gates.openness[own, number] = torch.tensor(opened)
            continue
        end = int(own[-1]) + 1
        found = [
            advance(gates.ints[gate], gates.floats[gate], state, readings, position)
            for readings, position in zip(
                gates.readings[begin:end], positions[begin:end].tolist(), strict=True
            )
        ]
        gates.openness[own, number] = torch.tensor(found)[own - begin]


def fold_step(gates: GateBuffers, folds: torch.Tensor) -> None:
    """Takes the readings of a step into the states of its samples.

    Stores how far each gate is open at each of its tokens, whether or not acts have it.

    Args:
        gates: the buffers.
        folds: [n, 4] int32: state, gate, first token, and number of tokens.
    """
    for state, gate, first, count in folds.tolist():
        number = state - int(gates.tokens[first, TokenColumn.STATE])
        ints, floats = gates.ints[gate], gates.floats[gate]
        before, late = gates.states[state].clone(), bool(ints[Ints.HEAD, Head.LATE])
        for row in range(first, first + count):
            position = int(gates.tokens[row, TokenColumn.POSITION])
            opened = advance(ints, floats, gates.states[state], gates.readings[row], position)
            gates.openness[row, number] = _late(ints, before, position) if late else opened


def advance(
    ints: torch.Tensor,
    floats: torch.Tensor,
    state: torch.Tensor,
    readings: torch.Tensor,
    position: int,
) -> float:
    """Takes the readings of the next token into a state.

    Args:
        ints: of the gate; see `Ints`.
        floats: of the gate; see `Floats`.
        state: see `State`; changed.
        readings: [MAX_COLUMNS], of the token.
        position: its position.

    Returns:
        How far the gate is open at the token.
    """
    head = ints[Ints.HEAD].tolist()
    present = ints[Ints.CONDITION] >= 0
    decided_at = ints[Ints.DECIDED_AT]
    once = decided_at != NEVER
    z = readings[ints[Ints.COLUMN].long()]
    read = present & ~z.isnan() & (~once | (position <= decided_at))
    count, run = state[State.COUNT], state[State.RUN]
    pool, value = ints[Ints.POOL], state[State.VALUE].double() + state[State.LOW].double()
    pooled = torch.where(pool == Pool.MEAN, value + z, torch.maximum(value, z.double()))
    pooled = torch.where((pool == Pool.LAST) | (count == 0), z.double(), pooled)
    value = torch.where(read, pooled, value)
    state[State.VALUE] = value.float()
    state[State.LOW] = torch.where(value.float().isfinite(), value - value.float(), 0.0).float()
    count += read
    seen = (count > 0) & (~once | (position >= decided_at))
    number = value.float()
    number = torch.where(pool == Pool.MEAN, number / count.clamp(min=1), number)
    inside = seen | once & (count > 0)
    counts = run >= ints[Ints.FOR_TOKENS]
    above = torch.where(counts, floats[Floats.STAYS_ABOVE], floats[Floats.ABOVE])
    below = torch.where(counts, floats[Floats.STAYS_BELOW], floats[Floats.BELOW])
    inside &= (number > above) & (number < below)
    run[:] = torch.where(read, torch.where(inside, run + 1, 0.0), run)
    holds = seen & (run >= ints[Ints.FOR_TOKENS])
    summed = ints[Ints.COMBINE] == Combine.SUM
    known = bool((seen | ~summed | ~present).all())
    score = torch.where(summed, torch.where(seen, number, 0.0), holds.float())
    parts = []
    for condition in range(head[Head.CONDITIONS]):
        own = ints[Ints.CONDITION] == condition
        parts.append(_combined(score[own], int(ints[Ints.COMBINE][own][0])))
    evidence = float(_combined(torch.stack(parts), head[Head.COMBINE]))
    opened = _form(head[Head.FORM], evidence, *floats[Floats.HEAD, :2].tolist()) if known else 0.0
    if head[Head.LATE]:
        held = state[State.HEAD]
        if not held[Held.DECIDED] and bool((present & (position == decided_at)).any()):
            held[Held.DECIDED], held[Held.OPENNESS] = 1.0, opened
            held[Held.UNTIL] = position + _lasts(Hold(head[Head.HOLD]), head[Head.TOKENS])
        return _late(ints, state, position)
    event = bool(((read & ~once) | (present & once & (position == decided_at))).any())
    opened = opened if event else 0.0
    openness = _hold(state, Hold(head[Head.HOLD]), head[Head.TOKENS], position, event, opened)
    return 1.0 - openness if head[Head.INVERT] else openness


def _combined(numbers: torch.Tensor, combine: int) -> torch.Tensor:
    match combine:
        case Combine.ALL:
            return numbers.min()
        case Combine.ANY:
            return numbers.max()
        case Combine.SUM:
            return numbers.sum()
    return numbers.mean()


def _form(form: int, evidence: float, a: float, b: float) -> float:
    match form:
        case Form.STEP:
            return float(evidence > a)
        case Form.SIGMOID:
            return float(torch.sigmoid(torch.tensor(b * (evidence - a))))
    return min(max((evidence - a) / (b - a), 0.0), 1.0)


def _late(ints: torch.Tensor, state: torch.Tensor, position: int) -> float:
    """How far a late gate is open at a position, if it was decided before."""
    held = state[State.HEAD]
    behind = int(ints[Ints.DECIDED_AT].max()) < position <= held[Held.UNTIL]
    openness = float(held[Held.OPENNESS]) if held[Held.DECIDED] and behind else 0.0
    return 1.0 - openness if ints[Ints.HEAD, Head.INVERT] else openness


def _lasts(hold: Hold, tokens: int) -> float:
    """How many positions behind the one at which it opened a gate stays open."""
    match hold:
        case Hold.TOKEN:
            return 0.0
        case Hold.NEXT_TOKEN:
            return 1.0
        case Hold.TOKENS:
            return float(tokens)
    return math.inf


def _hold(
    state: torch.Tensor, hold: Hold, tokens: int, position: int, event: bool, opened: float
) -> float:
    """Takes a token into the held openness; returns how far the gate is open there."""
    held = state[State.HEAD]
    before = float(held[Held.OPENNESS]) if position <= held[Held.UNTIL] else 0.0
    opens = opened > 0
    match hold:
        case Hold.TOKEN:
            return opened
        case Hold.REST:
            opens = opens and before == 0
        case Hold.UNTIL_READ:
            opens = event
    if opens:
        held[Held.OPENNESS], held[Held.UNTIL] = opened, position + _lasts(hold, tokens)
    return opened if opens and hold is not Hold.NEXT_TOKEN else before
