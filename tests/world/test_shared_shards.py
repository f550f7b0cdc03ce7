"""Shards of a dataset in a store: the nodes of a run read each from the store once, and give it to each other."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from phalanx.data import open_data
from phalanx.data.dataset_files import upload_dataset
from phalanx.recipe.data_schema import DataConfig, DataSource, EvaluationConfig
from phalanx.storage.store import open_store
from phalanx.storage.url import parse_url
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.worker import sharing_shards
from process_worlds import ProcessWorlds
from small_data import dataset


def read_all(rank: int, world: int, *, url: str, folder: str, nodes: int, shared: bool) -> dict[str, Any]:
    """Each worker's node has a cache of its own unless it is `shared`. Every worker reads all samples."""
    node = rank * nodes // world
    os.environ |= {"PHALANX_NODE_RANK": str(node), "PHALANX_CACHE_DIR": f"{folder}/{'shared' if shared else node}"}
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world // nodes)}
    counters = open_store(url).counters
    before = counters.bytes_read
    with sharing_shards(DistEnv(rank, world, rank), [url]):
        data = open_data(DataConfig(source=DataSource(prepared=url), seq_len=32), EvaluationConfig(), 0)
        tokens = data.read_training(0, data.num_train_samples)["tokens"]
        dist.barrier()  # as at the end of a run: no worker leaves while others still read
    return {"sum": int(tokens.sum()), "read": counters.bytes_read - before}


@pytest.mark.parametrize(("nodes", "shared"), [(1, True), (2, False), (4, False), (4, True)])
def test_each_byte_of_the_data_is_read_from_the_store_once_for_all_nodes(
    world: ProcessWorlds, tmp_path: Path, nodes: int, shared: bool
) -> None:
    tokens = np.random.default_rng(0).integers(0, 256, 8 * 20_000)
    local = dataset(tmp_path / "local", np.split(tokens, 8))
    url = f"file://{tmp_path}/store/set"
    upload_dataset(local, parse_url(url))
    size = sum(path.stat().st_size for path in local.iterdir())
    results = world.run(4, read_all, url=url, folder=str(tmp_path), nodes=nodes, shared=shared)
    assert len({each["sum"] for each in results}) == 1
    assert sum(each["read"] for each in results) <= 1.1 * size
