"""Answers: which tokens a sweep asks the model for, and what their probabilities say.

An answer is a set of token sequences. The probability of a sequence is the product of its tokens',
each given the prompt and the tokens before it. So a question is asked for each distinct pair of
preceding tokens and token; questions that several answers share are asked once.

The log-probability and the rank of a token are exact. Neither is looked up among the most likely
tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rheostat_engine.cached_property import cached_property
from rheostat_server import validation
from rheostat_server.errors import InvalidValue, MissingField
from rheostat_server.limits import ANSWER_ALTERNATIVES, ANSWER_TOKENS
from rheostat_server.sweeps.grades import Grade
from rheostat_server.validation import field_path
from rheostat_wire.v1 import sweep_pb2


class Question(NamedTuple):
    """How probable is a token after the prompt and some more tokens?"""

    preceding: tuple[int, ...]
    """Tokens of the answer before it."""
    token_id: int | None
    """None: the most likely one."""


_ANY = Question((), None)
"""Asked where no grade needs an answer."""


class Reading(NamedTuple):
    """The model's answer to a question."""

    logprob: float
    """Natural logarithm of the token's probability."""
    rank: int
    """1 for the most likely token."""
    top_token_id: int | None
    """The most likely token; None if the engine gives no likely tokens."""


Readings = Mapping[Question, Reading]

Answer = tuple[tuple[Question, ...], ...]
"""The questions about each token sequence, any of which is the answer."""


@dataclass(frozen=True)
class Answers:
    """The answers of a pair of prompts."""

    right: Answer
    """Empty if no grade needs it."""
    wrong: Answer
    """Empty if no grade needs it."""

    @cached_property
    def questions(self) -> tuple[Question, ...]:
        """Everything that the model must be asked, each once. The first is about the prompt."""
        questions = dict.fromkeys(
            question for sequence in (*self.right, *self.wrong) for question in sequence
        )
        return tuple(questions) or (_ANY,)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(map(len, (*self.right, *self.wrong)), default=1)

    def value(self, metric: sweep_pb2.Metric.ValueType, readings: Readings) -> float:
        """The value of a metric.

        Args:
            metric: one that these answers are complete for.
            readings: for each of `questions`.
        """
        if metric == sweep_pb2.METRIC_RANK:
            return float(min(readings[first].rank for first, *_ in self.right))
        right = _logprob(self.right, readings)
        if metric == sweep_pb2.METRIC_LOGIT_DIFFERENCE:
            # Both logits lack the same logarithm of a sum, so it cancels.
            return right - _logprob(self.wrong, readings)
        return math.exp(right) if metric == sweep_pb2.METRIC_PROBABILITY else right


def _questions(sequence: Sequence[int]) -> tuple[Question, ...]:
    return tuple([Question(tuple(sequence[:i]), token) for i, token in enumerate(sequence)])


def _logprob(answer: Answer, readings: Readings) -> float:
    """The logarithm of the summed probabilities of the answer's sequences."""
    logprobs = [sum([readings[question].logprob for question in questions]) for questions in answer]
    largest = max(logprobs)
    if len(logprobs) == 1 or largest == -math.inf:
        return largest
    return largest + math.log(sum(math.exp(logprob - largest) for logprob in logprobs))


def resolve_answers(
    pair: sweep_pb2.SweepPair, grades: Sequence[Grade], vocabulary: int, path: str
) -> Answers:
    """The answers of a pair.

    Raises:
        InvalidArgument: one is malformed, or a grade needs one that is missing.
    """
    right = _answer(pair.answer, vocabulary, field_path(path, "answer"))
    if all(grade.metric in (None, sweep_pb2.METRIC_KL) for grade in grades):
        return Answers((), ())
    if not right:
        raise MissingField("an answer is required", field=field_path(path, "answer"))
    wrong = _answer(pair.foil, vocabulary, field_path(path, "foil"))
    if all(grade.metric != sweep_pb2.METRIC_LOGIT_DIFFERENCE for grade in grades):
        return Answers(right, ())
    if not wrong:
        raise MissingField(
            "METRIC_LOGIT_DIFFERENCE needs a wrong answer", field=field_path(path, "foil")
        )
    return Answers(right, wrong)


def _answer(answer: sweep_pb2.Answer, vocabulary: int, path: str) -> Answer:
    path = field_path(path, "alternatives")
    validation.check_count(len(answer.alternatives), ANSWER_ALTERNATIVES, path, "alternatives")
    sequences = []
    for index, alternative in enumerate(answer.alternatives):
        field = f"{path}[{index}].ids"
        validation.check_count(len(alternative.ids), ANSWER_TOKENS, field, "tokens")
        validation.token_ids(alternative.ids, vocabulary, field)
        sequences.append(tuple(alternative.ids))
    if len(set(sequences)) < len(sequences):
        raise InvalidValue("an alternative may not be repeated", field=path)
    return tuple(map(_questions, sequences))
