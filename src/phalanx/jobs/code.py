"""The user's own code as it travels with a job: a tar in memory, the same bytes for the same files, and its hash.

What goes into one is found here: of a folder all files but those that nobody calls code, of a git commit what stands
in it. Who unpacks it are the engines, before the job starts. The tar holds regular files and links within it, no more.
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

from phalanx.cluster.environment import unhooked
from phalanx.errors import UsageError

LARGEST = 100_000_000
"""Bytes of a snapshot; who has more has data among the code."""
MUCH = 10 * LARGEST
"""Bytes of a commit of which git is not even asked for an archive, which comes into memory."""
MOST = 20_000
"""Files of a snapshot."""
NEVER = frozenset(
    {".git", ".hg", ".svn", ".venv", "venv", ".tox", ".nox", ".eggs", "node_modules"}
    | {"__pycache__", ".cache", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".import_linter_cache", ".hypothesis"}
    | {".ipynb_checkpoints"}
)
"""Folders that are never code, by name."""
MARKS = {
    "a virtual environment": (("pyvenv.cfg",), ("conda-meta",)),
    "a cache": (("CACHEDIR.TAG",),),
    "a run": (("resolved.yaml", "events.jsonl"), ("recipe.yaml", "events.jsonl", "checkpoints")),
}
"""Folders that are never code, by what lies in them: all names of one of the sets."""
ASKING = 300.0
"""Seconds in which git must have answered."""
MOST_LINKS = 40
"""That are followed to a file; as the kernel."""
SECRETIVE = (".env", ".env.*", ".netrc", ".pgpass", "*.pem", "*.key", "id_rsa", "id_ecdsa", "id_ed25519")
"""Files whose names say that they hold secrets: what travels may be read by others."""


@dataclass(frozen=True)
class Code:
    """A snapshot. `of`: the folder that it is a copy of, absolute; `start`: where in it the job starts, relative."""

    tar: bytes = field(repr=False)
    of: Path
    start: str
    files: int
    size: int
    """Bytes of the files."""
    left_out: tuple[tuple[str, str], ...] = ()
    """Names that do not travel although they might be missed, and why."""
    commit: str | None = None

    @property
    def digest(self) -> str:
        """SHA-256 of the tar: the same for the same names, contents and modes."""
        return hashlib.sha256(self.tar).hexdigest()

    def __str__(self) -> str:
        what = f"commit {self.commit[:12]} of {self.of}" if self.commit else str(self.of)
        lines = [
            f"# code that travels: {_counted(self.files)}, {size_in_words(self.size)}, sha256 {self.digest}",
            f"# from {what}",
        ]
        lines += [f"# left out: {name}: {why}" for name, why in self.left_out]
        return "\n".join(lines)


@dataclass(frozen=True)
class Entry:
    """A file, or a link, by its name below the top."""

    name: str
    data: bytes
    executable: bool = False
    target: str | None = None
    """Of a link, relative to where it lies."""


def folder_code(top: Path, start: str = ".", needed: str | None = None) -> Code:
    """A snapshot of a folder: in a git work tree all that git does not ignore, elsewhere all, but for what is never
    code. `needed`: a file that must be in it. UsageError when it is too large, or something cannot be read."""
    names = list(_candidates(top))
    taken, left_out = _sorted_out(top, names)
    if needed is not None and needed not in taken:
        why = dict(left_out).get(needed, "git ignores it" if (top / needed).is_file() else "there is no such file")
        raise UsageError(f"{top / needed}: it would not travel with the job: {why}")
    sizes = {name: (top / name).lstat().st_size for name in taken}
    _check_size(str(top), sizes)
    entries = []
    for name, target in taken.items():
        path = top / name
        try:
            if target is not None:
                entries.append(Entry(name, b"", target=target))
                continue
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                executable = bool(os.fstat(file.fileno()).st_mode & stat.S_IXUSR)
                entries.append(Entry(name, file.read(), executable))
        except OSError as error:
            raise UsageError(f"{path}: it should travel with the job, and cannot be read: {error.strerror}") from None
    return _code(entries, top, start, left_out, None)


def commit_code(folder: Path, commit: str, needed: str | None = None) -> Code:
    """A snapshot of the whole tree of a git commit; the job starts where `folder` is in it. UsageError for a commit
    that is not known, and for the one that is checked out when there are changes which it does not have."""
    if commit.startswith("-"):
        raise UsageError(f"--snapshot {commit}: expected `workdir`, or a revision such as HEAD, a tag or a hash")
    top = Path(_git(folder, f"--snapshot {commit}: {folder}", "rev-parse", "--show-toplevel").decode().rstrip("\n"))
    found = _asked(top, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}")
    if found.returncode:
        raise UsageError(
            f"--snapshot {commit}: the repository {top} has no such commit; expected `workdir`, or one such as HEAD"
        )
    full = found.stdout.decode().strip()
    start = Path(os.path.relpath(os.path.realpath(folder), os.path.realpath(top))).as_posix()
    if full == _asked(top, "rev-parse", "--verify", "--quiet", "HEAD").stdout.decode().strip():
        asked = ("status", "--porcelain", "-z", "--untracked-files=no", "--ignore-submodules=dirty")
        changed = _git(top, "git", *asked).decode(errors="replace")
        if names := [entry[3:] for entry in changed.split("\0") if entry[2:3] == " "]:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UsageError(
                f"--snapshot {commit}: {names[0]}{more} changed since that commit, and the snapshot would lack this; "
                "commit them, or use --snapshot workdir"
            )
    if sum((sizes := _sizes_in(top, full)).values()) > MUCH:  # below that, attributes may keep some of it out
        _check_size(f"commit {full[:12]} of {top}", sizes)
    archive = _git(top, f"--snapshot {commit}", "archive", "--format=tar", full)
    entries, left_out = [], []
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = [member for member in tar if member.isfile() or member.issym()]
        links = {member.name: member.linkname for member in members if member.issym()}
        known = _places(member.name for member in members if not member.issym())
        _check_size(f"commit {full[:12]} of {top}", {member.name: member.size for member in members})
        for member in members:
            if any(str(parent) in links for parent in PurePosixPath(member.name).parents):
                left_out.append((member.name, "it lies below a link"))
                continue
            if member.issym():
                if _within(member.name, member.linkname, known, links):
                    entries.append(Entry(member.name, b"", target=member.linkname))
                else:
                    left_out.append((member.name, f"a link to {member.linkname}, which does not travel"))
                continue
            body = tar.extractfile(member)
            assert body is not None
            entries.append(Entry(member.name, body.read(), bool(member.mode & stat.S_IXUSR)))
    wanted = None if needed is None else (PurePosixPath(start) / needed).as_posix()
    if wanted is not None and wanted not in {entry.name for entry in entries}:
        raise UsageError(
            f"{folder / str(needed)}: commit {commit} has no such file; commit it, or use --snapshot workdir"
        )
    if start != "." and not any(entry.name.startswith(f"{start}/") for entry in entries):
        raise UsageError(f"{folder}: commit {commit} has no such folder")
    return _code(entries, top, start, left_out, full)


def _sizes_in(top: Path, commit: str) -> dict[str, int]:
    """Bytes of a commit's files. Git packs what repeats itself to a thousandth, and an archive comes into memory."""
    listed = _git(top, f"--snapshot {commit}", "ls-tree", "-r", "-l", "-z", "--full-tree", commit)
    found = (entry.partition("\t") for entry in os.fsdecode(listed).split("\0") if entry)
    sizes = {name: described.split()[-1] for described, _, name in found}
    return {name: int(size) for name, size in sizes.items() if size.isdecimal()}  # of a submodule none is known


