"""`phalanx`, and `python -m phalanx`: the command line of phalanx.cli."""

import sys
from contextlib import nullcontext
from typing import TextIO, cast

from phalanx.beside import torch_beside
from phalanx.errors import ExitCode
from phalanx.streams import Lasting


def main() -> int:
    """Run the command line that the process was given, and return its exit code."""
    sys.stderr = cast(TextIO, Lasting(sys.stderr))  # the commands' log, of which no work depends
    # Importing torch is most of a first plan: another process begins with it before anything else is imported here.
    try:
        with torch_beside() if sys.argv[1:2] == ["plan"] else nullcontext() as beside:
            from phalanx import cli

            return cli.main(beside=beside)
    except KeyboardInterrupt:  # before that was there to answer it
        print("error: interrupted", file=sys.stderr)
        return int(ExitCode.UNFINISHED)


if __name__ == "__main__":
    sys.exit(main())
