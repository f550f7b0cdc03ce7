"""Snapshots of the user's code for a job: a reproducible tar in memory, and its hash.

A snapshot of a directory contains all files except those that are no code; a snapshot of a git commit contains the
files of the commit. Backends unpack it before the job starts. The tar holds only regular files, and links within it.
"""

import hashlib
import io
import os
import stat
import subprocess
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path, PurePosixPath

from phalanx.cluster.environment import safe_git_options
from phalanx.errors import UsageError
from phalanx.formatting import format_bytes, format_plural

MAX_SNAPSHOT_BYTES = 100_000_000
"""Maximum bytes of a snapshot; a larger directory contains data."""
MAX_COMMIT_BYTES = 10 * MAX_SNAPSHOT_BYTES
"""Bytes of a commit of which git is not even asked for an archive, which comes into memory."""
MAX_SNAPSHOT_FILES = 20_000
"""Files of a snapshot."""
EXCLUDED_DIRS = frozenset(
    {".git", ".hg", ".svn", ".venv", "venv", ".tox", ".nox", ".eggs", "node_modules"}
    | {"__pycache__", ".cache", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".import_linter_cache", ".hypothesis"}
    | {".ipynb_checkpoints"}
)
"""Folders that are never code, by name."""
EXCLUDED_DIR_MARKERS = {
    "a virtual environment": (("pyvenv.cfg",), ("conda-meta",)),
    "a cache": (("CACHEDIR.TAG",),),
    "a run": (("resolved.yaml", "events.jsonl"), ("recipe.yaml", "events.jsonl", "checkpoints")),
}
"""Kinds of directories that are never code. A directory is of a kind if it contains all names of one of its sets."""
GIT_TIMEOUT_S = 300.0
"""Time limit of a git command in seconds."""
MAX_LINK_DEPTH = 40
"""Maximum number of links that are followed to a file, as in the kernel."""
SECRET_PATTERNS = (".env", ".env.*", ".netrc", ".pgpass", "*.pem", "*.key", "id_rsa", "id_ecdsa", "id_ed25519")
"""Names of files with secrets, which are left out: others may be able to read a snapshot."""


@dataclass(frozen=True)
class Snapshot:
    """A snapshot. `source_dir`: the absolute path of the copied directory; `start_dir`: the relative path in it where
    the job starts."""

    tar: bytes = field(repr=False)
    source_dir: Path
    start_dir: str
    num_files: int
    num_bytes: int
    """Bytes of the files."""
    excluded: tuple[tuple[str, str], ...] = ()
    """Names of files that were left out but may be missed, and why."""
    commit: str | None = None

    @property
    def digest(self) -> str:
        """SHA-256 of the tar: the same for the same names, contents and modes."""
        return hashlib.sha256(self.tar).hexdigest()

    def __str__(self) -> str:
        what = f"commit {self.commit[:12]} of {self.source_dir}" if self.commit else str(self.source_dir)
        lines = [
            f"# code that travels: {format_plural(self.num_files, 'file')}, {format_bytes(self.num_bytes)}, sha256 "
            f"{self.digest}",
            f"# from {what}",
        ]
        lines += [f"# left out: {name}: {why}" for name, why in self.excluded]
        return "\n".join(lines)


@dataclass(frozen=True)
class SnapshotFile:
    """A file, or a link, by its name below the top."""

    name: str
    data: bytes
    executable: bool = False
    link_target: str | None = None
    """Target of a link, relative to its directory."""


def snapshot_folder(source_dir: Path, start_dir: str = ".", required_file: str | None = None) -> Snapshot:
    """Make a snapshot of a directory: in a git work tree all files that git does not ignore, elsewhere all files,
    except those that are never code.

    `required_file`: a file that it must contain. Raises UsageError when it is too large, or a file cannot be read.
    """
    names = list(_list_candidates(source_dir))
    included, excluded = _select_files(source_dir, names)
    if required_file is not None and required_file not in included:
        reason = dict(excluded).get(
            required_file, "git ignores it" if (source_dir / required_file).is_file() else "there is no such file"
        )
        raise UsageError(f"{source_dir / required_file}: it would not travel with the job: {reason}")
    sizes = {name: (source_dir / name).lstat().st_size for name in included}
    _check_size(str(source_dir), sizes)
    entries = []
    for name, target in included.items():
        path = source_dir / name
        try:
            if target is not None:
                entries.append(SnapshotFile(name, b"", link_target=target))
                continue
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                executable = bool(os.fstat(file.fileno()).st_mode & stat.S_IXUSR)
                entries.append(SnapshotFile(name, file.read(), executable))
        except OSError as error:
            raise UsageError(f"{path}: it should travel with the job, and cannot be read: {error.strerror}") from None
    return _pack_snapshot(entries, source_dir, start_dir, excluded, None)