def unpack(tar: bytes, where: Path) -> None:
    """Put a snapshot's files into a new folder that only its owner can enter."""
    where.mkdir(mode=0o700, parents=True)
    top = os.path.realpath(where)
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        for member in sorted(archive, key=lambda member: member.issym()):  # through a link nothing is written
            path = where / member.name
            if ".." in PurePosixPath(member.name).parts or path.is_absolute() is not where.is_absolute():
                raise UsageError(f"{member.name}: a snapshot holds no file outside of its folder")
            path.parent.mkdir(parents=True, exist_ok=True)
            if member.issym():
                path.symlink_to(member.linkname)
                if not Path(os.path.realpath(path)).is_relative_to(top):
                    path.unlink()
                    raise UsageError(f"{member.name}: a snapshot holds no link to what lies outside of its folder")
                continue
            body = archive.extractfile(member)
            assert body is not None
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, member.mode & 0o755), "wb") as file:
                file.write(body.read())


def size_in_words(size: float) -> str:
    """Bytes as people read them."""
    for unit, bound in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= bound:
            return f"{size / bound:.3g} {unit}"
    return f"{size:.0f} bytes"


def _code(
    entries: Iterable[Entry], of: Path, start: str, left_out: Iterable[tuple[str, str]], commit: str | None
) -> Code:
    """Pack entries; whose they were and when they changed is not told, so that equal files make equal bytes."""
    entries = sorted(entries, key=lambda entry: entry.name)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in entries:
            info = tarfile.TarInfo(entry.name)
            info.mode = 0o755 if entry.executable else 0o644
            if entry.target is not None:
                info.type, info.linkname = tarfile.SYMTYPE, entry.target
            info.size = len(entry.data)
            tar.addfile(info, io.BytesIO(entry.data))
    size = sum(len(entry.data) for entry in entries)
    return Code(packed.getvalue(), of, start, len(entries), size, tuple(sorted(left_out)), commit)


def _candidates(top: Path) -> Iterator[str]:
    """Names below a folder, of which some may still be left out."""
    listed = _listed_by_git(top)
    if listed is not None:
        for name in listed:
            if (top / name).is_dir() and not (top / name).is_symlink():  # a repository within this one
                yield from (f"{name.rstrip('/')}/{below}" for below in _candidates(top / name))
            elif os.path.lexists(top / name):  # git still lists what was deleted
                yield name
        return

    def refuse(error: OSError) -> None:
        raise UsageError(f"{error.filename}: it should travel with the job, and cannot be read: {error.strerror}")

    for folder, below, files in os.walk(top, onerror=refuse):
        links = [name for name in below if (Path(folder) / name).is_symlink()]
        below[:] = sorted(name for name in below if name not in links and _no_code(Path(folder) / name) is None)
        for name in (*files, *links):
            yield (Path(folder) / name).relative_to(top).as_posix()


