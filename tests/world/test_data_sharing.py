"""The nodes of a run read each shard of a dataset from the store once and prepare each piece of a stream once, and give
them to each other."""

import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from phalanx.data import open_data
from phalanx.data.dataset_files import upload_dataset
from phalanx.data.prepare import DatasetPart, prepare_stream
from phalanx.data.prepare_plan import read_done_file
from phalanx.data.stream import preparation_order, read_description
from phalanx.recipe.data_schema import DataConfig, DataSource, EvaluationConfig
from phalanx.storage.cache import localize_into
from phalanx.storage.peers import ObjectPeers
from phalanx.storage.store import open_store
from phalanx.storage.url import parse_url
from phalanx.train.data_sharing import DataSharing, sharing_data
from phalanx.train.distributed.environment import DistEnv
from process_worlds import ProcessWorlds
from small_data import contents, dataset, write_texts
from train_harness import wait_until


def read_all(rank: int, world: int, *, url: str, folder: str, nodes: int, shared: bool) -> dict[str, Any]:
    """Each worker's node has a cache of its own unless it is `shared`. Every worker reads all samples."""
    node = rank * nodes // world
    os.environ |= {"PHALANX_NODE_RANK": str(node), "PHALANX_CACHE_DIR": f"{folder}/{'shared' if shared else node}"}
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world // nodes)}
    counters = open_store(url).counters
    before = counters.bytes_read
    with sharing_data(DistEnv(rank, world, rank), True):
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


def test_each_node_of_a_stream_copies_the_pieces_that_the_other_prepared(tmp_path: Path) -> None:
    for number in range(4):
        write_texts(tmp_path, {f"{number}.txt": "".join(random.Random(number).choices("abc \n", k=4_400_000))})
    whole, source = tmp_path / "whole", DataSource(text="*.txt")
    whole.mkdir()
    prepare_stream(source, DataConfig(), tmp_path, whole, [])
    pieces = preparation_order(read_description(whole), 0.0, 0)
    directories = [tmp_path / "node-0", tmp_path / "node-1"]
    nodes = [ObjectPeers(b"secret", localize_into) for _ in directories]
    addresses = [peers.listen("127.0.0.1") for peers in nodes]
    sharings = []
    for node, (peers, directory) in enumerate(zip(nodes, directories, strict=True)):
        others = [f"shard-{piece:05d}.*" for piece in pieces[1 - node :: 2]]
        shutil.copytree(whole, directory, ignore=shutil.ignore_patterns(*others))
        peers.connect(addresses, node)
        sharings.append(DataSharing(DatasetPart(node, 2), peers))
        sharings[-1].share_stream(directory, 0.0, 0)
    for directory in directories:
        wait_until(lambda directory=directory: all(read_done_file(directory, piece) for piece in pieces))
        assert set(contents(directory).items()) <= set(contents(whole).items())
    for sharing, peers in zip(sharings, nodes, strict=True):
        sharing.is_over.set()
        peers.close()
