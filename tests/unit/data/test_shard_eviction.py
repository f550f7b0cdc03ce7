"""A dataset in a store that is larger than the cache of the node: the shard that is needed last is evicted first."""

import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from phalanx.data import RunData, open_data
from phalanx.data.dataset_files import open_dataset_files, upload_dataset
from phalanx.data.reader import PreparedDataset
from phalanx.recipe.data_schema import DataConfig, DataSource, EvaluationConfig
from phalanx.storage.cache import CACHE_LIMIT_VARIABLE, free_space
from phalanx.storage.store import open_store
from phalanx.storage.url import parse_url
from small_data import dataset

NUM_SHARDS, SHARD_BYTES, CACHED_SHARDS = 16, 20_000, 8
BATCH, NUM_BATCHES = 4, 60


@pytest.fixture(autouse=True)
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A dataset of 16 shards, in a cache for 8 of them and for what is small."""
    monkeypatch.setenv("PHALANX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv(CACHE_LIMIT_VARIABLE, str((CACHED_SHARDS * SHARD_BYTES + 12_000) / 2**30))
    tokens = np.random.default_rng(0).integers(0, 256, NUM_SHARDS * SHARD_BYTES)
    upload_dataset(dataset(tmp_path / "local", np.split(tokens, NUM_SHARDS)), parse_url(f"file://{tmp_path}/store/set"))
    return f"file://{tmp_path}/store/set"


def open_run(location: str, seed: int = 0) -> RunData:
    return open_data(DataConfig(source=DataSource(prepared=location), seq_len=32), EvaluationConfig(), seed)


def shards_on_disk(url: str) -> list[Path]:
    return list(open_dataset_files(url).directory.glob("*.bin"))


def count_lru_downloads(accesses: Sequence[int], capacity: int) -> int:
    """What a cache that evicts the longest unused shard would download."""
    cached, count = OrderedDict[int, None](), 0
    for shard in accesses:
        count += shard not in cached
        cached[shard] = None
        cached.move_to_end(shard)
        if len(cached) > capacity:
            cached.popitem(last=False)
    return count


def count_best_downloads(accesses: Sequence[int], capacity: int) -> int:
    """What Belady's algorithm, which knows all accesses, would download."""
    cached, count = set[int](), 0
    for place, shard in enumerate(accesses):
        if shard not in cached:
            count += 1
            if len(cached) == capacity:
                rest = list(accesses[place:])
                cached.remove(max(cached, key=lambda each: rest.index(each) if each in rest else len(rest)))
            cached.add(shard)
    return count


def test_fewer_bytes_are_downloaded_than_by_age_and_the_samples_are_those_of_the_files(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accesses: list[int] = []
    open_shard: Callable[..., object] = PreparedDataset.open_shard
    monkeypatch.setattr(PreparedDataset, "open_shard", lambda *args: (accesses.append(args[1]), open_shard(*args))[1])
    stored, local = open_run(url), open_run(str(tmp_path / "local"))
    before = open_store(url).counters.bytes_read
    for step in range(NUM_BATCHES):
        tokens = stored.read_training(step * BATCH, BATCH)["tokens"]
        recorded = len(accesses)
        assert (tokens == local.read_training(step * BATCH, BATCH)["tokens"]).all()
        del accesses[recorded:]
        assert len(shards_on_disk(url)) <= CACHED_SHARDS
    read = open_store(url).counters.bytes_read - before
    by_age, best = (count(accesses, CACHED_SHARDS) for count in (count_lru_downloads, count_best_downloads))
    assert read < 0.75 * by_age * SHARD_BYTES
    assert read < 1.25 * best * SHARD_BYTES


READ = """
import sys
from phalanx.data import open_data
from phalanx.recipe.data_schema import DataConfig, DataSource, EvaluationConfig
data = open_data(DataConfig(source=DataSource(prepared=sys.argv[1]), seq_len=32), EvaluationConfig(), int(sys.argv[2]))
total = 0
for first in range(0, int(sys.argv[3]), 4):
    total += int(data.read_training(first, 4)["tokens"].sum())
print(total, flush=True)
sys.stdin.readline()
"""


def start_reader(url: str, seed: int, count: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", READ, url, str(seed), str(count)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_two_jobs_share_the_cache_and_read_what_each_would_alone(url: str, tmp_path: Path) -> None:
    for seed, reader in [(seed, start_reader(url, seed, 160)) for seed in (1, 2)]:
        answer, _ = reader.communicate("\n", timeout=60)
        local = open_run(str(tmp_path / "local"), seed)
        assert int(answer) == sum(int(local.read_training(first, 4)["tokens"].sum()) for first in range(0, 160, 4))
    free_space(SHARD_BYTES)
    assert len(shards_on_disk(url)) < CACHED_SHARDS


def test_shards_of_a_running_process_outlast_others_and_those_of_a_killed_one_do_not(url: str, tmp_path: Path) -> None:
    (tmp_path / "store/model").write_bytes(b"m" * SHARD_BYTES)
    with start_reader(url, 1, 40) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        before = set(shards_on_disk(url))
        assert free_space(SHARD_BYTES, keeps_announced=True) > 0
        assert set(shards_on_disk(url)) == before
        reader.send_signal(signal.SIGKILL)
    code = f"from phalanx.storage.cache import localize; localize('file://{tmp_path}/store/model')"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert len(before & set((tmp_path / "cache/store").rglob("*.bin"))) == len(before) - 1


def test_a_shard_that_is_open_is_not_evicted(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = open_dataset_files(url)
    monkeypatch.setenv(CACHE_LIMIT_VARIABLE, str((2 * SHARD_BYTES + 12_000) / 2**30))
    entries = PreparedDataset(url, 32).manifest.shards
    with files.open_shard(entries[0]) as file:
        assert file is not None
        for entry in entries[1:5]:
            with files.open_shard(entry):
                pass
        assert (files.directory / entries[0].file).exists()
        assert len(shards_on_disk(url)) == 2
    free_space(SHARD_BYTES)
    assert not (files.directory / entries[0].file).exists()
