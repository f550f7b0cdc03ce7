"""From sources (text, images) to verified shards, from shards to an order, from the order to batches.

Everything is numpy; torch is never imported here. `prepare_source` or `cached` makes a dataset directory of a source,
`open_data` opens what a recipe names, `Prefetcher` keeps a step's batches ready. See `reader.py` for what a sample is.
"""

from phalanx.data.cache import prepare_all_sources, prepare_cached
from phalanx.data.inspection import inspect_dataset, verify_dataset
from phalanx.data.manifest import is_dataset
from phalanx.data.prefetch import Prefetcher, RankBatch
from phalanx.data.prepare import DatasetPart, prepare_part, prepare_source
from phalanx.data.prepare_plan import PrepareProgress
from phalanx.data.reader import IGNORE_INDEX, Batch, DataInfo, RunData, open_data
from phalanx.data.tokenizers import Tokenizer, load_tokenizer

__all__ = [
    "IGNORE_INDEX",
    "Batch",
    "DataInfo",
    "DatasetPart",
    "Prefetcher",
    "PrepareProgress",
    "RankBatch",
    "RunData",
    "Tokenizer",
    "inspect_dataset",
    "is_dataset",
    "load_tokenizer",
    "open_data",
    "prepare_all_sources",
    "prepare_cached",
    "prepare_part",
    "prepare_source",
    "verify_dataset",
]
