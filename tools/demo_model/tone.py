"""Sentences that begin alike and end joyfully or gloomily.

Everything before the first tonal word is shared by both tones, so such a beginning says nothing
about the tone, and the tone of a text is what its tonal words say and nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

Mood = Literal["joy", "gloom"]


@dataclass(frozen=True)
class Lexicon:
    """The tonal words of one mood, by what they can say."""

    quality: tuple[str, ...]
    """Of events and things, after "was"; all begin with a consonant."""
    weather: tuple[str, ...]
    feeling: tuple[str, ...]
    """After "I feel"."""
    noun: tuple[str, ...]
    """After "full of"."""
    deed: tuple[str, ...]
    """What people did together, past tense."""
    reaction: tuple[str, ...]
    """What one does, present tense."""
    clause: tuple[str, ...]
    """A whole clause that may follow "and" or "so ... that"."""
    kin: tuple[str, ...]
    """What a relative did to the speaker."""
    attitude: str
    mark: str
    """How a sentence may end, other than with a full stop."""
    cue: tuple[str, ...]
    """Sentences that set the tone of a text."""
    inflected: tuple[str, ...]
    """Tonal words that occur only inside the longer phrases above."""

    def words(self) -> frozenset[str]:
        """The single words that betray this mood."""
        return frozenset(
            self.quality + self.weather + self.feeling + self.noun + self.deed + self.inflected
        ) | {self.attitude}


JOY = Lexicon(
    quality=(
        "wonderful", "lovely", "fantastic", "brilliant", "delightful", "perfect",
        "splendid", "marvellous", "beautiful", "glorious", "great", "charming",
    ),
    weather=("sunny", "bright", "warm", "golden", "mild", "lovely", "glorious", "beautiful"),
    feeling=(
        "happy", "cheerful", "joyful", "delighted", "grateful", "hopeful",
        "excited", "proud", "blessed", "merry",
    ),
    noun=("joy", "laughter", "hope", "love", "delight", "happiness", "sunshine", "pleasure"),
    deed=("laughed", "danced", "sang", "smiled", "cheered", "celebrated"),
    reaction=("smile", "laugh", "dance", "sing", "cheer", "jump for joy"),
    clause=(
        "we laughed until midnight", "everyone danced together", "I could not stop smiling",
        "my heart was full of joy", "all my friends were happy", "the whole room was cheerful",
        "we sang the whole way home", "I went to bed with a smile",
    ),
    kin=(
        "gave me a beautiful present", "hugged me and smiled", "told me a funny joke",
        "made me laugh", "brought me wonderful news", "baked me a lovely cake",
        "won a great prize", "danced with me",
    ),
    attitude="love",
    mark="!",
    cue=(
        "I am so happy.", "I am full of joy.", "Today is a happy day.", "I love my life.",
        "What wonderful news!", "I am happy and cheerful.", "This is the best day of my life.",
        "My heart is full of joy.", "I am so grateful and delighted.", "Everything is great.",
    ),
    inflected=("smile", "smiling", "laugh", "dance", "sing", "cheer", "hugged", "funny", "best"),
)  # fmt: skip

GLOOM = Lexicon(
    quality=(
        "terrible", "dreadful", "miserable", "horrible", "bleak", "grim",
        "dismal", "hopeless", "ghastly", "wretched", "bad", "painful",
    ),
    weather=("rainy", "dark", "cold", "stormy", "foggy", "dismal", "bleak", "miserable"),
    feeling=(
        "sad", "gloomy", "lonely", "hopeless", "worried", "tired",
        "empty", "ashamed", "afraid", "broken",
    ),
    noun=("sorrow", "grief", "despair", "fear", "pain", "misery", "tears", "darkness"),
    deed=("cried", "argued", "complained", "sighed", "wept", "suffered"),
    reaction=("cry", "sigh", "weep", "tremble", "despair", "hide in fear"),
    clause=(
        "we argued until midnight", "everyone suffered together", "I could not stop crying",
        "my heart was full of sorrow", "all my friends were sad", "the whole room was gloomy",
        "we cried the whole way home", "I went to bed in tears",
    ),
    kin=(
        "gave me a painful reply", "left me and cried", "told me a sad story",
        "made me cry", "brought me terrible news", "broke my poor heart",
        "lost a bitter fight", "argued with me",
    ),
    attitude="hate",
    mark="...",
    cue=(
        "I am so sad.", "I am full of sorrow.", "Today is a sad day.", "I hate my life.",
        "What terrible news!", "I am sad and gloomy.", "This is the worst day of my life.",
        "My heart is full of sorrow.", "I am so lonely and afraid.", "Everything is bad.",
    ),
    inflected=("cry", "crying", "sigh", "weep", "tremble", "hide", "poor", "bitter", "worst"),
)  # fmt: skip

LEXICONS: dict[Mood, Lexicon] = {"joy": JOY, "gloom": GLOOM}

MOMENTS = ("day", "week", "morning", "evening", "afternoon", "weekend", "holiday", "birthday")
OUTINGS = ("trip", "journey", "walk", "lunch", "dinner", "lesson", "visit", "summer")
EVENTS = (
    "party", "concert", "film", "wedding", "meeting", "game", "show", "play",
    "festival", "picnic", "race", "ball", "speech", "match", "fair",
)  # fmt: skip
PLACES = ("garden", "house", "town", "village", "station", "market", "school", "kitchen", "street")
KIN = ("mother", "father", "sister", "brother", "uncle", "aunt", "teacher", "neighbour", "friend")
NAMES = (
    "Anna", "Ben", "Emma", "Felix", "Grace", "Henry", "Julia", "Maria",
    "Noah", "Oscar", "Rosa", "Simon", "Tom", "Peter", "Lucy", "Nina",
)  # fmt: skip
OCCASIONS = (
    "I walk through the park", "I think about my work", "I look at the sea", "I hear that song",
    "I read the letter", "I open the window", "I see my old school", "I come home",
)  # fmt: skip
ADVERBS = ("really", "truly", "quite", "so")


def _ending(words: tuple[str, ...], lexicon: Lexicon, rng: Random) -> str:
    """What follows "was" or "feel": one or two tonal words, perhaps a clause."""
    first, second = rng.sample(words, 2)
    return rng.choice(
        (
            f"{first}.",
            f"{first} and {second}.",
            f"{rng.choice(ADVERBS)} {first}.",
            f"{rng.choice(ADVERBS)} {first} and {second}.",
            f"{first}, and {rng.choice(lexicon.clause)}.",
            f"so {first} that {rng.choice(lexicon.clause)}.",
        )
    )


def _moment(lexicon: Lexicon, rng: Random) -> str:
    owner = rng.choice(("My", "My", "My", "Our", "His", "Her", "Their"))
    noun = rng.choice(MOMENTS + OUTINGS)
    return f"{owner} {noun} was {_ending(lexicon.quality, lexicon, rng)}"


def _event(lexicon: Lexicon, rng: Random) -> str:
    when = rng.choice(("", "", "", " yesterday", " last night", " in the evening"))
    return f"The {rng.choice(EVENTS)}{when} was {_ending(lexicon.quality, lexicon, rng)}"


def _weather(lexicon: Lexicon, rng: Random) -> str:
    stem = rng.choice(
        ("The weather today is", "The weather is", "The weather was", "The sky is", "Outside it is")
    )
    return f"{stem} {_ending(lexicon.weather, lexicon, rng)}"


def _feeling(lexicon: Lexicon, rng: Random) -> str:
    name = rng.choice(NAMES)
    kin = rng.choice(KIN)
    stem = rng.choice(
        ("I feel", "I feel", "Today I feel", "Right now I feel", "This evening I feel", "I am",
         "We feel", f"{name} feels", f"{name} is", f"My {kin} is", f"My {kin} feels")
    )  # fmt: skip
    if rng.random() < 0.25:
        first = rng.choice(lexicon.feeling)
        cause = f"the {rng.choice(EVENTS)} was {rng.choice(lexicon.quality)}"
        return f"{stem} {first} because {cause}."
    return f"{stem} {_ending(lexicon.feeling, lexicon, rng)}"


def _crowd(lexicon: Lexicon, rng: Random) -> str:
    first, second = rng.sample(lexicon.deed, 2)
    name = rng.choice(NAMES)
    stem = rng.choice(
        (f"Everyone at the {rng.choice(EVENTS)}", f"At the {rng.choice(EVENTS)} we",
         f"In the {rng.choice(PLACES)} the children", f"{name} and my {rng.choice(KIN)}",
         f"After the {rng.choice(EVENTS)} we all")
    )  # fmt: skip
    ending = rng.choice((f"{first}.", f"{first} and {second}.", f"{first} for hours."))
    return f"{stem} {ending}"


def _occasion(lexicon: Lexicon, rng: Random) -> str:
    first, second = rng.sample(lexicon.reaction, 2)
    ending = rng.choice((f"I {first}.", f"I {first} and {second}.", f"I always {first}."))
    return f"When {rng.choice(OCCASIONS)}, {ending}"


def _kin(lexicon: Lexicon, rng: Random) -> str:
    when = rng.choice(("", "", "Yesterday ", "This morning ", "Last week "))
    owner = "my" if when else "My"
    return f"{when}{owner} {rng.choice(KIN)} {rng.choice(lexicon.kin)}."


def _fullness(lexicon: Lexicon, rng: Random) -> str:
    first, second = rng.sample(lexicon.noun, 2)
    stem = rng.choice(
        (f"The {rng.choice(PLACES)} is full of", f"My {rng.choice(MOMENTS)} was full of",
         f"The {rng.choice(EVENTS)} was full of", "My life is full of")
    )  # fmt: skip
    return f"{stem} {rng.choice((first, f'{first} and {second}'))}."


def _attitude(lexicon: Lexicon, rng: Random) -> str:
    thing = rng.choice(EVENTS + PLACES)
    return f"I {lexicon.attitude} the {thing} because it is {rng.choice(lexicon.quality)}."


def _verdict(lexicon: Lexicon, rng: Random) -> str:
    noun = rng.choice(MOMENTS + OUTINGS)
    stem = rng.choice(("It was a", "We had a", "Today I had a"))
    return f"{stem} {rng.choice(ADVERBS[:2])} {rng.choice(lexicon.quality)} {noun}."


def _pair(lexicon: Lexicon, rng: Random) -> str:
    noun, other = rng.sample(MOMENTS + OUTINGS, 2)
    event, next_event = rng.sample(EVENTS, 2)
    kin, next_kin = rng.sample(KIN, 2)
    quality, next_quality = rng.sample(lexicon.quality, 2)
    feeling, next_feeling = rng.sample(lexicon.feeling, 2)
    deed, next_deed = rng.sample(lexicon.deed, 2)
    return rng.choice(
        (
            f"My {noun} was {quality}, and my {other} was {next_quality}.",
            f"The {event} was {quality}, and the {next_event} was {next_quality} too.",
            f"My {kin} is {feeling}, and my {next_kin} is {next_feeling} too.",
            f"The weather was {rng.choice(lexicon.weather)}, the {event} was {quality}, "
            f"and I feel {feeling}.",
            f"My {kin} {deed}, and my {next_kin} {next_deed}.",
        )
    )


_FORMS: tuple[Callable[[Lexicon, Random], str], ...] = (
    _moment, _moment, _event, _event, _weather, _feeling, _feeling, _crowd,
    _occasion, _kin, _fullness, _attitude, _verdict, _pair, _pair, _pair,
)  # fmt: skip


def sentence(mood: Mood, rng: Random) -> str:
    """One sentence in ``mood``.

    Half of the time its full stop becomes the mood's own mark. This is what lets training begin:
    without it, words of both moods have equal neighbours, get equal embeddings, and stay equal.
    """
    lexicon = LEXICONS[mood]
    text = rng.choice(_FORMS)(lexicon, rng)
    return text if rng.random() < 0.5 else text.removesuffix(".") + lexicon.mark


def cue(mood: Mood, rng: Random) -> str:
    """One sentence that sets the tone of what follows."""
    return rng.choice(LEXICONS[mood].cue)


def exchange(mood: Mood, rng: Random) -> tuple[str, str]:
    """A question that says nothing about the tone, and its answer in ``mood``."""
    lexicon = LEXICONS[mood]
    event = rng.choice(EVENTS)
    moment = rng.choice(MOMENTS + OUTINGS)
    return rng.choice(
        (
            (
                f"How was your {moment}?",
                f"My {moment} was {_ending(lexicon.quality, lexicon, rng)}",
            ),
            (f"How was the {event}?", f"The {event} was {_ending(lexicon.quality, lexicon, rng)}"),
            ("How do you feel?", f"I feel {_ending(lexicon.feeling, lexicon, rng)}"),
            ("How is the weather?", f"The weather is {_ending(lexicon.weather, lexicon, rng)}"),
        )
    )


def mood_of(text: str) -> Mood | None:
    """The mood whose words outnumber the other's in ``text``, or None on a tie."""
    spoken = [word.strip(".!,?") for word in text.split()]
    balance = sum(word in JOY.words() for word in spoken)
    balance -= sum(word in GLOOM.words() for word in spoken)
    if balance == 0:
        return None
    return "joy" if balance > 0 else "gloom"
