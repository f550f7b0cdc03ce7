"""`python -m phalanx` is `phalanx`."""

import sys

from phalanx.cli import main

sys.exit(main())
