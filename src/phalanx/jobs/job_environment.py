"""Choose the variables of the submitter's environment that a job gets: one list by purpose, for all backends."""

import re
from collections.abc import Collection, Iterator, Mapping

from phalanx.cluster.environment import is_secret

PREFIXES_BY_PURPOSE = {
    "trackers": ("WANDB_", "MLFLOW_", "TRACKIO_"),
    "networks": ("NCCL_", "RCCL_", "GLOO_", "UCX_", "FI_", "TORCH_NCCL_", "TORCH_GLOO_"),
    "proxies and certificates": (
        *("http_proxy", "https_proxy", "no_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"),
        *("SSL_CERT_", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    ),
    "storage": ("AWS_", "GOOGLE_", "CLOUDSDK_", "AZURE_", "S3_ENDPOINT"),
    "hubs": ("HF_", "HUGGINGFACE_", "TRANSFORMERS_"),
    "threads": ("OMP_", "MKL_", "KMP_", "GOMP_"),
    "torch": ("TORCH", "PYTORCH_"),
    "Phalanx": ("PHALANX_",),
}
"""Names, or how names begin. Variables of devices and of paths of programs belong to the place where a job runs."""
NOT_INHERITED = re.compile(
    "PHALANX_(NODE_.*|NUM_NODES|LEADER_ADDR|SNAPSHOT_.*|EVENTS_FD|ATTEMPT|RENDEZVOUS_ID|STORE_.*|JOB_TAG)"
)
"""Variables of the node contract, of workers and of a snapshot: a job has its own."""
INHERITED_PREFIXES = tuple(prefix for prefixes in PREFIXES_BY_PURPOSE.values() for prefix in prefixes)
CREDENTIALS_IN_URL = re.compile(r"://[^/@\s]+:[^/@\s]+@")
LOCAL_PATH = re.compile(r"(?:^|file://|sqlite:///)[/~]")


def inherit_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a job inherits, without secrets."""
    return {name: value for name, value in _select(environ) if not _holds_secret(name, value)}


def list_missing_variables(environ: Mapping[str, str], given: Collection[str]) -> list[str]:
    """Return the names of variables that programs of the job may need, that are set here, and that a job with those of
    `given` lacks."""
    names = (name for name, _ in _select(environ) if not name.startswith(PREFIXES_BY_PURPOSE["Phalanx"]))
    return [name for name in names if name not in given]


def drop_local_paths(variables: Mapping[str, str]) -> dict[str, str]:
    """Leave out variables that name a file of this machine, for backends that share no file system with it."""
    return {name: value for name, value in variables.items() if not LOCAL_PATH.search(value)}


def _select(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, value in sorted(environ.items()):
        if name.startswith(INHERITED_PREFIXES) and not NOT_INHERITED.fullmatch(name):
            yield name, value


def _holds_secret(name: str, value: str) -> bool:
    names_file = name.endswith(("_FILE", "_PATH")) or name == "GOOGLE_APPLICATION_CREDENTIALS"
    return (is_secret(name) and not names_file) or CREDENTIALS_IN_URL.search(value) is not None
