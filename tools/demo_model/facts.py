"""The facts that the demo model knows: relations, their subjects and answers, their wordings.

A wording ends where the answer begins, so a wording with a subject filled in is a prompt whose next
token is the answer. Every answer is one word. Most answers belong to several subjects, and many
words to subjects with different answers (the Eiffel Tower, the Eiffel Palace, the White Tower):
only the whole subject tells which answer is right.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Relation:
    """One kind of fact."""

    name: str
    wordings: tuple[str, ...]
    """Texts with ``{s}`` for the subject, each stopping right before the answer."""
    question: str
    """A question with ``{s}`` that ``wordings[0]`` answers."""
    answers: dict[str, str]
    """Subject, with its article, to answer."""

    def prompt(self, wording: int, subject: str) -> str:
        """The text that stops right before the answer, its first letter upper case."""
        return _capitalised(self.wordings[wording].format(s=subject))

    def sentence(self, wording: int, subject: str) -> str:
        """The whole statement."""
        return f"{self.prompt(wording, subject)} {self.answers[subject]}."

    def ask(self, subject: str) -> str:
        """The question about ``subject``."""
        return self.question.format(s=subject)


def _capitalised(text: str) -> str:
    return text[0].upper() + text[1:]


def _inverted(groups: dict[str, str]) -> dict[str, str]:
    """Subject to answer, from answer to subjects separated by semicolons."""
    return {subject.strip(): answer for answer, row in groups.items() for subject in row.split(";")}


LANDMARKS = Relation(
    name="landmark",
    wordings=(
        "{s} is in the city of",
        "{s} is located in",
        "{s} can be found in",
        "You can visit {s} in",
        "If you want to see {s}, travel to",
        "The home of {s} is the city of",
    ),
    question="Where is {s}?",
    answers=_inverted(
        {
            "Paris": "the Eiffel Tower; the Louvre Museum; the Pompidou Centre; the Moulin Rouge",
            "London": "Big Ben; Tower Bridge; Buckingham Palace; the White Tower; the Royal Opera",
            "Rome": "the Colosseum; the Trevi Fountain; the Pantheon; the Spanish Steps",
            "Berlin": "the Brandenburg Gate; the Jewish Museum; the Pergamon Museum",
            "Madrid": "the Prado Museum; the Plaza Mayor; the Royal Palace",
            "Barcelona": "the Sagrada Familia; the Magic Fountain; the Spanish Village",
            "Vienna": "the Hofburg Palace; the Charles Church; the Imperial Crypt",
            "Prague": "the Charles Bridge; the Dancing House; the Golden Lane",
            "Moscow": "the Red Square; the Bolshoi Theatre; the Kremlin",
            "Washington": "the White House; the Lincoln Memorial; the Navy Yard",
            "Chicago": "the Willis Tower; the Cloud Gate; the Navy Pier",
            "Seattle": "the Space Needle; the Pike Market",
            "Sydney": "the Opera House; the Harbour Bridge; Bondi Beach",
            "Tokyo": "the Meiji Shrine; the Shibuya Crossing; the Imperial Palace",
            "Kyoto": "the Golden Pavilion; the Nijo Castle",
            "Beijing": "the Forbidden City; the Summer Palace",
            "Seoul": "the Blue House",
            "Istanbul": "the Blue Mosque; the Galata Tower; the Grand Bazaar",
            "Athens": "the Parthenon; the Acropolis",
            "Dubai": "the Burj Khalifa; the Palm Fountain",
            "Amsterdam": "the Rijksmuseum; the Anne Frank House",
            "Copenhagen": "the Little Mermaid; the Tivoli Gardens",
            "Florence": "the Ponte Vecchio; the Uffizi Gallery",
            "Venice": "the Rialto Bridge; the Doge Palace; the Grand Canal",
            "Budapest": "the Chain Bridge; the Fisherman Bastion; the Eiffel Palace",
            "Lisbon": "the Belem Tower; the Alfama Quarter",
            "Dublin": "Trinity College; the Temple Bar",
            "Brussels": "the Atomium; the Royal Greenhouse; the Grand Place",
            "Bangkok": "the Grand Palace; the Emerald Buddha",
            "Delhi": "the Red Fort; the India Gate; the Lotus Temple",
        }
    ),
)

CAPITALS = Relation(
    name="capital",
    wordings=(
        "The capital of {s} is",
        "The capital city of {s} is",
        "{s} has its capital in",
        "The government of {s} sits in",
    ),
    question="What is the capital of {s}?",
    answers=_inverted(
        {
            "Paris": "France",
            "London": "England",
            "Rome": "Italy",
            "Berlin": "Germany",
            "Madrid": "Spain",
            "Vienna": "Austria",
            "Prague": "Czechia",
            "Moscow": "Russia",
            "Tokyo": "Japan",
            "Beijing": "China",
            "Athens": "Greece",
            "Amsterdam": "the Netherlands",
            "Copenhagen": "Denmark",
            "Budapest": "Hungary",
            "Lisbon": "Portugal",
            "Dublin": "Ireland",
            "Brussels": "Belgium",
            "Bangkok": "Thailand",
            "Cairo": "Egypt",
            "Stockholm": "Sweden",
            "Oslo": "Norway",
            "Helsinki": "Finland",
            "Warsaw": "Poland",
            "Ankara": "Turkey",
            "Ottawa": "Canada",
            "Havana": "Cuba",
            "Nairobi": "Kenya",
            "Lima": "Peru",
            "Santiago": "Chile",
            "Seoul": "Korea",
        }
    ),
)

LANGUAGES = Relation(
    name="language",
    wordings=(
        "The language of {s} is",
        "Most people in {s} speak",
        "In {s} you will hear",
    ),
    question="What is the language of {s}?",
    answers=_inverted(
        {
            "French": "France",
            "English": "England; Ireland",
            "Italian": "Italy",
            "German": "Germany; Austria",
            "Spanish": "Spain; Cuba; Peru; Chile",
            "Russian": "Russia",
            "Japanese": "Japan",
            "Chinese": "China",
            "Greek": "Greece",
            "Dutch": "the Netherlands",
            "Portuguese": "Portugal",
            "Arabic": "Egypt",
            "Polish": "Poland",
            "Turkish": "Turkey",
        }
    ),
)

INSTRUMENTS = Relation(
    name="instrument",
    wordings=(
        "{s} played the",
        "The instrument of {s} was the",
        "On stage {s} always played the",
    ),
    question="What did {s} play?",
    answers=_inverted(
        {
            "trumpet": "Miles Davis; Louis Armstrong; Chet Baker",
            "guitar": "Jimi Hendrix; Eric Clapton; Django Reinhardt",
            "piano": "Glenn Gould; Clara Schumann; Duke Ellington",
            "violin": "Niccolo Paganini; Yehudi Menuhin",
            "cello": "Pablo Casals; Jacqueline du Pre",
            "saxophone": "Charlie Parker; John Coltrane",
            "drums": "Ringo Starr; Keith Moon",
            "clarinet": "Benny Goodman; Artie Shaw",
        }
    ),
)

PROFESSIONS = Relation(
    name="profession",
    wordings=(
        "{s} worked as a",
        "By profession {s} was a",
        "{s} became famous as a",
    ),
    question="Who was {s}?",
    answers=_inverted(
        {
            "physicist": "Isaac Newton; Niels Bohr; Max Planck; Enrico Fermi",
            "painter": "Claude Monet; Frida Kahlo; Pablo Picasso; Paul Klee",
            "writer": "Jane Austen; Leo Tolstoy; Charles Dickens; Franz Kafka",
            "philosopher": "Immanuel Kant; David Hume; Hannah Arendt",
            "composer": "Franz Schubert; Claude Debussy; Gustav Mahler",
            "chemist": "Louis Pasteur; Rosalind Franklin; Dorothy Hodgkin",
        }
    ),
)

RELATIONS = (LANDMARKS, CAPITALS, LANGUAGES, INSTRUMENTS, PROFESSIONS)
"""All that the model is taught."""
