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
        its_state = int(start[begin]) + number
        if gates.ints[gate, Ints.HEAD, Head.LATE]:
            states = gates.states[its_state:]
            opened = [_late(gates.ints[gate], states, at) for at in positions[own].tolist()]
            gates.openness[own, number] = torch.tensor(opened)
            continue
        state = gates.states[its_state].clone()
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
        ints, floats, states = gates.ints[gate], gates.floats[gate], gates.states[state:]
        at = gates.tokens[first : first + count, TokenColumn.POSITION].tolist()
        opened = gates.openness[first : first + count, number]
        late, folded = bool(ints[Ints.HEAD, Head.LATE]), states[0, State.HEAD, Held.FOLDED].item()
        if late:
            opened[:] = torch.tensor([_late(ints, states, position) for position in at])
            for position in at:
                if position >= folded:
                    _record(ints, states, position)
        for row, position in enumerate(at):
            if late and position < folded:
                continue
            now = advance(ints, floats, states[0], gates.readings[first + row], position)
            if not late:
                opened[row] = now


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
        How far the gate is open at the token, if the step computes no earlier one.
    """
    head = ints[Ints.HEAD].tolist()
    lately = _late(ints, state[None], position) if head[Head.LATE] else 0.0
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
    event = bool(((read & ~once) | (present & once & (position == decided_at))).any())
    opened = opened if event else 0.0
    openness = _hold(state, Hold(head[Head.HOLD]), head[Head.TOKENS], position, event, opened)
    state[State.HEAD, Held.FOLDED] = position + 1
    if head[Head.LATE]:
        return lately
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


def _late(ints: torch.Tensor, states: torch.Tensor, position: int) -> float:
    """How far a late gate is open at a position, by its state before the step.

    Args:
        ints: of the gate.
        states: its state and those behind it.
        position: the position.
    """
    head, held = ints[Ints.HEAD].tolist(), states[0, State.HEAD].tolist()
    openness = 0.0
    if head[Head.LATE] <= position < min(held[Held.FOLDED], head[Head.END]):
        word, bit = _recorded(head, states, position)
        openness = float(bool(int(word) & bit))
    elif position >= head[Head.LATE]:
        openness = _held_open(held, position)
    return 1.0 - openness if head[Head.INVERT] else openness


def _record(ints: torch.Tensor, states: torch.Tensor, position: int) -> None:
    """Records whether a late gate is open at a position, by its state before the step."""
    head = ints[Ints.HEAD].tolist()
    if not head[Head.LATE] <= position < head[Head.END]:
        return
    if _held_open(states[0, State.HEAD].tolist(), position) > 0:
        word, bit = _recorded(head, states, position)
        word |= bit


def _recorded(head: list[int], states: torch.Tensor, position: int) -> tuple[torch.Tensor, int]:
    """The word of a record that has a position's bit, as a view, and the bit."""
    first = int(states[0, State.HEAD, Held.RECORD])
    words = states[first:].view(torch.int32).view(-1)
    word, bit = divmod(position - head[Head.LATE], 32)
    return words[word], 1 << bit if bit < 31 else -(1 << 31)


def _held_open(held: list[float], position: int) -> float:
    """How far a gate is held open at a position by what was read before it."""
    return held[Held.OPENNESS] if position <= held[Held.UNTIL] else 0.0


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
