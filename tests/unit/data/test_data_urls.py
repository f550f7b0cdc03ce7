"""Sources and prepared datasets at URLs: the same bytes, plans and samples as from a directory, and bad locations."""

import contextlib
import gzip
import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from http_objects import serve_objects
from phalanx.cli.main import main
from phalanx.data import open_data, prepare_all_sources, prepare_cached, verify_dataset
from phalanx.data.dataset_files import open_dataset_files, upload_dataset
from phalanx.data.manifest import read_manifest
from phalanx.data.prepare_plan import make_prepare_plan
from phalanx.errors import DataError, ExitCode, PhalanxError, RecipeError
from phalanx.recipe.data_schema import DataConfig, DataSource, EvaluationConfig
from phalanx.storage.errors import StoreUnavailable
from phalanx.storage.store import Store
from phalanx.storage.url import parse_url
from small_data import dataset, prepare, write_texts


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PHALANX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("phalanx.storage.store.FIRST_CONTACT_S", 0.0)


@pytest.fixture
def texts(tmp_path):
    names = ("a.txt", "sub/b c+d.txt", "sub/deep/é.txt", ".hidden.txt", "sub/skip.txt")
    return write_texts(tmp_path / "texts", {name: f"text of {name}\n" * 2000 for name in names})


def fingerprint(folder):
    return read_manifest(folder).fingerprint


@pytest.mark.parametrize("glob", ["**/*.txt", "*.txt", "sub/**", "sub/*.txt", "[a]?txt", "sub/b c+d.txt"])
def test_a_glob_of_a_url_prepares_the_files_that_it_matches_in_a_directory(texts, tmp_path, glob):
    local = prepare(texts, tmp_path / "local", {"text": glob, "exclude": ["**/skip.txt"]})
    remote = prepare(
        texts, tmp_path / "remote", {"text": f"file://{texts}/{glob}", "exclude": f"file://{texts}/**/skip.txt"}
    )
    assert fingerprint(remote) == fingerprint(local)


def test_packed_text_json_lines_and_parquet_are_read_from_urls(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [f"row {number} " * 50 for number in range(500)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    root = write_texts(tmp_path / "root", {"a.txt.gz": gzip.compress(lines.encode(), mtime=0), "a.jsonl": lines})
    parquet.write_table(pyarrow.table({"text": texts}), root / "a.parquet", row_group_size=100)
    for kind, name in (("text", "a.txt.gz"), ("jsonl", "a.jsonl"), ("parquet", "a.parquet")):
        local = prepare(root, tmp_path / f"local-{kind}", {kind: name})
        remote = prepare(root, tmp_path / f"remote-{kind}", {kind: f"file://{root}/{name}"})
        assert fingerprint(remote) == fingerprint(local), kind


def test_several_workers_read_a_url(tmp_path, monkeypatch):
    monkeypatch.setattr("phalanx.data.prepare_plan.MIN_PIECE_BYTES", 1 << 16)
    root = write_texts(tmp_path / "root", {"a.txt": "one line of text\n" * 40_000, "b.txt": "another\n" * 40_000})
    local = prepare(root, tmp_path / "local", {"text": "*.txt"})
    remote = prepare(root, tmp_path / "remote", {"text": f"file://{root}/*.txt"}, num_workers=2)
    assert fingerprint(remote) == fingerprint(local)


def test_images_and_idx_files_are_read_from_urls(tmp_path):
    image_module = pytest.importorskip("PIL.Image")
    for label, shade in (("cat", 10), ("dog", 200)):
        (tmp_path / "root" / label / "more").mkdir(parents=True)
        image_module.new("RGB", (8, 8), (shade, 0, 0)).save(tmp_path / "root" / label / "more" / "1.png")
    (tmp_path / "root" / "idx").write_bytes(bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 1, 5, 6]))
    (tmp_path / "root" / "labels").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 2, 0, 1]))
    url = f"file://{tmp_path}/root"
    for kind, local, remote in (
        ("images", {"images": "root", "image_size": [4, 4]}, {"images": url, "image_size": [4, 4]}),
        (
            "idx",
            {"idx": {"images": "root/idx", "labels": "root/labels"}},
            {"idx": {"images": f"{url}/idx", "labels": f"{url}/labels"}},
        ),
    ):
        made = [prepare(tmp_path, tmp_path / f"{kind}-{place}", source) for place, source in ((1, local), (2, remote))]
        assert fingerprint(made[0]) == fingerprint(made[1])


