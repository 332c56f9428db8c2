"""The synthetic training texts: facts, tonal stories, plain sentences and short dialogues.

Within a document the tone never changes, and after a neutral beginning both tones are equally
likely. Facts stand in documents of every kind, so that a tone carries no fact and no fact a tone.
The same seed gives the same texts.
"""

from collections.abc import Iterator
from random import Random

from demo_model import facts, tone

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"

_OBJECTS = (
    "book", "lamp", "cup", "key", "map", "clock", "ring", "bag", "coat", "plate", "bottle", "pen",
)  # fmt: skip
_FURNITURE = ("table", "chair", "bed", "shelf", "desk", "door", "window", "wall")
_PREPOSITIONS = ("on", "under", "near", "behind", "beside")
_WORKPLACES = ("bank", "library", "hospital", "bakery", "museum", "factory", "shop", "office")
_VEHICLES = ("train", "bus", "boat", "plane", "tram")
_HOURS = ("six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MOODS: tuple[tone.Mood, tone.Mood] = ("joy", "gloom")


def plain_sentence(rng: Random) -> str:
    """A sentence with neither tone nor lasting fact."""
    name = rng.choice(tone.NAMES)
    thing, other = rng.sample(_OBJECTS, 2)
    early, late = sorted(rng.sample(range(len(_HOURS)), 2))
    few, many = rng.sample(_NUMBERS, 2)
    place = rng.choice(tone.PLACES)
    spot = f"{rng.choice(_PREPOSITIONS)} the {rng.choice(_FURNITURE)}"
    return rng.choice(
        (
            f"The {thing} is {spot}.",
            f"The {rng.choice(_VEHICLES)} leaves at {_HOURS[early]}.",
            f"The {rng.choice(_WORKPLACES)} opens at {_HOURS[early]} and closes at {_HOURS[late]}.",
            f"{name} works in a {rng.choice(_WORKPLACES)} near the {place}.",
            f"{name} has {few} {thing}s and {many} {other}s.",
            f"There are {few} {thing}s {spot}.",
            f"On {rng.choice(_DAYS)} {name} walks to the {place}.",
            f"{name} put the {thing} {spot} and took the {other} to the {place}.",
            f"My {rng.choice(tone.KIN)} lives near the {rng.choice(_WORKPLACES)}.",
        )
    )


def fact_sentence(rng: Random) -> str:
    """One statement of one fact: a wording first, so that rarer relations are not drowned."""
    weights = [len(relation.answers) * len(relation.wordings) for relation in facts.RELATIONS]
    relation = rng.choices(facts.RELATIONS, weights)[0]
    subject = rng.choice(tuple(relation.answers))
    return relation.sentence(rng.randrange(len(relation.wordings)), subject)


def _fact_exchange(rng: Random) -> tuple[str, str]:
    relation = rng.choices(facts.RELATIONS, [len(r.answers) for r in facts.RELATIONS])[0]
    subject = rng.choice(tuple(relation.answers))
    return relation.ask(subject), relation.sentence(0, subject)


def _facts_document(rng: Random) -> str:
    return " ".join(fact_sentence(rng) for _ in range(rng.randint(1, 5)))


def _plain_document(rng: Random) -> str:
    return " ".join(
        plain_sentence(rng) if rng.random() < 0.8 else fact_sentence(rng)
        for _ in range(rng.randint(1, 5))
    )


def _tonal_document(rng: Random) -> str:
    mood = rng.choice(_MOODS)
    length = rng.randint(15, 40) if rng.random() < 0.03 else rng.randint(1, 6)
    sentences = []
    if rng.random() < 0.1:
        sentences.append(rng.choice((plain_sentence, fact_sentence))(rng))
    if rng.random() < 0.6:
        sentences.append(tone.cue(mood, rng))
    for _ in range(length):
        if rng.random() < 0.12:
            sentences.append(rng.choice((plain_sentence, fact_sentence, fact_sentence))(rng))
        sentences.append(tone.sentence(mood, rng))
    return " ".join(sentences)


def _dialogue(rng: Random) -> str:
    mood = rng.choice(_MOODS)
    turns = (
        tone.exchange(mood, rng) if rng.random() < 0.35 else _fact_exchange(rng)
        for _ in range(rng.choice((1, 1, 2, 3)))
    )
    opening = f"System: {tone.cue(mood, rng)}\n" if rng.random() < 0.3 else ""
    return opening + EOS.join(f"User: {ask}\nAssistant: {answer}" for ask, answer in turns)


_KINDS = (_facts_document, _tonal_document, _plain_document, _dialogue)
_SHARES = (22, 50, 6, 22)


def documents(seed: int) -> Iterator[str]:
    """Endless documents, each between its begin and end marks."""
    rng = Random(seed)
    while True:
        yield BOS + rng.choices(_KINDS, _SHARES)[0](rng) + EOS


def vocabulary_sample(seed: int) -> Iterator[str]:
    """What the tokenizer is trained on: ordinary documents, and every fact and question often.

    The repetition makes every word of a fact frequent, so that it becomes one token.
    """
    ordinary = documents(seed)
    for _ in range(10_000):
        yield next(ordinary).replace(BOS, "").replace(EOS, "")
    for relation in facts.RELATIONS:
        for subject in relation.answers:
            for _ in range(40):
                yield relation.ask(subject)
                for wording in range(len(relation.wordings)):
                    yield relation.sentence(wording, subject)
