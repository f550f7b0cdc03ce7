"""Snapshots of the user's code for a job: a reproducible tar in memory, and its hash.

It contains all files of a directory except those that are no code. Backends unpack it before the job starts. The tar
holds only regular files, and links within it.
"""

import hashlib
import io
import os
import stat
import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path, PurePosixPath

from phalanx.cluster.environment import safe_git_options
from phalanx.errors import UsageError
from phalanx.formatting import format_bytes, format_plural

MAX_SNAPSHOT_BYTES = 100_000_000
"""Maximum bytes of a snapshot; a larger directory contains data."""
EXCLUDED_DIRS = frozenset(
    {".git", ".hg", ".svn", ".venv", "venv", ".tox", ".nox", ".eggs", "node_modules"}
    | {"__pycache__", ".cache", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".import_linter_cache", ".hypothesis"}
    | {".ipynb_checkpoints"}
)
"""Folders that are never code, by name."""
EXCLUDED_DIR_MARKERS = (
    *(("pyvenv.cfg",), ("conda-meta",), ("CACHEDIR.TAG",)),
    *(("resolved.yaml", "events.jsonl"), ("recipe.yaml", "events.jsonl", "checkpoints")),
)
"""A directory that contains all names of one of these sets is never code: a virtual environment, a cache or a run."""
GIT_TIMEOUT_S = 300.0
SECRET_PATTERNS = (".env", ".env.*", ".netrc", ".pgpass", "*.pem", "*.key", "id_rsa", "id_ecdsa", "id_ed25519")
"""Names of files with secrets, which are left out: others may be able to read a snapshot."""


@dataclass(frozen=True)
class Snapshot:
    """A snapshot of `source_dir`, an absolute path. `start_dir`: the relative path in it where the job starts."""

    tar: bytes = field(repr=False)
    source_dir: Path
    start_dir: str
    num_files: int
    num_bytes: int
    excluded: tuple[tuple[str, str], ...] = ()
    """Names of files that were left out but may be missed, and why."""

    @property
    def digest(self) -> str:
        """SHA-256 of the tar: the same for the same names, contents and modes."""
        return hashlib.sha256(self.tar).hexdigest()

    def __str__(self) -> str:
        lines = [
            f"# code that travels: {format_plural(self.num_files, 'file')}, {format_bytes(self.num_bytes)}, sha256 "
            f"{self.digest}",
            f"# from {self.source_dir}",
        ]
        lines += [f"# left out: {name}: {why}" for name, why in self.excluded]
        return "\n".join(lines)


def snapshot_folder(source_dir: Path, start_dir: str = ".", required_file: str | None = None) -> Snapshot:
    """Make a snapshot of a directory: in a git work tree all files that git does not ignore, elsewhere all files,
    except those that are never code. `required_file`: a file that it must contain. Raises UsageError when it is too
    large, or a file cannot be read."""
    names = list(_list_candidates(source_dir))
    included, excluded = _select_files(source_dir, names)
    if required_file is not None and required_file not in included:
        reason = dict(excluded).get(
            required_file, "git ignores it" if (source_dir / required_file).is_file() else "there is no such file"
        )
        raise UsageError(f"{source_dir / required_file}: it would not travel with the job: {reason}")
    sizes = {name: (source_dir / name).lstat().st_size for name in included}
    _check_size(source_dir, sizes)
    packed, num_bytes = io.BytesIO(), 0
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, target in included.items():
            info, data = _read_file(source_dir, name, target)
            tar.addfile(info, io.BytesIO(data))
            num_bytes += len(data)
    return Snapshot(packed.getvalue(), source_dir, start_dir, len(included), num_bytes, tuple(excluded))


def _read_file(source_dir: Path, name: str, link_target: str | None) -> tuple[tarfile.TarInfo, bytes]:
    """Return header and content of a file or link, without owner and time, so that equal files yield equal bytes."""
    info, path = tarfile.TarInfo(name), source_dir / name
    info.mode = 0o644
    if link_target is not None:
        info.type, info.linkname = tarfile.SYMTYPE, link_target
        return info, b""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            if os.fstat(file.fileno()).st_mode & stat.S_IXUSR:
                info.mode = 0o755
            data = file.read()
    except OSError as error:
        raise UsageError(f"{path}: it should travel with the job, and cannot be read: {error.strerror}") from None
    info.size = len(data)
    return info, data


def unpack_snapshot(tar: bytes, target_dir: Path) -> None:
    """Put a snapshot's files into a new folder that only its owner can enter."""
    target_dir.mkdir(mode=0o700, parents=True)
    top = os.path.realpath(target_dir)
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        for tar_member in sorted(
            archive, key=lambda tar_member: tar_member.issym()
        ):  # through a link nothing is written
            path = target_dir / tar_member.name
            if ".." in PurePosixPath(tar_member.name).parts or path.is_absolute() is not target_dir.is_absolute():
                raise UsageError(f"{tar_member.name}: a snapshot holds no file outside of its folder")
            path.parent.mkdir(parents=True, exist_ok=True)
            if tar_member.issym():
                path.symlink_to(tar_member.linkname)
                if not Path(os.path.realpath(path)).is_relative_to(top):
                    path.unlink()
                    raise UsageError(f"{tar_member.name}: a snapshot holds no link to what lies outside of its folder")
                continue
            body = archive.extractfile(tar_member)
            assert body is not None
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, tar_member.mode & 0o755), "wb") as file:
                file.write(body.read())