def test_a_changed_object_gives_another_plan(texts):
    source = DataSource(text=f"file://{texts}/*.txt")
    before = make_prepare_plan(source, DataConfig(), texts).cache_key
    assert make_prepare_plan(source, DataConfig(), texts).cache_key == before
    (texts / "a.txt").write_text("x" * (texts / "a.txt").stat().st_size)
    assert make_prepare_plan(source, DataConfig(), texts).cache_key != before


def test_text_over_http_is_read_by_ranges(texts, tmp_path):
    with serve_objects(texts) as (address, requests):
        remote = prepare(texts, tmp_path / "remote", {"text": f"{address}/a.txt"})
    assert fingerprint(remote) == fingerprint(prepare(texts, tmp_path / "local", {"text": "a.txt"}))
    assert {each.split()[1] for each in requests} == {"a.txt"}


NO_SUCH_BUCKET = b"<Error><Code>NoSuchBucket</Code></Error>"
DENIED = b"<Error><Code>AccessDenied</Code></Error>"


@pytest.mark.parametrize(
    ("status", "body", "source", "expected"),
    [
        (404, NO_SUCH_BUCKET, {"text": "s3://nowhere/a/*.txt"}, "the bucket does not exist"),
        (403, DENIED, {"text": "s3://secret/a/*.txt"}, "access is denied"),
        (403, DENIED, {"images": "s3://secret/images", "image_size": [2, 2]}, "access is denied"),
        (403, DENIED, {"prepared": "s3://secret/data"}, "access is denied"),
        (200, b"", {"text": "s3://bucket"}, "matches no object; name objects, such as s3://bucket/"),
        (200, b"", {"text": "file:///TMP/none/*.txt"}, "no object has this key"),
        (200, b"", {"text": "file:///TMP/texts/*.md"}, "matches no object"),
        (200, b"", {"text": "file:///TMP/texts"}, "matches no object; name objects"),
        (200, b"", {"idx": {"images": "file:///TMP/none", "labels": "file:///TMP/x"}}, "there is no such object"),
        (200, b"", {"text": "http://127.0.0.1:9/*.txt"}, "cannot be listed"),
        (200, b"", {"text": "ftp://host/a.txt"}, "no store is known"),
    ],
)
def test_a_location_that_cannot_be_read_is_refused_in_a_sentence_with_its_key(
    texts, tmp_path, monkeypatch, status, body, source, expected
):
    source = DataSource.model_validate_json(json.dumps(source).replace("/TMP", str(tmp_path)))
    with serve_objects(texts, status, body) as (address, _):
        for name, value in {"ENDPOINT_URL": address, "ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "hidden"}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        with pytest.raises(RecipeError, match=r"^data\.source: ") as raised:
            prepare_cached(source, DataConfig(), tmp_path)
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "hidden" not in str(raised.value)


def test_without_a_network_the_store_is_named_with_the_key_and_the_command_may_be_tried_again(tmp_path, capsys):
    with pytest.raises(StoreUnavailable, match=r"data\.source: http://127\.0\.0\.1:9/a\.txt"):
        prepare_cached(DataSource(text="http://127.0.0.1:9/a.txt"), DataConfig(), tmp_path)
    assert main(["data", "prepare", "http://127.0.0.1:9/a.txt", "--out", str(tmp_path / "out")]) == ExitCode.UNFINISHED
    assert "data.source: http://127.0.0.1:9/a.txt" in capsys.readouterr().err


def test_a_store_that_fails_while_preparing_is_no_damage_and_finished_shards_are_kept(texts, tmp_path, monkeypatch):
    def fail(location):
        raise StoreUnavailable(location, "no answer in time")

    monkeypatch.setattr("phalanx.data.sources.open_location", fail)
    with pytest.raises(PhalanxError, match="does not answer") as raised:
        prepare(texts, tmp_path / "out", {"text": f"file://{texts}/*.txt"})
    assert raised.value.code == ExitCode.UNFINISHED
    assert (tmp_path / "out.partial").is_dir()


@pytest.fixture
def uploaded(tmp_path):
    """A local dataset of five shards, and its URL."""
    tokens = np.random.default_rng(0).integers(0, 256, 5 * 4000)
    local = dataset(tmp_path / "local", np.split(tokens, 5), documents=7)
    url = f"file://{tmp_path}/store/set"
    upload_dataset(local, parse_url(url))
    return local, url


@pytest.mark.parametrize("packing", [None, "whole"])
def test_a_dataset_at_a_url_has_the_samples_of_its_local_copy(uploaded, packing):
    runs = [
        open_data(
            DataConfig(source=DataSource(prepared=str(place)), seq_len=32, packing=packing), EvaluationConfig(), 0
        )
        for place in uploaded
    ]
    assert runs[0].fingerprint == runs[1].fingerprint
    for first in range(0, 700, 70):
        batches = [run.read_training(first, 70) for run in runs]
        assert all((batches[0][name] == batches[1][name]).all() for name in batches[0])


def test_shards_are_downloaded_one_by_one_when_they_are_read(uploaded, monkeypatch):
    monkeypatch.setattr("phalanx.data.dataset_files.DatasetFiles.fetch_ahead", lambda *_: None)
    data = open_data(DataConfig(source=DataSource(prepared=uploaded[1]), seq_len=32), EvaluationConfig(), 0)
    directory = open_dataset_files(uploaded[1]).directory
    assert not list(directory.glob("*.bin"))
    data.read_training(0, 1)
    assert len(list(directory.glob("*.bin"))) == 1


def test_shards_of_the_next_samples_are_downloaded_ahead(uploaded):
    data = open_data(DataConfig(source=DataSource(prepared=uploaded[1]), seq_len=32), EvaluationConfig(), 0)
    threads = []
    start = threading.Thread.start

    def remember(thread):
        threads.append(thread)
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", remember)
        data.read_training(0, 1)
    for thread in threads:
        thread.join()
    assert len(list(open_dataset_files(uploaded[1]).directory.glob("*.bin"))) == 5


READ_ALL = """
import sys
from phalanx.data import open_data
from phalanx.recipe.data_schema import DataConfig, DataSource, EvaluationConfig
from phalanx.storage.store import open_store
data = open_data(DataConfig(source=DataSource(prepared=sys.argv[1]), seq_len=32), EvaluationConfig(), 0)
sys.stdin.readline()
data.read_training(0, data.num_train_samples)
print(open_store(sys.argv[1]).counters.bytes_read, flush=True)
sys.stdin.readline()
"""


def test_processes_of_a_node_download_a_shard_once_and_do_not_wait_for_each_others_end(uploaded):
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READ_ALL, uploaded[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    answers = []
    with contextlib.ExitStack() as stack:
        for reader in readers:
            stack.enter_context(reader)
            stack.callback(reader.kill)
            reader.stdin.write("\n")
            reader.stdin.flush()
        answers = [reader.stdout.readline() for reader in readers]
    size = sum(path.stat().st_size for path in uploaded[0].iterdir())
    assert sum(map(int, answers)) <= 1.1 * size


def test_a_shard_that_the_store_has_lost_is_found_before_training(uploaded, tmp_path):
    (tmp_path / "store/set/shard-00003.bin").unlink()
    with pytest.raises(DataError, match=r"shard-00003\.bin: the shard is missing"):
        open_data(DataConfig(source=DataSource(prepared=uploaded[1]), seq_len=32), EvaluationConfig(), 0)


def test_a_damaged_shard_in_the_store_is_found_by_verify_and_by_reading(uploaded, tmp_path):
    assert verify_dataset(uploaded[1]).num_shards == 5
    path = tmp_path / "store/set/shard-00002.bin"
    damaged = bytearray(path.read_bytes())
    damaged[7] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=rf"{uploaded[1]}/shard-00002\.bin block 0"):
        verify_dataset(uploaded[1])
    data = open_data(DataConfig(source=DataSource(prepared=uploaded[1]), seq_len=32), EvaluationConfig(), 0)
    with pytest.raises(DataError, match="the checksum differs"):
        data.read_training(0, data.num_train_samples)


def test_a_dataset_over_http_is_read_without_listing(uploaded):
    with serve_objects(uploaded[0]) as (address, requests):
        data = open_data(DataConfig(source=DataSource(prepared=address + "/"), seq_len=32), EvaluationConfig(), 0)
        data.read_training(0, data.num_train_samples)
    local = open_data(DataConfig(source=DataSource(prepared=str(uploaded[0])), seq_len=32), EvaluationConfig(), 0)
    assert data.fingerprint == local.fingerprint
    assert not [each for each in requests if each == "GET "]


def test_a_dataset_that_does_not_fit_the_cache_is_refused_before_training(uploaded, monkeypatch):
    monkeypatch.setenv("PHALANX_STORE_CACHE_GIB", "1e-6")
    with pytest.raises(RecipeError, match="do not fit into the cache"):
        prepare_cached(DataSource(prepared=uploaded[1]), DataConfig(), uploaded[0])


def test_prepare_verify_and_inspect_take_a_url(texts, tmp_path, capsys):
    url = f"file://{tmp_path}/store/made"
    assert main(["data", "prepare", f"file://{texts}/*.txt", "--out", url, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["path"] == url
    assert made["fingerprint"] == fingerprint(prepare(texts, tmp_path / "local", {"text": "*.txt"}))
    assert main(["data", "verify", url]) == 0
    assert capsys.readouterr().out.startswith(f"ok  {url}: 1 shard")
    assert main(["data", "prepare", f"{texts}/*.txt", "--out", url]) == ExitCode.USAGE
    assert "already exists" in capsys.readouterr().err
    assert main(["data", "verify", f"file://{tmp_path}/store/none"]) == ExitCode.DATA
    assert "no dataset here" in capsys.readouterr().err


def test_a_killed_upload_leaves_no_dataset(texts, tmp_path, monkeypatch):
    local = prepare(texts, tmp_path / "local", {"text": "*.txt"})
    url = parse_url(f"file://{tmp_path}/store/killed")
    upload = Store.upload

    def fail_at_sidecar(store, key, path):
        if key.endswith(".idx"):
            raise KeyboardInterrupt
        upload(store, key, path)

    monkeypatch.setattr("phalanx.storage.store.Store.upload", fail_at_sidecar)
    with pytest.raises(KeyboardInterrupt):
        upload_dataset(local, url)
    assert not os.path.exists(f"{tmp_path}/store/killed/manifest.json")


def test_a_place_that_cannot_be_written_is_refused_before_preparing(texts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("phalanx.app.data.prepare_cached", lambda *_, **__: pytest.fail("prepared"))
    with serve_objects(texts, 403, DENIED) as (address, _):
        for name, value in {"ENDPOINT_URL": address, "ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "hidden"}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        assert main(["data", "prepare", f"{texts}/*.txt", "--out", "s3://secret/set"]) == ExitCode.USAGE
    assert "access is denied" in capsys.readouterr().err


def test_a_tokenizer_at_a_url_is_that_of_the_local_file(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    root = write_texts(tmp_path / "root", {"a.txt": "some words and more words\n" * 500})
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"words": 0, "</s>": 1, "?": 2}, unk_token="?"))
    (root / "tok").mkdir()
    tokenizer.save(str(root / "tok" / "tokenizer.json"))
    (root / "tok" / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (root / "tok" / "weights.safetensors").write_bytes(b"not needed")
    local = prepare(root, tmp_path / "local", {"text": "*.txt"}, "tok")
    for number, name in enumerate(("tok", "tok/tokenizer.json")):
        out = prepare(root, tmp_path / f"out-{number}", {"text": "*.txt"}, f"file://{root}/{name}")
        assert fingerprint(out) == fingerprint(local)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    with pytest.raises(RecipeError, match=r"^data\.tokenizer: .*there is no such object"):
        prepare(root, tmp_path / "bad", {"text": "*.txt"}, f"file://{root}/tok/tokenizer2.json")


def test_a_resolved_recipe_keeps_the_url_of_prepared_data(uploaded, tmp_path):
    given = DataConfig(source=DataSource(prepared=uploaded[1]), seq_len=32)
    data, _ = prepare_all_sources(given, EvaluationConfig(), tmp_path)
    assert data.source[0].prepared == uploaded[1]