def snapshot_commit(folder: Path, commit: str, required_file: str | None = None) -> Snapshot:
    """A snapshot of the whole tree of a git commit; the job starts where `folder` is in it. UsageError for a commit
    that is not known, and for the one that is checked out when there are changes which it does not have."""
    if commit.startswith("-"):
        raise UsageError(f"--snapshot {commit}: expected `workdir`, or a revision such as HEAD, a tag or a hash")
    source_dir = Path(
        _run_git(folder, f"--snapshot {commit}: {folder}", "rev-parse", "--show-toplevel").decode().rstrip("\n")
    )
    found = _call_git(source_dir, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}")
    if found.returncode:
        raise UsageError(
            f"--snapshot {commit}: the repository {source_dir} has no such commit; expected `workdir`, or one such as "
            f"HEAD"
        )
    full_hash = found.stdout.decode().strip()
    start_dir = Path(os.path.relpath(os.path.realpath(folder), os.path.realpath(source_dir))).as_posix()
    if full_hash == _call_git(source_dir, "rev-parse", "--verify", "--quiet", "HEAD").stdout.decode().strip():
        status_arguments = ("status", "--porcelain", "-z", "--untracked-files=no", "--ignore-submodules=dirty")
        changed = _run_git(source_dir, "git", *status_arguments).decode(errors="replace")
        if names := [entry[3:] for entry in changed.split("\0") if entry[2:3] == " "]:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UsageError(
                f"--snapshot {commit}: {names[0]}{more} changed since that commit, and the snapshot would lack this; "
                "commit them, or use --snapshot workdir"
            )
    if (
        sum((sizes := _sizes_in(source_dir, full_hash)).values()) > MAX_COMMIT_BYTES
    ):  # below that, attributes may keep some of it out
        _check_size(f"commit {full_hash[:12]} of {source_dir}", sizes)
    archive = _run_git(source_dir, f"--snapshot {commit}", "archive", "--format=tar", full_hash)
    entries, excluded = [], []
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar_members = [tar_member for tar_member in tar if tar_member.isfile() or tar_member.issym()]
        links = {tar_member.name: tar_member.linkname for tar_member in tar_members if tar_member.issym()}
        known_paths = _list_files_and_parents(tar_member.name for tar_member in tar_members if not tar_member.issym())
        _check_size(
            f"commit {full_hash[:12]} of {source_dir}", {tar_member.name: tar_member.size for tar_member in tar_members}
        )
        for tar_member in tar_members:
            if any(str(parent) in links for parent in PurePosixPath(tar_member.name).parents):
                excluded.append((tar_member.name, "it lies below a link"))
                continue
            if tar_member.issym():
                if _is_link_inside(tar_member.name, tar_member.linkname, known_paths, links):
                    entries.append(SnapshotFile(tar_member.name, b"", link_target=tar_member.linkname))
                else:
                    excluded.append((tar_member.name, f"a link to {tar_member.linkname}, which does not travel"))
                continue
            body = tar.extractfile(tar_member)
            assert body is not None
            entries.append(SnapshotFile(tar_member.name, body.read(), bool(tar_member.mode & stat.S_IXUSR)))
    required_path = None if required_file is None else (PurePosixPath(start_dir) / required_file).as_posix()
    if required_path is not None and required_path not in {entry.name for entry in entries}:
        raise UsageError(
            f"{folder / str(required_file)}: commit {commit} has no such file; commit it, or use --snapshot workdir"
        )
    if start_dir != "." and not any(entry.name.startswith(f"{start_dir}/") for entry in entries):
        raise UsageError(f"{folder}: commit {commit} has no such folder")
    return _pack_snapshot(entries, source_dir, start_dir, excluded, full_hash)


def _sizes_in(top: Path, commit: str) -> dict[str, int]:
    """Return the sizes of a commit's files in bytes.

    Git may store repetitive files at 0.1 % of the size that an archive takes in memory.
    """
    listed = _run_git(top, f"--snapshot {commit}", "ls-tree", "-r", "-l", "-z", "--full-tree", commit)
    found = (entry.partition("\t") for entry in os.fsdecode(listed).split("\0") if entry)
    sizes = {name: described.split()[-1] for described, _, name in found}
    return {name: int(size) for name, size in sizes.items() if size.isdecimal()}  # of a submodule none is known


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


def _pack_snapshot(
    entries: Iterable[SnapshotFile],
    source_dir: Path,
    start_dir: str,
    excluded: Iterable[tuple[str, str]],
    commit: str | None,
) -> Snapshot:
    """Pack entries without owners and modification times, so that equal files yield equal bytes."""
    entries = sorted(entries, key=lambda entry: entry.name)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in entries:
            info = tarfile.TarInfo(entry.name)
            info.mode = 0o755 if entry.executable else 0o644
            if entry.link_target is not None:
                info.type, info.linkname = tarfile.SYMTYPE, entry.link_target
            info.size = len(entry.data)
            tar.addfile(info, io.BytesIO(entry.data))
    size = sum(len(entry.data) for entry in entries)
    return Snapshot(packed.getvalue(), source_dir, start_dir, len(entries), size, tuple(sorted(excluded)), commit)


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
        subdirs[:] = sorted(
            name for name in subdirs if name not in links and _exclusion_reason(Path(folder) / name) is None
        )
        for name in (*files, *links):
            yield (Path(folder) / name).relative_to(source_dir).as_posix()


