"""Prepare, verify and inspect dataset directories."""

from phalanx.data import inspect_dataset as inspect_dataset
from phalanx.data import prepare_source as prepare_source
from phalanx.data import verify_dataset as verify_dataset
