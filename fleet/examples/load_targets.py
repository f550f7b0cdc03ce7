"""Write the load targets that a URL answers as JSON to the file of `phalanx power guard --targets FILE`. Run it from a
timer, such as each minute; when it fails, the file stays as it is.

    python examples/load_targets.py https://grid.example.com/limits.json "feed a" targets.yaml

The URL answers [{"kilowatts": 110, "start": "2026-11-28T10:00:00Z", "end": "2026-11-28T11:00:00Z"}]; change
`read_targets` for another source.
"""

import json
import sys
import urllib.request
from pathlib import Path


def read_targets(url: str, level: str) -> list[dict[str, str]]:
    with urllib.request.urlopen(url, timeout=30) as response:
        return [
            {"level": level, "limit": f"{limit['kilowatts']:.3f} kW", "start": limit["start"], "end": limit["end"]}
            for limit in json.load(response)
        ]


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(f"usage: {sys.argv[0]} URL LEVEL FILE")
    url, level, file = sys.argv[1:]
    try:
        text = json.dumps({"targets": read_targets(url, level)})
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"error: {url}: {type(error).__name__}: {error}")
    Path(f"{file}.new").write_text(text)
    Path(f"{file}.new").replace(file)  # the guard never reads half a file
