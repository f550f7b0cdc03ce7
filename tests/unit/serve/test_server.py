"""What is refused before anything is served."""

from pathlib import Path

import pytest

from phalanx.errors import PhalanxError
from phalanx.serve.server import ServeOptions, serve


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"backend": "slrum"}, "--on slrum: expected one of"),
        ({"host": "203.0.113.9"}, "203.0.113.9"),
        ({"token": "short"}, "expected 16 or more"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_served(
    tmp_path: Path, options: dict[str, object], problem: str
) -> None:
    def report(address: str) -> None:
        raise AssertionError("it serves")

    with pytest.raises(PhalanxError, match=problem):
        serve(ServeOptions([tmp_path], port=0, **options), [], report)  # type: ignore[arg-type]
