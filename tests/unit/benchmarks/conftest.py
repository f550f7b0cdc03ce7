"""Tests of what lies in benchmarks/, which is no package that is installed."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
