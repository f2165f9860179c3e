"""Random damage to JSON values and bytes: what editors, broken transfers and other tools do to files, and worse."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    7,
    2**31,
    2**63,
    10**30,
    1.5,
    -2.5,
    1e-320,
    float("nan"),
    float("inf"),
    "",
    "x",
    "7",
    "a" * 5000,
    "\udcff",
    "a\0b",
    "a\nb",
    "../x",
    "/etc/passwd",
    [],
    [1],
    ["x", None],
    {},
    {"a": 1},
    [[[[[[]]]]]],
)


def damaged_json(value: Any, random: Random) -> Any:
    """A copy of a JSON value with one to three changes: a value replaced, removed, added, renamed or moved."""
    value = copy.deepcopy(value)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        places = list(_containers(value))
        place = random.choice(places) if places else None
        if place is None or (place is value and random.random() < 0.02):
            return random.choice(ODD)
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys or random.random() < 0.1:
            _add(place, random)
            continue
        key, how = random.choice(keys), random.random()
        if how < 0.6:
            place[key] = copy.deepcopy(random.choice(ODD))
        elif how < 0.8:
            del place[key]
        elif how < 0.9:
            place[key] = [place[key]]
        else:
            place[key] = copy.deepcopy(place[random.choice(keys)])
    return value


def damaged_bytes(data: bytes, random: Random, among: int | None = None) -> bytes:
    """The bytes cut off, overwritten, inserted or flipped; but for cuts, among the first `among`."""
    data, among = bytearray(data), min(len(data), among or len(data))
    for _ in range(random.choice((1, 1, 2, 8))):
        at, how = random.randrange(among + 1), random.random()
        if how < 0.25:
            return bytes(data[: random.choice((at, random.randrange(len(data) + 1)))])
        if how < 0.5:
            data[at : at + 1] = bytes([random.randrange(256)])
        elif how < 0.65:
            data[at : at + 8] = random.randrange(2**64).to_bytes(8, "little")
        elif how < 0.8:
            data[at : at + 8] = random.randrange(300).to_bytes(8, "little")
        elif how < 0.9:
            data[at:at] = random.randbytes(random.randrange(1, 20))
        else:
            del data[at : at + random.randrange(1, 20)]
    return bytes(data)


def damaged_text(value: Any, random: Random) -> bytes:
    """The JSON text of a value, with damage to the value or to its bytes."""
    if random.random() < 0.8:
        return json.dumps(damaged_json(value, random)).encode()
    return damaged_bytes(json.dumps(value, indent=1).encode(), random)


def _containers(value: Any) -> Any:
    if isinstance(value, (dict, list)):
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _containers(inner)


def _add(place: Any, random: Random) -> None:
    if isinstance(place, dict):
        place[random.choice(("deltanet", "text_config", "quantization_config", "auto_map", "x", "", "\udcff"))] = 1
    else:
        place.append(copy.deepcopy(random.choice(ODD)))
