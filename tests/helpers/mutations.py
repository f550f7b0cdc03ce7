"""What a seeded hand does to files: bits, lengths, types, depth. Each turn of `make fuzz` has another seed."""

import json
import os
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from phalanx.errors import PhalanxError

T = TypeVar("T")

SEED = int(os.environ.get("FUZZ_SEED", "0"))
"""0 in `make test-faults`; `make fuzz` counts from 1."""
STRANGE: list[Any] = [
    *(None, True, "", "x" * 300, "\x1b[31m", 0, -1, 1e308, float("inf"), float("nan"), 10**30, [], {}, [[]], {"a": {}}),
    *("../../etc/passwd", [None], {"step": "x"}, -0.5, "\ud800", 1 << 62, 3.5, ["a", 1], "/dev/zero", "."),
]


def attempt(read: Callable[[], T]) -> tuple[T | None, str]:
    """What reading gives, and "", or None and the sentence by which it was refused. Anything else is raised."""
    try:
        return read(), ""
    except PhalanxError as error:
        said = str(error)
    assert said
    return None, said


def hand(name: str) -> random.Random:
    """The random numbers of one test in this turn."""
    return random.Random(name if SEED == 0 else f"{name} {SEED}")


def place(value: Any, rng: random.Random) -> tuple[Any, ...]:
    """The path of a value in a JSON value; the higher it stands, the likelier it is taken."""
    path: list[Any] = []
    while isinstance(value, dict | list) and value and rng.random() < 0.7:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        path.append(key)
        value = value[key]
    return tuple(path)


def put(value: Any, path: Sequence[Any], new: Any) -> Any:
    """The value with another one at a path."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = put(value[path[0]], path[1:], new)
    return copy


def strange(value: Any, rng: random.Random) -> Any:
    """A JSON value with something else in one place."""
    return put(value, place(value, rng), rng.choice(STRANGE))


def retyped(content: bytes, rng: random.Random) -> bytes:
    """Another value somewhere, of whatever type; of lines of JSON, in one of them."""
    lines = content.splitlines() if content.count(b"\n{") else [content]
    at = rng.randrange(len(lines))
    lines[at] = json.dumps(strange(json.loads(lines[at]), rng)).encode()
    return b"\n".join(lines)


def flipped(content: bytes, rng: random.Random) -> bytes:
    """Up to three bits flipped."""
    bad = bytearray(content)
    for _ in range(rng.randrange(1, 4)):
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
    return bytes(bad)


def mutated(content: bytes, rng: random.Random) -> bytes:
    """One of the ways in which a file may be wrong."""
    way = rng.randrange(8)
    if way == 0:
        return content[: rng.randrange(len(content))]
    if way == 1:
        return rng.randbytes(rng.randrange(64))
    if way == 2:
        return rng.choice([b"[", b'{"a":', b"- ", b"{a: "]) * 5000
    if way <= 4:
        return flipped(content, rng)
    try:
        return retyped(content, rng)
    except (ValueError, RecursionError):  # no JSON
        return spliced(content, rng)


def spliced(content: bytes, rng: random.Random) -> bytes:
    """A piece taken out, twice there, elsewhere, or of other bytes; that is often a length or a count."""
    at, size = rng.randrange(len(content)), rng.choice([1, 2, 4, 8, 64])
    piece = content[at : at + size]
    new = rng.choice([b"", piece * 2, rng.randbytes(size), b"\xff" * size, b"\0" * size, piece[::-1]])
    return content[:at] + new + content[at + size :]
