"""The cache of `phalanx train`: where it is, when it is used again, and many processes at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.data import open_data, prepare_all_sources, prepare_cached, verify_dataset
from phalanx.data import prepare as prepare_module
from phalanx.data.cache import prepare_source
from phalanx.recipe.data_schema import BpeTokenizerConfig, DataConfig, DataSource, EvaluationConfig
from phalanx.run.cache import cache_root
from small_data import write_texts

SOURCE = Path(prepare_module.__file__).parents[2]


@pytest.fixture
def texts(tmp_path):
    return write_texts(tmp_path / "texts", {f"{number}.txt": f"text {number}\n" * 3000 for number in range(10)})


@pytest.mark.parametrize(
    ("environ", "root"),
    [
        ({"PHALANX_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a")),
        ({"XDG_CACHE_HOME": "/b"}, Path("/b/phalanx")),
        ({"PHALANX_CACHE_DIR": "", "XDG_CACHE_HOME": ""}, Path.home() / ".cache/phalanx"),
    ],
)
def test_where_the_cache_is(environ, root):
    assert cache_root(environ) == root


def test_a_source_is_prepared_once(texts, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("phalanx.data.cache.prepare_source", lambda *a, **k: calls.append(1) or prepare_source(*a, **k))
    first = prepare_cached(DataSource(text="*.txt"), DataConfig(), texts, tmp_path / "cache")
    second = prepare_cached(DataSource(text="*.txt"), DataConfig(seq_len=999), texts, tmp_path / "cache")
    assert first == second
    assert first.parent == tmp_path / "cache" / "data"
    assert len(calls) == 1
    verify_dataset(first)


def test_another_content_time_tokenizer_or_set_of_files_is_another_dataset(texts, tmp_path):
    def where(source=None, data=None):
        return prepare_cached(source or DataSource(text="*.txt"), data or DataConfig(), texts, tmp_path / "cache")

    places = [
        where(),
        where(DataSource(text="[0-4].txt")),
        where(data=DataConfig(tokenizer=BpeTokenizerConfig(bpe=300))),
    ]
    (texts / "0.txt").write_text("new")
    places.append(where())
    os.utime(texts / "1.txt", (1, 1))
    places.append(where())
    (texts / "more.txt").write_text("more")
    places.append(where())
    assert len(set(places)) == len(places)


def test_a_prepared_source_is_returned_as_it_is(texts, tmp_path):
    assert (
        prepare_cached(DataSource(prepared="some/where"), DataConfig(), texts, tmp_path / "cache")
        == texts / "some/where"
    )
    assert not (tmp_path / "cache").exists()


def test_processes_that_ask_at_once_get_one_whole_dataset(texts, tmp_path):
    code = f"""
from pathlib import Path
from phalanx.data import prepare_cached, verify_dataset
from phalanx.recipe.data_schema import DataConfig, DataSource
out = prepare_cached(DataSource(text="*.txt"), DataConfig(), Path({str(texts)!r}))
verify_dataset(out)
print(out)
"""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PHALANX_CACHE_DIR": str(tmp_path / "cache")}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]
    outs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 3
    assert len(set(outs)) == 1
    assert len(list((tmp_path / "cache" / "data").iterdir())) == 1


def test_all_sources_of_a_recipe_share_the_tokenizer_of_the_first(texts, tmp_path):
    sources = [DataSource(text="[0-4].txt", weight=2), DataSource(text="[5-8].txt")]
    data = DataConfig(source=sources, tokenizer=BpeTokenizerConfig(bpe=280), seq_len=16)
    prepared, evaluate = prepare_all_sources(
        data, EvaluationConfig(source=DataSource(text="9.txt")), texts, tmp_path / "cache"
    )
    assert [source.weight for source in prepared.source] == [2, 1]
    assert all(Path(source.prepared).is_absolute() for source in [*prepared.source, evaluate.source])
    opened = open_data(prepared, evaluate, 0)
    assert opened.info.vocab_size <= 280
    assert opened.num_validation_samples > 0
    again = prepare_all_sources(prepared, evaluate, texts, tmp_path / "cache")
    assert open_data(*again, 0).fingerprint == opened.fingerprint


def test_one_source_stays_one_and_evaluation_has_none_unless_it_is_named(texts, tmp_path):
    data, evaluate = prepare_all_sources(
        DataConfig(source=DataSource(text="*.txt")), EvaluationConfig(), texts, tmp_path / "cache"
    )
    assert len(data.source) == 1
    assert evaluate == EvaluationConfig()
