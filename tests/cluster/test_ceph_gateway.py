"""A real S3 server: what `phalanx.storage` relies on, and how the server fails when a disk or the gateway dies."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import obstore
import pytest

import ceph_cluster as helper
from ceph_cluster import CEPH_MISSING, CephCluster, GatewayRequest, ceph_cluster

if CEPH_MISSING is not None:
    pytest.skip(CEPH_MISSING, allow_module_level=True)

PART = 5 * 1024**2
"""The smallest part of a multipart upload, but for the last."""
MAX_MEMORY_BYTES = 1024**3


@pytest.fixture(scope="module")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CephCluster]:
    with ceph_cluster(tmp_path_factory.mktemp("ceph"), osds=3) as cluster:
        yield cluster


@pytest.fixture
def bucket(ceph: CephCluster) -> str:
    """A bucket of the test's own."""
    name = f"bucket-{uuid.uuid4()}"
    ceph.make_bucket(name)
    return name


def open_store(ceph: CephCluster, bucket: str, *, max_retries: int = 10, **config: str) -> Any:
    return obstore.store.S3Store(
        bucket,
        config={**ceph.config, **config},
        client_options={"allow_http": True},
        retry_config={"max_retries": max_retries},
    )


@pytest.fixture
def store(ceph: CephCluster, bucket: str) -> Any:
    return open_store(ceph, bucket)


def list_keys(store: Any, prefix: str | None = None) -> list[str]:
    return [entry["path"] for page in store.list(prefix) for entry in page]


def test_an_object_is_written_listed_and_read_in_ranges(store: Any) -> None:
    content = os.urandom(1000)
    store.put("runs/a/state", content)
    store.put("runs/b/state", b"")
    assert store.get("runs/a/state").bytes() == content
    assert list_keys(store) == ["runs/a/state", "runs/b/state"]
    assert store.list_with_delimiter("runs")["common_prefixes"] == ["runs/a", "runs/b"]
    assert store.get_range("runs/a/state", start=10, length=20) == content[10:30]
    assert store.get_range("runs/a/state", start=990, length=20) == content[990:]  # shorter, and no error
    assert store.get_ranges("runs/a/state", starts=[0, 500], lengths=[5, 5]) == [content[:5], content[500:505]]
    with pytest.raises(obstore.exceptions.GenericError, match="416 Range Not Satisfiable"):
        store.get_range("runs/a/state", start=1000, length=1)
    store.delete("runs/a/state")
    store.delete("runs/a/state")  # no error
    assert list_keys(store) == ["runs/b/state"]


def test_the_environment_is_enough(ceph: CephCluster, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ceph.environment.items():
        monkeypatch.setenv(name, value)
    obstore.store.from_url(f"s3://{bucket}/below").put("key", b"content")
    assert obstore.store.S3Store(bucket).get("below/key").bytes() == b"content"


@pytest.mark.parametrize("key", ["a b", "a+b", "ä/ü ß", "日本", "a%20b", "a=b&c", "q?z#1", "'\"", "~:@!$,;()"])
def test_a_key_is_listed_as_it_was_written(store: Any, key: str) -> None:
    store.put(key, key.encode())
    assert store.get(key).bytes() == key.encode()
    assert list_keys(store) == [key]


def test_more_keys_than_a_page_are_listed(store: Any) -> None:
    keys = [f"many/{number:04}" for number in range(1005)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda key: store.put(key, b""), keys))
    assert list_keys(store, "many/") == keys


def try_put(store: Any, content: bytes, mode: Any) -> str:
    try:
        store.put("lease", content, mode=mode)
    except obstore.exceptions.BaseError as error:
        return type(error).__name__
    return content.decode()


def test_one_of_eight_writers_creates_an_object(store: Any) -> None:
    with ThreadPoolExecutor(8) as threads:
        outcomes = Counter(threads.map(lambda number: try_put(store, b"%d" % number, "create"), range(8)))
    assert outcomes.pop("AlreadyExistsError") == 7
    assert [store.get("lease").bytes()] == [winner.encode() for winner in outcomes]


def test_one_of_eight_writers_updates_an_object(store: Any) -> None:
    store.put("lease", b"first")
    etag = store.head("lease")["e_tag"]
    # this gateway compares the header with the ETag as it stores it, without its quotes, in PUT, though not in GET
    assert try_put(store, b"second", {"e_tag": etag}) == "PreconditionError"
    mode = {"e_tag": etag.strip('"')}
    with ThreadPoolExecutor(8) as threads:
        outcomes = Counter(threads.map(lambda number: try_put(store, b"%d" % number, mode), range(8)))
    assert outcomes.pop("PreconditionError") == 7
    assert [store.get("lease").bytes()] == [winner.encode() for winner in outcomes]
    with pytest.raises(obstore.exceptions.PreconditionError):
        store.get("lease", options={"if_match": etag})


def test_an_upload_in_three_parts_is_one_object(ceph: CephCluster, bucket: str, store: Any) -> None:
    content = os.urandom(2 * PART + 1)
    store.put("large", content, chunk_size=PART)
    assert store.get("large").bytes() == content
    assert re.fullmatch(r'"[0-9a-f]{32}-3"', store.head("large")["e_tag"])
    assert ceph.list_multiparts(bucket) == []


