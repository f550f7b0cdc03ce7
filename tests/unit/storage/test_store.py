"""Stores: URLs, retries that are counted, ranges of an object that does not change, and errors without secrets."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from phalanx.errors import DataError, UsageError, is_storage_error
from phalanx.storage.errors import NotFound, ObjectChanged, ObjectExists, StoreUnavailable, describe, refuse
from phalanx.storage.store import (
    FIRST_CONTACT_S,
    RANGE_BYTES,
    Store,
    check_writable,
    make_client,
    open_location,
    open_store,
)
from phalanx.storage.url import StoreUrl, parse_url

Answer = Callable[[BaseHTTPRequestHandler, bytes], None]
CONTENT = bytes(range(256)) * 100


def send(handler: BaseHTTPRequestHandler, status: int, body: bytes = b"", etag: str = '"1"') -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.send_header("ETag", etag)
    handler.send_header("Last-Modified", "Mon, 30 Nov 2026 00:00:00 GMT")
    if status == 206:
        start = int(handler.headers["Range"].removeprefix("bytes=").partition("-")[0])
        handler.send_header("Content-Range", f"bytes {start}-{start + len(body) - 1}/{len(CONTENT)}")
    handler.end_headers()
    handler.wfile.write(body)


def send_range(handler: BaseHTTPRequestHandler) -> None:
    if handler.headers["If-Match"] not in (None, '"1"'):
        send(handler, 412)
    elif given := handler.headers["Range"]:
        first, _, last = given.removeprefix("bytes=").partition("-")
        send(handler, 206, CONTENT[int(first) : int(last) + 1])
    else:
        send(handler, 200, b"" if handler.command == "HEAD" else CONTENT)


@contextmanager
def serving(*answers: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[Store]:
    """A store of a server that gives one answer after another, and the content from then on."""
    waiting = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            (waiting.pop(0) if waiting else send_range)(self)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield Store(StoreUrl("http", f"127.0.0.1:{server.server_port}"), make_client, sleep=lambda _: None)
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    ("text", "bucket", "key"),
    [
        ("s3://bucket/a b+c/ü%20.txt", "bucket", "a b+c/ü%20.txt"),
        ("s3://bucket", "bucket", ""),
        ("gs://bucket/key/", "bucket", "key"),
        ("az://container/key", "container", "key"),
        ("https://host:8080/path", "host:8080", "path"),
        ("file:///directory/file", "", "directory/file"),
        ("hf://owner/name@main", "owner", "name@main"),
    ],
)
def test_a_url_has_a_bucket_and_a_key_as_stored(text: str, bucket: str, key: str) -> None:
    url = parse_url(text)
    assert (url.bucket, url.key) == (bucket, key)
    assert str(url) == text.rstrip("/")
    assert (url / "more").parent == url


@pytest.mark.parametrize(
    "text", ["s3://", "ftp://host/x", "s3://bucket/a/../b", "s3://bucket/a//b", "https://host/x?version=1"]
)
def test_a_url_that_no_store_can_have_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"expected|stores do not"):
        parse_url(text)


@pytest.mark.parametrize("text", ["s3://KEYID:hunter2@bucket/x", "https://host/x?X-Amz-Signature=hunter2"])
def test_credentials_in_a_url_are_refused_without_showing_them(text: str) -> None:
    with pytest.raises(UsageError, match="holds credentials") as raised:
        parse_url(text)
    assert "hunter2" not in str(raised.value)


def test_answers_that_pass_are_retried_and_counted() -> None:
    with serving(lambda h: send(h, 503), lambda h: send(h, 429)) as store:
        assert store.read("key") == CONTENT
        assert sum(store.counters.retries.values()) == 2
        assert store.counters.requests == 3
        assert store.counters.bytes_read == len(CONTENT)


def test_a_body_that_breaks_off_is_read_again() -> None:
    def torn(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(206)
        handler.send_header("Content-Length", "1000")
        handler.send_header("Content-Range", f"bytes 0-999/{len(CONTENT)}")
        handler.send_header("Last-Modified", "Mon, 30 Nov 2026 00:00:00 GMT")
        handler.end_headers()
        handler.wfile.write(b"x" * 10)
        handler.close_connection = True

    with serving(torn) as store:
        assert store.read_range("key", 0, 1000) == CONTENT[:1000]
        assert store.counters.retries


def test_an_object_that_changes_under_its_reader_is_an_error() -> None:
    with serving() as store, pytest.raises(ObjectChanged, match="changed"):
        store.read_range("key", 0, 10, '"other"')


def test_a_missing_object_is_named() -> None:
    with serving(lambda h: send(h, 404)) as store, pytest.raises(NotFound, match="key: there is no such object"):
        store.read("key")


def test_denied_access_is_not_retried() -> None:
    with serving(lambda h: send(h, 403)) as store:
        with pytest.raises(UsageError, match="access is denied"):
            store.read("key")
        assert store.counters.requests == 1


def test_a_store_that_never_answers_ends_as_a_storage_error() -> None:
    times = iter(range(0, 10_000, int(FIRST_CONTACT_S / 2)))
    store = Store(StoreUrl("http", "127.0.0.1:9"), make_client, clock=lambda: next(times), sleep=lambda _: None)
    with pytest.raises(StoreUnavailable) as raised:
        store.read("key")
    assert is_storage_error(raised.value)
    assert raised.value.filename == "http://127.0.0.1:9/key"


def test_a_second_writer_of_a_new_object_loses(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    key = f"{tmp_path}/lease".lstrip("/")
    store.write(key, b"first", if_absent=True)
    with pytest.raises(ObjectExists):
        store.write(key, b"second", if_absent=True)
    assert store.read(key) == b"first"


@pytest.mark.parametrize("key", ["logs/../../out", "..", "a/.."])
def test_a_key_that_leads_out_of_a_local_copy_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket may be a stranger's."""
    meta = {"path": key, "size": 1, "e_tag": None, "last_modified": datetime.now(UTC)}
    monkeypatch.setattr("obstore.list", lambda *_, **__: [[meta]])
    with pytest.raises(DataError, match="leads out"):
        open_store("file:///").list_objects("")


