"""Training with data and run in a real S3 store: the digest is that of the local run, whatever fails."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

from ceph_cluster import CEPH_MISSING, SECRET_KEY, CephCluster, ceph_cluster
from phalanx.errors import ExitCode
from phalanx.run import Run
from phalanx.storage.errors import ObjectExists
from phalanx.storage.run_objects import find_local_directory
from phalanx.storage.store import open_store
from train_harness import TrainHarness, Values, plan_fault, random_words, read_digest, wait_until, write_faults

if CEPH_MISSING is not None:
    pytest.skip(CEPH_MISSING, allow_module_level=True)

BUCKET = "training"
LIBFAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
TEXT = random_words(1, 700)


@pytest.fixture(scope="module")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CephCluster]:
    with ceph_cluster(tmp_path_factory.mktemp("ceph"), osds=3) as cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        cluster.make_bucket(BUCKET)
        store = S3Store(BUCKET, config=cluster.config, client_options={"allow_http": True})
        obstore.put(store, "corpus/few words.txt", TEXT.encode())
        yield cluster


def test_one_of_eight_writers_creates_an_object(ceph: CephCluster) -> None:
    """What a lease relies on."""
    store = open_store(f"s3://{BUCKET}/leases")

    def create(number: int) -> bool:
        try:
            store.write("leases/one", b"%d" % number, if_absent=True)
        except ObjectExists:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(create, range(8))) == 1


def changes(**more: object) -> Values:
    return {"data": {"source": {"text": f"s3://{BUCKET}/corpus/*.txt"}}, **more}


def test_a_run_with_data_and_checkpoints_in_the_store_survives_a_worker_and_a_disk(
    lab: TrainHarness, ceph: CephCluster
) -> None:
    url = f"s3://{BUCKET}/runs/survives"
    faults = [plan_fault(6), plan_fault(8, "slow", delay=1.0, attempt=None)]
    with lab.environment():
        write_faults(Run(find_local_directory(url, "runs")), faults)
    recipe = lab.recipe_file(changes(), "ceph")
    with lab.start("train", recipe, "--run", url, "--nproc-per-node", "2") as train:
        store = S3Store(BUCKET, config=ceph.config, client_options={"allow_http": True})

        def has_checkpoint() -> bool:
            names = [each["path"] for chunk in obstore.list(store, "runs/survives/checkpoints") for each in chunk]
            return any(name.endswith("MANIFEST.json") for name in names)

        wait_until(has_checkpoint, 100, "a checkpoint in the store")
        ceph.kill_osd(0)
        _, errors = train.communicate(timeout=200)
    ceph.start_osd(0)
    assert train.returncode == ExitCode.DONE, errors
    assert "restarting" in errors or "attempt" in errors, errors
    assert read_digest(errors) == lab.train_reference({}, 2).digest
    assert SECRET_KEY not in errors
    report = lab.command("report", url)
    assert "done: 12 of 12 steps" in report.stdout, report.stderr
    for chunk in obstore.list(store, "runs/survives"):
        for each in chunk:
            assert SECRET_KEY.encode() not in bytes(obstore.get(store, each["path"]).bytes()), each["path"]


def slow_run(lab: TrainHarness, url: str) -> Run:
    """The local directory of a run at a URL, which is slow in step 5."""
    with lab.environment():
        run = Run(find_local_directory(url, "runs"))
    write_faults(run, [plan_fault(5, "slow", delay=3.0)])
    return run


def wait_for_step_4(run: Run) -> None:
    wait_until(lambda: run.events.is_file() and '"step": 4' in run.events.read_text(), 100, "step 4")


def test_a_gateway_that_restarts_delays_a_run_and_ends_it_in_the_same_digest(
    lab: TrainHarness, ceph: CephCluster
) -> None:
    url = f"s3://{BUCKET}/runs/restarted"
    run = slow_run(lab, url)
    recipe = lab.recipe_file(changes(), "ceph-restarted")
    with lab.start("train", recipe, "--run", url) as train:
        wait_for_step_4(run)
        ceph.kill_gateway()
        ceph.start_gateway()
        _, errors = train.communicate(timeout=200)
    assert train.returncode == ExitCode.DONE, errors
    assert read_digest(errors) == lab.train_reference({}).digest


def test_a_run_whose_key_is_refused_for_a_while_ends_in_the_same_digest(lab: TrainHarness, ceph: CephCluster) -> None:
    url = f"s3://{BUCKET}/runs/expired"
    run = slow_run(lab, url)
    recipe = lab.recipe_file(changes(), "ceph-expired")
    with lab.start("train", recipe, "--run", url) as train:
        wait_for_step_4(run)
        ceph.remove_key()
        try:
            assert train.stderr is not None
            assert any("InvalidAccessKeyId; trying again" in line for line in train.stderr)
        finally:
            ceph.restore_key()
        _, errors = train.communicate(timeout=200)
    assert train.returncode == ExitCode.DONE, errors
    assert read_digest(errors) == lab.train_reference({}).digest


@pytest.mark.parametrize(
    ("where", "environment", "reason"),
    [
        ("s3://no-such-bucket/run", {}, "bucket does not exist"),
        (f"s3://{BUCKET}/runs/denied", {"AWS_SECRET_ACCESS_KEY": "wrong-secret"}, "access is denied"),
        (
            f"s3://{BUCKET}/runs/unreachable",
            {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"},
            "nothing answers|no answer|sending",
        ),
        pytest.param(
            f"s3://{BUCKET}/runs/skewed",
            {"LD_PRELOAD": str(LIBFAKETIME), "FAKETIME": "+30m"},
            "clock of this machine",
            marks=pytest.mark.skipif(not LIBFAKETIME.is_file(), reason="needs libfaketime: apt install faketime"),
        ),
    ],
)
def test_a_store_that_cannot_be_used_is_one_sentence_before_any_work(
    lab: TrainHarness, ceph: CephCluster, where: str, environment: dict[str, str], reason: str
) -> None:
    recipe = lab.recipe_file({}, "ceph-refused")
    with lab.start("train", recipe, "--run", where, variables=environment) as train:
        _, errors = train.communicate(timeout=100)
    assert train.returncode == ExitCode.USAGE, errors
    assert re.search(reason, errors.splitlines()[-1]), errors
    assert "Traceback" not in errors
    assert "wrong-secret" not in errors
