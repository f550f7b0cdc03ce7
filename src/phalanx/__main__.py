"""`phalanx`, and `python -m phalanx`: the command line of phalanx.cli."""

import sys
from typing import TextIO, cast

from phalanx.errors import ExitCode
from phalanx.std_streams import SafeStream


def main() -> int:
    """Run the command line that the process was given, and return its exit code."""
    sys.stderr = cast(TextIO, SafeStream(sys.stderr))  # the commands' log, of which no work depends
    try:
        from phalanx.cli import main as cli_main

        return cli_main.main()
    except KeyboardInterrupt:  # while it was imported
        print("error: interrupted", file=sys.stderr)
        return int(ExitCode.UNFINISHED)


if __name__ == "__main__":
    sys.exit(main())