def test_an_upload_that_fails_is_aborted_and_an_abandoned_one_stays(ceph: CephCluster, bucket: str, store: Any) -> None:
    with contextlib.suppress(ZeroDivisionError), obstore.open_writer(store, "failed", buffer_size=PART) as writer:
        writer.write(os.urandom(2 * PART))
        assert ceph.list_multiparts(bucket) == ["failed"]
        raise ZeroDivisionError
    assert ceph.list_multiparts(bucket) == []
    writer = obstore.open_writer(store, "abandoned", buffer_size=PART)
    writer.write(os.urandom(2 * PART))
    del writer
    assert ceph.list_multiparts(bucket) == ["abandoned"]
    assert list_keys(store) == []


def test_requests_and_bytes_are_counted(ceph: CephCluster, bucket: str, store: Any) -> None:
    before, bytes_before = len(ceph.gateway_requests()), ceph.gateway_bytes_sent()
    store.put("key", os.urandom(1000))
    store.get_range("key", start=0, length=100)
    store.get("key").bytes()
    store.head("key")
    path = f"/{bucket}/key"
    assert ceph.gateway_requests()[before:] == [
        GatewayRequest("PUT", path, 200, 1000, ""),
        GatewayRequest("GET", path, 206, 100, "bytes=0-99"),
        GatewayRequest("GET", path, 200, 1000, ""),
        GatewayRequest("HEAD", path, 200, 0, ""),
    ]
    assert ceph.gateway_bytes_sent() - bytes_before == 1100


def test_errors_name_the_cause(ceph: CephCluster, bucket: str, store: Any) -> None:
    store.put("key", b"")
    denied = obstore.exceptions.PermissionDeniedError
    with pytest.raises(FileNotFoundError, match="NoSuchKey"):
        store.get("missing")
    with pytest.raises(FileNotFoundError, match="NoSuchBucket"):
        open_store(ceph, "missing").get("key")
    with pytest.raises(obstore.exceptions.GenericError, match="NoSuchBucket"):  # listing has no key to name
        list_keys(open_store(ceph, "missing"))
    with pytest.raises(denied, match="InvalidAccessKeyId"):
        open_store(ceph, bucket, access_key_id="wrong").get("key")
    with pytest.raises(denied, match="SignatureDoesNotMatch"):
        open_store(ceph, bucket, secret_access_key="wrong").get("key")


def test_reads_and_writes_survive_a_dead_osd(ceph: CephCluster, store: Any) -> None:
    content = os.urandom(2 * PART)
    store.put("before", content)
    for number in range(ceph.osds):
        ceph.kill_osd(number)
        started = time.monotonic()
        assert store.get("before").bytes() == content
        store.put("after", content)
        assert store.get("after").bytes() == content
        assert time.monotonic() - started < 30
        ceph.start_osd(number)
    store.put("after", b"")


def test_a_read_survives_a_restart_of_the_gateway(ceph: CephCluster, store: Any) -> None:
    content = os.urandom(64 * 1024**2)
    store.put("large", content)
    chunks = iter(store.get("large").stream(min_chunk_size=1024**2))
    received = bytes(next(chunks))
    ceph.kill_gateway()
    ceph.start_gateway()
    for chunk in chunks:
        received += bytes(chunk)
    assert received == content
    resumed = ceph.gateway_requests()[-1]
    assert re.fullmatch(r"bytes=[1-9]\d*-\d+", resumed.range)
    assert resumed.bytes < len(content)


def test_a_read_from_a_dead_gateway_fails_after_its_retries(ceph: CephCluster, bucket: str, store: Any) -> None:
    content = os.urandom(64 * 1024**2)
    store.put("large", content)
    chunks = iter(open_store(ceph, bucket, max_retries=2).get("large").stream(min_chunk_size=1024**2))
    next(chunks)
    ceph.kill_gateway()
    try:
        started = time.monotonic()
        with pytest.raises(obstore.exceptions.GenericError, match="after 2 retries"):
            list(chunks)
        assert time.monotonic() - started < 20
    finally:
        ceph.start_gateway()
    assert store.get("large").bytes() == content


def test_the_daemons_take_less_than_a_gigabyte(ceph: CephCluster) -> None:
    assert ceph.peak_memory_bytes() < MAX_MEMORY_BYTES


def test_nothing_is_left_when_the_process_is_killed() -> None:
    command = [sys.executable, "-u", helper.__file__]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    match = re.search(r"files in (\S+);", first)
    assert match is not None, first
    directory = Path(match[1])
    deadline = time.monotonic() + 10
    while directory.exists() or find_processes_in(directory):
        assert time.monotonic() < deadline, (directory, find_processes_in(directory))
        time.sleep(0.1)


def find_processes_in(directory: Path) -> list[str]:
    """Processes whose working directory this is."""
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "cwd").startswith(str(directory)):
                processes.append((process / "comm").read_text().strip())
        except OSError:
            continue
    return processes


def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "radosgw" else name)
    assert helper.find_obstacle() == (
        "an S3 server to test on: not installed: radosgw (Debian: apt-get install ceph-mon ceph-osd radosgw)"
    )