def _list_candidates(source_dir: Path) -> Iterator[str]:
    """Names below a folder, of which some may still be left out."""
    listed = _list_git_files(source_dir)
    if listed is not None:
        for name in listed:
            if (source_dir / name).is_dir() and not (source_dir / name).is_symlink():  # a repository within this one
                yield from (f"{name.rstrip('/')}/{subdirs}" for subdirs in _list_candidates(source_dir / name))
            elif os.path.lexists(source_dir / name):  # git still lists what was deleted
                yield name
        return

    def refuse(error: OSError) -> None:
        raise UsageError(f"{error.filename}: it should travel with the job, and cannot be read: {error.strerror}")

    for folder, subdirs, files in os.walk(source_dir, onerror=refuse):
        links = [name for name in subdirs if (Path(folder) / name).is_symlink()]
        subdirs[:] = sorted(name for name in subdirs if name not in links and not _is_excluded(Path(folder) / name))
        for name in (*files, *links):
            yield (Path(folder) / name).relative_to(source_dir).as_posix()


def _list_git_files(folder: Path) -> list[str] | None:
    """Tracked files and those that git does not ignore; None outside of any work tree."""
    if not any((parent / ".git").exists() for parent in (folder, *folder.parents)):
        return None
    listed = _run_git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    return sorted({os.fsdecode(name) for name in listed.split(b"\0") if name})


def _select_files(source_dir: Path, names: Iterable[str]) -> tuple[dict[str, str | None], list[tuple[str, str]]]:
    """Return included names with the targets of links, and left-out names that may be missed, with the reason."""
    is_excluded = cache(_is_excluded)
    included: dict[str, str | None] = {}
    excluded: dict[str, str] = {}
    links = []
    for name in sorted(names):
        path = PurePosixPath(name)
        if any(is_excluded(source_dir / parent) for parent in path.parents if parent.name):
            continue
        mode = (source_dir / name).lstat().st_mode
        if any(fnmatchcase(path.name, pattern) for pattern in SECRET_PATTERNS):
            excluded[name] = "its name says that it holds secrets"
        elif stat.S_ISLNK(mode):
            links.append(name)
        elif stat.S_ISREG(mode):
            included[name] = None
        else:
            excluded[name] = "no regular file"
    # without the top: a link to it would contain itself
    files = {path for name in included for path in (name, *map(str, PurePosixPath(name).parents)) if path != "."}
    for name in links:
        real = os.path.relpath(os.path.realpath(source_dir / name), os.path.realpath((source_dir / name).parent))
        if os.path.normpath(PurePosixPath(name).parent / real) in files:
            included[name] = Path(real).as_posix()
        else:
            excluded[name] = f"a link to {os.readlink(source_dir / name)}, which does not travel"
    return dict(sorted(included.items())), sorted(excluded.items())


def _is_excluded(folder: Path) -> bool:
    """Whether a directory contains no code."""
    has_markers = any(all((folder / name).exists() for name in names) for names in EXCLUDED_DIR_MARKERS)
    return folder.name in EXCLUDED_DIRS or has_markers


def _check_size(source_dir: Path, sizes: dict[str, int]) -> None:
    """Raise UsageError for a snapshot that is too large, with its largest parts."""
    total = sum(sizes.values())
    if total <= MAX_SNAPSHOT_BYTES:
        return
    parts: dict[str, int] = {}
    for name, size in sizes.items():
        first = name.partition("/")[0] + ("/" if "/" in name else "")
        parts[first] = parts.get(first, 0) + size
    largest = sorted(parts.items(), key=lambda part: -part[1])[:3]
    raise UsageError(
        f"{source_dir}: {format_bytes(total)} in {len(sizes)} files would travel with the job, and "
        f"{format_bytes(MAX_SNAPSHOT_BYTES)} is the most; most of it: "
        f"{', '.join(f'{name} {format_bytes(size)}' for name, size in largest)}; keep data elsewhere, or name them in "
        ".gitignore"
    )


def _run_git(folder: Path, *arguments: str) -> bytes:
    try:
        command = ["git", "-C", str(folder), *safe_git_options("git", folder), *arguments]
        process = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=GIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"{folder}: git did not answer within {GIT_TIMEOUT_S:.0f} s; try `git -C {folder} status`"
        ) from None
    except FileNotFoundError:
        raise UsageError(f"{folder} belongs to a git repository, and git is not installed here") from None
    if process.returncode:
        output = process.stderr.decode(errors="replace").strip().splitlines() or ["it failed without a word"]
        raise UsageError(f"{folder}: git says: {output[0]}")
    return process.stdout
