"""Training with data and run in Azure's storage, here its emulator Azurite: the digest is that of the local run."""

import base64
import hmac
import os
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from phalanx.errors import ExitCode
from phalanx.run import Run
from phalanx.storage.run_objects import find_local_directory
from server_processes import find_free_port, run_server
from train_harness import TrainHarness, plan_fault, random_words, read_digest, write_faults

AZURITE = Path(__file__).parents[2] / "build/azurite/node_modules/.bin/azurite-blob"
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account that every Azurite has, as its documentation says."""
WRONG_KEY = base64.b64encode(b"wrong" * 8).decode()

if not AZURITE.exists():
    pytest.skip("no Azurite here: make build/azurite/.installed", allow_module_level=True)


def make_container(endpoint: str, name: str) -> None:
    date = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
    lines = ["PUT", *[""] * 11, *(f"{key}:{value}" for key, value in headers.items())]
    lines += [f"/{ACCOUNT}/{ACCOUNT}/{name}", "restype:container"]
    signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), "\n".join(lines).encode(), "sha256")).decode()
    headers |= {"Authorization": f"SharedKey {ACCOUNT}:{signature}", "Content-Length": "0"}
    request = urllib.request.Request(f"{endpoint}/{name}?restype=container", method="PUT", headers=headers)
    urllib.request.urlopen(request, timeout=20).close()


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder, port = tmp_path_factory.mktemp("azurite"), find_free_port()
    command = [str(AZURITE), "--inMemoryPersistence", "--blobPort", str(port), "--silent", "--skipApiVersionCheck"]
    command += ["--disableTelemetry"]
    with run_server(command, port, folder / "log"), pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AZURE_")]:
            patch.delenv(name)
        patch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
        patch.setenv("AZURITE_BLOB_STORAGE_URL", f"http://127.0.0.1:{port}")
        make_container(f"http://127.0.0.1:{port}/{ACCOUNT}", "training")
        yield


def test_a_killed_run_resumes_from_the_store_and_ends_in_the_digest_of_the_local_run(
    lab: TrainHarness, azurite: None
) -> None:
    (lab.folder / "azure.txt").write_text(random_words(1, 700))
    prepared = lab.command("data", "prepare", lab.folder / "azure.txt", "--out", "az://training/few words")
    assert prepared.returncode == ExitCode.DONE, prepared.stderr
    recipe = lab.recipe_file({"data": {"source": {"text": None, "prepared": "az://training/few words"}}}, "azure")
    url = "az://training/runs/killed"
    with lab.environment():
        write_faults(Run(find_local_directory(url, "runs")), [plan_fault(6, "kill-agent")])
    with lab.start("train", recipe, "--run", url, "--nproc-per-node", "2") as killed:
        killed.communicate(timeout=150)
    assert killed.returncode < 0
    resumed = lab.command("train", "--run", url, "--nproc-per-node", "2")
    assert resumed.returncode == ExitCode.DONE, resumed.stderr
    assert read_digest(resumed.stderr) == lab.train_reference({}, 2).digest
    verified = lab.command("checkpoint", "verify", url)
    assert verified.returncode == ExitCode.DONE, verified.stderr


@pytest.mark.parametrize(
    ("url", "variables", "reason"),
    [
        ("az://no-such-container/run", {}, "bucket does not exist"),
        (
            "az://training/run",
            {"AZURE_STORAGE_ACCOUNT_KEY": WRONG_KEY},
            "access is denied",
        ),
    ],
)
def test_a_container_that_cannot_be_used_is_one_sentence_before_any_work(
    lab: TrainHarness, azurite: None, url: str, variables: dict[str, str], reason: str
) -> None:
    with lab.start("train", lab.recipe_file({}, "azure-refused"), "--run", url, variables=variables) as train:
        _, errors = train.communicate(timeout=100)
    assert train.returncode == ExitCode.USAGE, errors
    assert reason in errors.splitlines()[-1]
    assert "Traceback" not in errors
