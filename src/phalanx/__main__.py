"""`phalanx`, and `python -m phalanx`: the command line of phalanx.cli."""

import sys
from contextlib import nullcontext
from typing import TextIO, cast

from phalanx.beside import preload_torch
from phalanx.errors import ExitCode
from phalanx.std_streams import SafeStream


def main() -> int:
    """Run the command line that the process was given, and return its exit code."""
    sys.stderr = cast(TextIO, SafeStream(sys.stderr))  # the commands' log, of which no work depends
    # Importing torch is most of a first plan: another process begins with it before anything else is imported here.
    try:
        with preload_torch() if sys.argv[1:2] == ["plan"] else nullcontext() as subprocess_call:
            from phalanx.cli import main as cli_main

            return cli_main.main(subprocess_call=subprocess_call)
    except KeyboardInterrupt:  # before that was there to answer it
        print("error: interrupted", file=sys.stderr)
        return int(ExitCode.UNFINISHED)


if __name__ == "__main__":
    sys.exit(main())
