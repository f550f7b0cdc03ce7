"""environment.json: the software and the settings that a run had, so that it can be understood and repeated later."""

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import phalanx

RECORDED_PREFIXES = ("OMP_", "MKL_", "KMP_", "GOMP_", "NCCL_", "GLOO_", "TORCH_NCCL_", "PYTORCH_", "PHALANX_")
RECORDED_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "LD_PRELOAD",
    "MALLOC_ARENA_MAX",
)

SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "_KEY")
"""A variable with one of these in its name is not recorded, and passed to jobs only on request."""


def collect_environment(
    argv: Sequence[str], recipe_dir: Path, environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Return the content of environment.json for a run started by `argv` with a recipe in `recipe_dir`."""
    return {
        "command": [mask_secret(word) for word in argv],
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{name: package_version(name) for name in ("torch", "numpy")},
        "phalanx": phalanx.__version__,
        "git": read_git_state(recipe_dir),
        "environment_variables": relevant_variables(environ),
    }


def relevant_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that change speed, rounding or communication, sorted; others may hold secrets."""
    wanted = [name for name in sorted(environ) if name in RECORDED_VARIABLES or name.startswith(RECORDED_PREFIXES)]
    return {name: environ[name] for name in wanted if not is_secret(name)}


def is_secret(name: str) -> bool:
    """Whether the name of a variable suggests a secret."""
    return any(part in name.upper() for part in SECRET_WORDS)


def mask_secret(word: str) -> str:
    """Mask the value of a command-line word KEY=VALUE if the key suggests a secret."""
    name, equals, value = word.partition("=")
    return f"{name}=..." if equals and value and is_secret(name) else word


def read_git_state(folder: Path, git: str = "git") -> dict[str, Any] | None:
    """Return the git state of `folder`: `commit`; `dirty`: whether a tracked file in `folder` differs from it;
    `untracked`: number of untracked files there. None without a repository, a commit or git."""
    commit = _run_git(git, folder, "rev-parse", "--verify", "HEAD")
    status = _run_git(git, folder, "status", "--porcelain", "--ignore-submodules=dirty", "--", ".")
    if commit is None or status is None:
        return None
    lines = status.splitlines()
    untracked = sum(line.startswith("??") for line in lines)
    return {"commit": commit.strip(), "dirty": len(lines) > untracked, "untracked_files": untracked}


def safe_git_options(git: str, folder: Path) -> list[str]:
    """Options by which git runs nothing that a repository's own configuration names: it may have come from anybody."""
    query = ["config", "--show-scope", "--includes", "--null", "--name-only", "--get-regexp", r"^filter\."]
    try:
        completed = subprocess.run([git, "-C", str(folder), *query], capture_output=True, timeout=30, check=False)
        words = os.fsdecode(completed.stdout).split("\0")
        names = {name for scope, name in zip(words[::2], words[1::2], strict=False) if scope in ("local", "worktree")}
    except (OSError, subprocess.TimeoutExpired):
        names = set()
    options = ["core.fsmonitor=false", f"core.hooksPath={os.devnull}", *(f"{name}=" for name in sorted(names))]
    return [word for option in options for word in ("-c", option)]


def _run_git(git: str, folder: Path, *arguments: str) -> str | None:
    command = [git, "-C", str(folder), *safe_git_options(git, folder), *arguments]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):  # git is missing, or a network disk hangs: the run must start anyway
        return None
    return completed.stdout if completed.returncode == 0 else None


def package_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:  # run from a source tree that is not installed
        return None