def _list_git_files(folder: Path) -> list[str] | None:
    """Tracked files and those that git does not ignore; None outside of any work tree."""
    if not any((parent / ".git").exists() for parent in (folder, *folder.parents)):
        return None
    listed = _run_git(folder, str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    return sorted({os.fsdecode(name) for name in listed.split(b"\0") if name})


def _select_files(source_dir: Path, names: Iterable[str]) -> tuple[dict[str, str | None], list[tuple[str, str]]]:
    """Return the included names with the targets of links, and names that are left out but may be missed, with the
    reason."""
    exclusion_reason = cache(_exclusion_reason)
    included: dict[str, str | None] = {}
    excluded: dict[str, str] = {}
    links = []
    for name in sorted(names):
        path = PurePosixPath(name)
        above = [parent for parent in path.parents if parent.name]
        if any(exclusion_reason(source_dir / parent) for parent in above):
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
    files = _list_files_and_parents(included)
    for name in links:
        real = os.path.relpath(os.path.realpath(source_dir / name), os.path.realpath((source_dir / name).parent))
        if _is_link_inside(name, real, files, {}):
            included[name] = Path(real).as_posix()
        else:
            excluded[name] = f"a link to {os.readlink(source_dir / name)}, which does not travel"
    return dict(sorted(included.items())), sorted(excluded.items())


def _list_files_and_parents(names: Iterable[str]) -> frozenset[str]:
    """Return files and their parent directories, without the top: a link to the top would contain itself."""
    return frozenset(path for name in names for path in (name, *map(str, PurePosixPath(name).parents)) if path != ".")


def _is_link_inside(name: str, target: str, known_paths: frozenset[str], links: Mapping[str, str]) -> bool:
    """Whether a link leads to something that travels, too, over any other `links`, as the file system will follow it:
    component by component."""
    resolved, remaining, num_followed = (
        list(PurePosixPath(name).parent.parts),
        [*reversed(PurePosixPath(target).parts)],
        0,
    )
    while remaining:
        part = remaining.pop()
        if part == "/" or (part == ".." and not resolved):
            return False
        if part == "..":
            resolved.pop()
            continue
        resolved.append(part)
        if (next_target := links.get("/".join(resolved))) is not None:
            resolved.pop()
            remaining += reversed(PurePosixPath(next_target).parts)
            num_followed += 1
            if num_followed > MAX_LINK_DEPTH:
                return False
    return "/".join(resolved) in known_paths


def _exclusion_reason(folder: Path) -> str | None:
    """Return why a directory contains no code; None if it may."""
    if folder.name in EXCLUDED_DIRS:
        return f"called {folder.name}"
    for what, markers in EXCLUDED_DIR_MARKERS.items():
        if any(all((folder / name).exists() for name in names) for names in markers):
            return what
    return None


def _check_size(what: str, sizes: dict[str, int]) -> None:
    """Raise UsageError for a snapshot that is too large, with its largest parts."""
    total = sum(sizes.values())
    if total <= MAX_SNAPSHOT_BYTES and len(sizes) <= MAX_SNAPSHOT_FILES:
        return
    measure: Callable[[str], int] = (lambda name: sizes[name]) if total > MAX_SNAPSHOT_BYTES else (lambda name: 1)
    parts: dict[str, int] = {}
    for name in sizes:
        first = name.partition("/")[0] + ("/" if "/" in name else "")
        parts[first] = parts.get(first, 0) + measure(name)
    largest = sorted(parts.items(), key=lambda part: -part[1])[:3]
    largest_text = [
        f"{name} {format_bytes(part) if total > MAX_SNAPSHOT_BYTES else format_plural(part, 'file')}"
        for name, part in largest
    ]
    raise UsageError(
        f"{what}: {format_bytes(total)} in {len(sizes)} files would travel with the job, and "
        f"{format_bytes(MAX_SNAPSHOT_BYTES)} "
        f"in {MAX_SNAPSHOT_FILES} files is the most; most of it: {', '.join(largest_text)}; keep data elsewhere, or "
        f"name them in .gitignore"
    )


def _run_git(folder: Path, what: str, *arguments: str) -> bytes:
    process = _call_git(folder, *arguments)
    if process.returncode:
        output = process.stderr.decode(errors="replace").strip().splitlines() or ["it failed without a word"]
        raise UsageError(f"{what}: git says: {output[0]}")
    return process.stdout


def _call_git(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[bytes]":
    try:
        command = ["git", "-C", str(folder), *safe_git_options("git", folder), *arguments]
        return subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=GIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"{folder}: git did not answer within {GIT_TIMEOUT_S:.0f} s; try `git -C {folder} status`"
        ) from None
    except FileNotFoundError:
        raise UsageError(f"{folder} belongs to a git repository, and git is not installed here") from None
