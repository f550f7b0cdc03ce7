"""From sources (text, images) to verified shards, from shards to an order, from the order to batches.

Everything is numpy; torch is never imported here. `prepare_source` or `cached` makes a dataset directory of a source,
`open_data` opens what a recipe names, `Feed` keeps a step's batches ready. See `reader.py` for what a sample is.
"""

from phalanx.data.cache import cached, prepare_all
from phalanx.data.feed import Feed
from phalanx.data.inspection import inspect, verify
from phalanx.data.manifest import is_dataset
from phalanx.data.prepare import Progress, prepare_source
from phalanx.data.reader import IGNORED, Batch, Data, Facts, open_data
from phalanx.data.tokenizers import Tokenizer, load_tokenizer

__all__ = [
    "IGNORED",
    "Batch",
    "Data",
    "Facts",
    "Feed",
    "Progress",
    "Tokenizer",
    "cached",
    "inspect",
    "is_dataset",
    "load_tokenizer",
    "open_data",
    "prepare_all",
    "prepare_source",
    "verify",
]
