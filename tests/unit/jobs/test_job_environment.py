"""Variables of the submitter's shell that a job gets, on each backend."""

import logging
from pathlib import Path

import pytest

from phalanx.jobs.backends.base import Backend
from phalanx.jobs.backends.kubernetes.backend import KubernetesBackend
from phalanx.jobs.backends.local import inherit_environment
from phalanx.jobs.backends.ray.backend import RayBackend
from phalanx.jobs.backends.slurm.backend import SlurmBackend
from phalanx.jobs.spec import Job

PLAIN = {
    "MLFLOW_EXPERIMENT_NAME": "mine",
    "WANDB_MODE": "offline",
    "NCCL_SOCKET_IFNAME": "ib0",
    "UCX_NET_DEVICES": "mlx5_0:1",
    "FI_PROVIDER": "efa",
    "https_proxy": "http://proxy:3128",
    "AWS_PROFILE": "lab",
    "OMP_NUM_THREADS": "3",
}
FILES = {"MLFLOW_TRACKING_URI": "sqlite:////home/me/store.db", "SSL_CERT_FILE": "/etc/ca.pem", "HF_HOME": "/scratch/hf"}
SECRET = {"WANDB_API_KEY": "1", "HF_TOKEN": "2", "HTTPS_PROXY": "http://me:password@proxy:3128"}
PLACES = {"CUDA_VISIBLE_DEVICES": "0", "PHALANX_NODE_RANK": "1", "PHALANX_EVENTS_FD": "3", "EDITOR": "vi"}
SHELL = {**PLAIN, **FILES, **SECRET, **PLACES}


def open_backends(folder: Path) -> dict[str, Backend]:
    return {
        "slurm": SlurmBackend(lambda argv: (0, "slurm 23.11.4", ""), folder, SHELL),
        "kubernetes": KubernetesBackend(environ=SHELL),
        "ray": RayBackend("http://head:8265", environ=SHELL),
    }


@pytest.mark.parametrize("name", ["slurm", "kubernetes", "ray"])
def test_a_job_gets_the_variables_of_its_programs_and_is_warned_about_the_others(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"image": "x"} if name == "kubernetes" else {}
    job = Job("a", ("true",), tmp_path, backend_options=options, environment={"OMP_NUM_THREADS": "1"})
    with caplog.at_level(logging.WARNING):
        environment = open_backends(tmp_path)[name].render(job).job.environment
    inherited = {**PLAIN, "OMP_NUM_THREADS": "1"} | (FILES if name == "slurm" else {})
    assert environment == inherited
    warned = next(text for text in caplog.messages if "does not get" in text)
    assert all(variable in warned for variable in (SECRET | ({} if name == "slurm" else FILES)))
    assert not any(variable in warned for variable in (*inherited, *PLACES))


def test_a_secret_of_a_job_is_not_missed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job("a", ("true",), tmp_path, secrets=tuple(SECRET))
    request = open_backends(tmp_path)["slurm"].render(job)
    assert "does not get" not in caplog.text
    assert not any(value in str(request) for value in ("password", "WANDB_API_KEY=1"))


def test_a_job_of_this_machine_also_gets_its_devices() -> None:
    environment = inherit_environment({**SHELL, "HIP_VISIBLE_DEVICES": "1"})
    assert environment.items() >= {**PLAIN, **FILES, "CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"}.items()
    assert not environment.keys() & {*SECRET, "PHALANX_NODE_RANK", "PHALANX_EVENTS_FD", "EDITOR"}
