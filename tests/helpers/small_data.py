"""Small sources and datasets that the data room's tests share."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.data import RunData, open_data, prepare_source
from phalanx.data.manifest import DatasetManifest, narrowest_token_dtype
from phalanx.data.shard import ShardWriter
from phalanx.recipe import data_schema


def write_texts(folder: Path, texts: dict[str, str | bytes]) -> Path:
    """Files by name."""
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def prepare(folder: Path, out: Path, source: dict[str, Any], tokenizer: Any = "bytes", **options: Any) -> Path:
    """Prepare a source given as a recipe would, with one worker unless told otherwise."""
    data = data_schema.DataConfig.model_validate({"source": source, "tokenizer": tokenizer})
    assert isinstance(data.source, data_schema.DataSource)
    return prepare_source(data.source, data, folder, out, **{"num_workers": 1, **options})


def dataset(folder: Path, shards: list[np.ndarray], vocab: int = 256, documents: int = 1) -> Path:
    """A dataset directory that holds these tokens, `documents` equal documents in every shard."""
    folder.mkdir(parents=True)
    entries = []
    for number, tokens in enumerate(shards):
        with ShardWriter(folder, number, narrowest_token_dtype(vocab)) as writer:
            for part in np.array_split(tokens, documents):
                writer.start_document()
                writer.append_values(part)
            entries.append(writer.commit())
    DatasetManifest(
        "tokens", narrowest_token_dtype(vocab).str.replace("|", "<"), tuple(entries), vocab, {"name": "bytes"}
    ).write(folder)
    return folder


def numbered(count: int) -> np.ndarray:
    """Tokens that tell where they are: 0, 1, 2, ... for a vocabulary of 2**32."""
    return np.arange(count, dtype=np.uint32)


def opened(*folders: Path, sequence: int = 8, share: float = 0.0, seed: int = 0, **options: Any) -> RunData:
    """`open_data` on dataset directories; `weights` go with them, other options into the recipe."""
    weights = options.pop("weights", [1.0] * len(folders))
    global_size = options.pop("global_size", 1)
    evaluate = options.pop("evaluation", {"holdout_fraction": share})
    sources = [{"prepared": str(folder), "weight": w} for folder, w in zip(folders, weights, strict=True)]
    data = data_schema.DataConfig.model_validate({"source": sources, "seq_len": sequence, **options})
    return open_data(data, data_schema.EvaluationConfig.model_validate(evaluate), seed, global_size)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a directory."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def manifest_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


def all_tokens(folder: Path) -> np.ndarray:
    """All tokens of a dataset in order."""
    manifest = manifest_of(folder)
    return np.concatenate([np.fromfile(folder / shard["file"], manifest["dtype"]) for shard in manifest["shards"]])
