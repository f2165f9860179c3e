"""The formats of the recall probes that selections are scored on.

Templates, keys and values are of other kinds than those of `deltanet_hf.evaluation`, so that a selection is never made
on what it is evaluated with.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

_SECTIONS = ("audio", "backup", "cluster", "display", "editor", "gateway", "indexer", "logger", "mailer", "network")
_FIELDS = ("build", "driver", "engine", "firmware", "module", "patch", "release", "schema")
_RIVERS = (
    *("Danube", "Rhine", "Loire", "Volga", "Tagus", "Ebro", "Elbe", "Oder", "Thames", "Severn", "Shannon", "Tiber"),
    *("Garonne", "Moselle", "Vistula", "Dnieper", "Neva", "Drava", "Sava", "Meuse", "Scheldt", "Weser", "Arno", "Po"),
)
_MONTHS = ("January", "February", "March", "April", "June", "July", "August", "September", "October", "November")
_TOWNS = (
    *("Aalen", "Bilbao", "Calais", "Dundee", "Elblag", "Foggia", "Gdynia", "Hasselt", "Imatra", "Jena", "Kaunas"),
    *("Leiden", "Malaga", "Narvik", "Olomouc", "Perth", "Rostock", "Split", "Tartu", "Umea", "Verona", "Wismar"),
)
_STARS = (
    *("Vega", "Altair", "Rigel", "Deneb", "Antares", "Spica", "Mimosa", "Polaris", "Castor", "Pollux", "Regulus"),
    *("Sirius", "Canopus", "Capella", "Procyon", "Achernar", "Hadar", "Shaula", "Bellatrix", "Alnilam", "Mirfak"),
)
_FLOORS = (
    *("second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh", "twelfth"),
    *("thirteenth", "fourteenth", "fifteenth", "sixteenth", "seventeenth", "eighteenth", "nineteenth", "twentieth"),
)
_LANGUAGES = (
    *("Arabic", "Armenian", "Basque", "Bengali", "Bulgarian", "Chinese", "Czech", "Danish", "Dutch", "Finnish"),
    *("French", "German", "Greek", "Hebrew", "Hindi", "Hungarian", "Irish", "Italian", "Japanese", "Korean", "Latin"),
    *("Norwegian", "Persian", "Polish", "Portuguese", "Russian", "Spanish", "Swedish", "Turkish", "Welsh"),
)


@dataclass(frozen=True)
class Format:
    """A way to state facts and to ask for them.

    A fact is `statement(key)`, the value, `end`; a question is `question(key)`, the value, `end_of_answer`.

    Attributes:
        together: whether all facts of a probe stand in one place, after `heading`, as the rows of a table do.
    """

    name: str
    keys: Callable[[random.Random, int], list[str]]
    value: Callable[[random.Random], str]
    statement: str
    end: str
    question: str
    end_of_answer: str
    together: bool = False
    heading: str = ""


def _drawn(words: tuple[str, ...]) -> Callable[[random.Random, int], list[str]]:
    return lambda rng, count: rng.sample(words, count)


def _settings(rng: random.Random, count: int) -> list[str]:
    return rng.sample([f"{section}_{field}" for section in _SECTIONS for field in _FIELDS], count)


def _version(rng: random.Random) -> str:
    return f" {rng.randrange(1, 10)}.{rng.randrange(10, 100)}.{rng.randrange(10)}"


def _day(rng: random.Random) -> str:
    return f' "{rng.randrange(1, 29)} {rng.choice(_MONTHS)}'


def _time(rng: random.Random) -> str:
    return f" {rng.randrange(1, 13)}:{rng.randrange(10, 60)}"


def _berth(rng: random.Random) -> str:
    return f" {rng.choice('BCDFGHJKLMNPQRSTVWXZ')}{rng.choice('BCDFGHJKLMNPQRSTVWXZ')}-{rng.randrange(11, 100)}"


def _language(rng: random.Random) -> str:
    return f" {rng.choice(_LANGUAGES)}"


_RIVER = '\n{{"river": "{}", "surveyed":'
_SHIP = '\n<ship name="{}"> <berth>'
FORMATS = (
    Format("settings", _settings, _version, statement="\n{} =", end="\n", question="\n{} =", end_of_answer=""),
    Format("json", _drawn(_RIVERS), _day, statement=_RIVER, end='"}\n', question=_RIVER, end_of_answer='"}'),
    Format(
        "table",
        _drawn(_TOWNS),
        _time,
        statement="| {} |",
        end=" |\n",
        question="| {} |",
        end_of_answer=" |\n",
        together=True,
        heading="\n| town | ferry |\n|---|---|\n",
    ),
    Format(
        "tags",
        _drawn(_STARS),
        _berth,
        statement=_SHIP,
        end=" </berth> </ship>\n",
        question=_SHIP,
        end_of_answer=" </berth> </ship>",
    ),
    Format(
        "prose",
        _drawn(_FLOORS),
        _language,
        statement=" In the end the tenants of the {} floor decided to learn",
        end=", and nobody was surprised.",
        question=" When I asked which lessons the tenants of the {} floor take, they told me that it is",
        end_of_answer=".",
    ),
)
