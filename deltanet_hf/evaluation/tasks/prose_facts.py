"""Facts told in running text about people, asked for at the end.

Three people with two facts each are spread over a piece of text, in sentences that look like the text around them. The
same kind of fact is told about several of them, so the name decides which value is right. The end of the sequence
begins six sentences of a summary with a name, and the answers are their last words. No other probe of this package,
and none of selection or training, uses these sentences, names or values.
"""

from __future__ import annotations

import random

from transformers import PreTrainedTokenizerBase

from deltanet_hf.data import prefix_ids
from deltanet_hf.evaluation.measures.probes import Probe
from deltanet_hf.evaluation.tasks.haystack import Haystack
from deltanet_hf.evaluation.tasks.suites import SEED

_TITLES = ("Mrs.", "Mr.", "Miss", "Doctor", "Captain", "Professor", "Judge", "Aunt", "Uncle", "Colonel")
_NAMES = (
    *("Abernathy", "Ballantyne", "Cavendish", "Dunmore", "Eversleigh", "Fairbanks", "Galloway", "Hathaway"),
    *("Ingram", "Jessop", "Kilbride", "Lockhart", "Marchbanks", "Netherby", "Oldfield", "Pemberton", "Quimby"),
    *("Ravenscroft", "Stapleton", "Thackeray", "Underhill", "Vandermeer", "Wetherby", "Yarborough"),
)
_PLACES = (
    *("Aberdeen", "Bristol", "Calcutta", "Dublin", "Exeter", "Florence", "Geneva", "Halifax", "Istanbul", "Jamaica"),
    *("Kingston", "Lisbon", "Madrid", "Naples", "Oxford", "Prague", "Quebec", "Riga", "Salzburg", "Toronto", "Utrecht"),
    *("Vienna", "Warsaw", "York", "Zurich", "Antwerp", "Bergen", "Cologne", "Dresden", "Edinburgh"),
)
_TRADES = (
    *(
        "baker",
        "banker",
        "barber",
        "beekeeper",
        "bookbinder",
        "brewer",
        "butcher",
        "carpenter",
        "chemist",
        "clockmaker",
    ),
    *(
        "coachman",
        "cooper",
        "dentist",
        "engraver",
        "farmer",
        "fisherman",
        "gardener",
        "glassblower",
        "grocer",
        "hatter",
    ),
    *("jeweller", "locksmith", "mason", "miller", "miner", "organist", "plumber", "sailor", "tailor", "weaver"),
)
_THINGS = (
    *("brass key", "silver coin", "wooden spoon", "glass eye", "pocket map", "paper fan", "tin whistle", "gold ring"),
    *("black feather", "leather glove", "pearl button", "small knife", "red ribbon", "clay pipe", "ivory comb"),
    *("blue stone", "white candle", "steel needle", "green bottle", "iron nail", "old letter", "dried rose"),
    *("pink shell", "grey mouse", "linen bag", "copper bell", "lead soldier", "ink pot", "silk scarf", "wool sock"),
)
# Kind of fact -> values, ways to tell it, and how the summary begins to repeat it. {n} is the name, {v} the value.
_KINDS = {
    "place": (
        _PLACES,
        ("It was well known that {n} came from {v}, and never spoke of it.", "You must know that {n} came from {v}."),
        "{n} came from",
    ),
    "trade": (
        _TRADES,
        ("For nine years {n} worked as a {v}, as few people knew.", "In those days {n} worked as a {v}."),
        "{n} worked as a",
    ),
    "thing": (
        _THINGS,
        ("Under the pillow {n} always kept a {v}, winter and summer.", "In a locked drawer {n} kept a {v}."),
        "{n} kept a",
    ),
}  # fmt: skip
PEOPLE = 3


def prose_facts(tokenizer: PreTrainedTokenizerBase, haystack: Haystack, length: int, count: int = 64) -> list[Probe]:
    """Probes of six facts each.

    Args:
        haystack: the running text.
        length: tokens per probe, including the questions.
        count: number of probes.

    Raises UserError if the text is too short, or `length` too small.
    """
    rng = random.Random(f"{SEED} prose {length}")

    def encode(words: str) -> list[int]:
        return list(tokenizer(words, add_special_tokens=False)["input_ids"])

    probes = []
    for _ in range(count):
        people = [f"{rng.choice(_TITLES)} {name}" for name in rng.sample(_NAMES, PEOPLE)]
        told, asked = [], []
        values = {kind: iter(rng.sample(choices, PEOPLE)) for kind, (choices, _, _) in _KINDS.items()}
        for number, person in enumerate(people):
            # Each kind is left out once, so every kind is told about two people.
            for kind in [kind for place, kind in enumerate(_KINDS) if place != number]:
                _, ways, question = _KINDS[kind]
                value = next(values[kind])
                told.append(encode(" " + rng.choice(ways).format(n=person, v=value)))
                asked.append((encode("\n" + question.format(n=person)), encode(" " + value)))
        tail: list[int] = []
        answers = []
        for question_ids, answer in rng.sample(asked, len(asked)):
            tail += question_ids
            answers.append((len(tail), len(tail) + len(answer)))
            tail += answer + encode(".")
        rng.shuffle(told)
        opening = encode("\n\nTo sum up:")
        body = length - len(opening) - len(tail)
        ids, facts = haystack.with_facts(rng, prefix_ids(tokenizer), told, body)
        ids += opening
        begin = len(ids)
        probes.append(Probe((*ids, *tail), tuple((begin + a, begin + b) for a, b in answers), tuple(facts)))
    return probes