def test_reasons_hold_no_credentials() -> None:
    text = "<Code>InvalidAccessKeyId</Code><AWSAccessKeyId>AKIASECRET</AWSAccessKeyId> Signature=SECRET, sig=SECRET"
    assert "SECRET" not in describe(Exception(text))
    assert "SECRET" not in describe(Exception("request with Signature=SECRET&X-Amz-Credential=SECRET failed"))


def test_a_refusal_is_named_by_the_code_of_the_store_and_a_wrong_clock_as_such() -> None:
    answer = "Client error with status 403 Forbidden: <Error><Code>{}</Code></Error>"
    assert describe(Exception(answer.format("InvalidAccessKeyId"))) == "InvalidAccessKeyId"
    assert "clock of this machine" in str(refuse("s3://bucket", Exception(answer.format("RequestTimeTooSkewed"))))


def test_an_object_is_a_seekable_file(tmp_path: Path) -> None:
    content = bytes(range(251)) * (3 * RANGE_BYTES // 251)
    (tmp_path / "large").write_bytes(content)
    with open_location(f"file://{tmp_path}/large") as file:
        assert file.read(1000) == content[:1000]
        file.seek(RANGE_BYTES - 10)
        assert file.read(20) == content[RANGE_BYTES - 10 : RANGE_BYTES + 10]
        file.seek(-5, 2)
        assert file.read() == content[-5:]
        file.seek(0)
        assert file.read() == content


@pytest.mark.parametrize(
    ("url", "variables", "reason"),
    [
        ("az://box", {}, "no credentials were found, and this machine has no role; set AZURE_STORAGE_ACCOUNT_NAME"),
        ("az://box", {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ACCOUNT_KEY": "%"}, "Invalid Access Key"),
        ("gs://box", {"GOOGLE_SERVICE_ACCOUNT": "/no/key.json"}, "/no/key.json: No such file"),
        ("s3://box", {"AWS_ENDPOINT_URL": "::1"}, r"AWS_ENDPOINT_URL=::1: no address of a store; expected http"),
    ],
)
def test_a_client_that_cannot_be_made_is_one_line_about_the_url_or_variable(
    monkeypatch: pytest.MonkeyPatch, url: str, variables: dict[str, str], reason: str
) -> None:
    for name in [name for name in os.environ if name.startswith(("AZURE_", "GOOGLE_", "AWS_"))]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=reason) as caught:
        Store(parse_url(url), make_client)
    assert "\n" not in str(caught.value)


def test_missing_credentials_are_named_for_each_store() -> None:
    error = Exception("Error performing PUT http://169.254.169.254/latest/api/token: 403 Forbidden")
    assert "no credentials were found, and this machine has no role; set AWS_ACC" in str(refuse("s3://box/key", error))
    assert "set GOOGLE_APPLICATION_CREDENTIALS" in str(refuse("gs://box/key", error))
    assert "set AZURE_STORAGE_ACCOUNT_NAME" in str(refuse("az://box/key", error))


def test_a_request_that_a_store_does_not_know_is_not_tried_again() -> None:
    error = Exception("Server returned non-2xx status code: 501 Not Implemented: timed out waiting")
    assert str(refuse("gs://box/key", error)) == "gs://box/key: 501 Not Implemented"


def test_a_server_that_is_not_there_is_called_so_without_the_name_of_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ENDPOINT_URL": "http://127.0.0.1:9", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr("phalanx.storage.store.FIRST_CONTACT_S", 0.0)
    with pytest.raises(StoreUnavailable) as caught:
        check_writable(parse_url("s3://box/run"))
    assert (caught.value.filename, caught.value.strerror) == ("s3://box/run", "nothing answers there")