def _listed_by_git(folder: Path) -> list[str] | None:
    """Tracked files and those that git does not ignore; None outside of any work tree."""
    if not any((place / ".git").exists() for place in (folder, *folder.parents)):
        return None
    listed = _git(folder, str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    return sorted({os.fsdecode(name) for name in listed.split(b"\0") if name})


def _sorted_out(top: Path, names: Iterable[str]) -> tuple[dict[str, str | None], list[tuple[str, str]]]:
    """What travels, with the targets of links; and what does not although it may be missed, with the reason."""
    no_code = cache(_no_code)
    taken: dict[str, str | None] = {}
    left_out: dict[str, str] = {}
    links = []
    for name in sorted(names):
        path = PurePosixPath(name)
        above = [parent for parent in path.parents if parent.name]
        if any(no_code(top / parent) for parent in above):
            continue
        mode = (top / name).lstat().st_mode
        if any(fnmatchcase(path.name, pattern) for pattern in SECRETIVE):
            left_out[name] = "its name says that it holds secrets"
        elif stat.S_ISLNK(mode):
            links.append(name)
        elif stat.S_ISREG(mode):
            taken[name] = None
        else:
            left_out[name] = "no regular file"
    files = _places(taken)
    for name in links:
        real = os.path.relpath(os.path.realpath(top / name), os.path.realpath((top / name).parent))
        if _within(name, real, files, {}):
            taken[name] = Path(real).as_posix()
        else:
            left_out[name] = f"a link to {os.readlink(top / name)}, which does not travel"
    return dict(sorted(taken.items())), sorted(left_out.items())


def _places(names: Iterable[str]) -> frozenset[str]:
    """Files, and the folders that they are in; not the top itself, which would hold a link to it for ever."""
    return frozenset(
        place for name in names for place in (name, *map(str, PurePosixPath(name).parents)) if place != "."
    )


def _within(name: str, target: str, places: frozenset[str], links: Mapping[str, str]) -> bool:
    """Whether a link leads to something that travels, too, over any other `links`, as the file system will follow it:
    component by component."""
    here, rest, followed = list(PurePosixPath(name).parent.parts), [*reversed(PurePosixPath(target).parts)], 0
    while rest:
        part = rest.pop()
        if part == "/" or (part == ".." and not here):
            return False
        if part == "..":
            here.pop()
            continue
        here.append(part)
        if (onward := links.get("/".join(here))) is not None:
            here.pop()
            rest += reversed(PurePosixPath(onward).parts)
            followed += 1
            if followed > MOST_LINKS:
                return False
    return "/".join(here) in places


def _no_code(folder: Path) -> str | None:
    """Why nothing in a folder is code; None when it may be."""
    if folder.name in NEVER:
        return f"called {folder.name}"
    for what, marks in MARKS.items():
        if any(all((folder / name).exists() for name in names) for names in marks):
            return what
    return None


def _check_size(what: str, sizes: dict[str, int]) -> None:
    """UsageError for what nobody would call code, with what makes it so large."""
    total = sum(sizes.values())
    if total <= LARGEST and len(sizes) <= MOST:
        return
    measure: Callable[[str], int] = (lambda name: sizes[name]) if total > LARGEST else (lambda name: 1)
    parts: dict[str, int] = {}
    for name in sizes:
        first = name.partition("/")[0] + ("/" if "/" in name else "")
        parts[first] = parts.get(first, 0) + measure(name)
    largest = sorted(parts.items(), key=lambda part: -part[1])[:3]
    told = [f"{name} {size_in_words(part) if total > LARGEST else _counted(part)}" for name, part in largest]
    raise UsageError(
        f"{what}: {size_in_words(total)} in {len(sizes)} files would travel with the job, and {size_in_words(LARGEST)} "
        f"in {MOST} files is the most; most of it: {', '.join(told)}; keep data elsewhere, or name them in .gitignore"
    )


def _counted(files: int) -> str:
    return "1 file" if files == 1 else f"{files} files"


def _git(folder: Path, what: str, *arguments: str) -> bytes:
    done = _asked(folder, *arguments)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["it failed without a word"]
        raise UsageError(f"{what}: git says: {said[0]}")
    return done.stdout


def _asked(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[bytes]":
    try:
        command = ["git", "-C", str(folder), *unhooked("git", folder), *arguments]
        return subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=ASKING)
    except subprocess.TimeoutExpired:
        raise UsageError(f"{folder}: git did not answer within {ASKING:.0f} s; try `git -C {folder} status`") from None
    except FileNotFoundError:
        raise UsageError(f"{folder} belongs to a git repository, and git is not installed here") from None
