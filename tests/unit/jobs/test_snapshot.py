"""What of a folder travels with a job, and what is refused."""

import contextlib
import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from phalanx.cluster.environment import read_git_state
from phalanx.errors import UsageError
from phalanx.jobs import snapshot
from phalanx.jobs.snapshot import Snapshot, snapshot_folder, unpack_snapshot


def write(folder: Path, **files: str) -> Path:
    """Files by name; `__` stands for `/` and `_dot_` for `.`."""
    for name, text in files.items():
        path = folder / name.replace("_dot_", ".").replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=me", "-c", "user.email=me@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", str(folder), *who, *words], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = write(tmp_path / "repository", exp__recipe_dot_yaml="steps: 1", exp__model_dot_py="old", lib_dot_py="x")
    git(tmp_path, "init", "--quiet", str(folder))
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "first")
    return folder


def names(code: Snapshot) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(code.tar)) as archive:
        return archive.getnames()


def told(code: Snapshot) -> dict[str, str]:
    return dict(code.excluded)


def test_equal_files_make_equal_bytes_whatever_their_times_and_places(tmp_path: Path) -> None:
    one, other = (write(tmp_path / name, b_dot_py="1", a__c_dot_py="2") for name in ("one", "other"))
    os.utime(one / "b.py", (1, 1))
    assert snapshot_folder(one).tar == snapshot_folder(other).tar
    write(other, b_dot_py="3")
    assert snapshot_folder(one).digest != snapshot_folder(other).digest


def test_the_hash_tells_contents_names_and_whether_a_file_is_a_program(tmp_path: Path) -> None:
    folder = write(tmp_path / "folder", run_dot_sh="#!/bin/sh\n")
    before = snapshot_folder(folder)
    assert before.digest == "de84f835498421b21c8ddfd867d33cb2df2a4dca552c067f2fa47d6ed0a5c5ba"
    (folder / "run.sh").chmod(0o755)
    assert snapshot_folder(folder).digest != before.digest


def test_a_copy_has_the_same_files_programs_and_links(tmp_path: Path) -> None:
    folder = write(tmp_path / "folder", a__model_dot_py="x = 1\n", run_dot_sh="#!/bin/sh\necho hi\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "a" / "near.py").symlink_to("model.py")
    (folder / "again").symlink_to(folder / "a")
    code = snapshot_folder(folder)
    unpack_snapshot(code.tar, tmp_path / "copy")
    copy = tmp_path / "copy"
    assert (copy / "again" / "near.py").read_text() == "x = 1\n"
    assert subprocess.run([copy / "run.sh"], capture_output=True).stdout == b"hi\n"
    assert [os.readlink(copy / "again"), os.readlink(copy / "a" / "near.py")] == ["a", "model.py"]
    assert (code.num_files, code.num_bytes, copy.stat().st_mode & 0o777) == (4, 24, 0o700)


def test_a_link_out_of_the_folder_is_left_out_and_told(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", secret="swordfish")
    folder = write(tmp_path / "folder", model_dot_py="x")
    (folder / "data").symlink_to(tmp_path / "elsewhere")
    (folder / "up").symlink_to("../elsewhere/secret")
    (folder / "nowhere").symlink_to("missing")
    code = snapshot_folder(folder)
    assert names(code) == ["model.py"]
    assert b"swordfish" not in code.tar
    assert sorted(told(code)) == ["data", "nowhere", "up"]
    assert told(code)["up"] == "a link to ../elsewhere/secret, which does not travel"


def test_what_is_never_code_stays_where_it_is(tmp_path: Path) -> None:
    folder = write(tmp_path, model_dot_py="x")
    write(folder / "__pycache__", model_dot_pyc="")
    write(folder / "env", pyvenv_dot_cfg="", lib__x_dot_py="")
    write(folder / "downloads", CACHEDIR_dot_TAG="", blob="")
    write(folder / "runs" / "gpt", resolved_dot_yaml="", events_dot_jsonl="", logs__x="")
    write(folder / "deep" / "venv", x_dot_py="")
    write(folder / "deep", kept_dot_py="")
    assert names(snapshot_folder(folder)) == ["deep/kept.py", "model.py"]


@pytest.mark.parametrize("name", [".env", ".env.local", ".netrc", "server.pem", "deep/id_ed25519"])
def test_a_file_that_says_it_holds_secrets_does_not_travel(tmp_path: Path, name: str) -> None:
    write(tmp_path, model_dot_py="x")
    (tmp_path / "deep").mkdir()
    (tmp_path / name).write_text("swordfish")
    code = snapshot_folder(tmp_path)
    assert names(code) == ["model.py"]
    assert told(code) == {name: "its name says that it holds secrets"}
    assert "swordfish" not in str(code)


def test_in_a_work_tree_ignored_files_stay_and_new_ones_travel(repository: Path) -> None:
    write(repository / "exp", _dot_gitignore="*.bin\nbig/\n", huge_dot_bin="", big__x="", new_dot_py="")
    (repository / "exp" / "model.py").unlink()
    assert names(snapshot_folder(repository / "exp")) == [".gitignore", "new.py", "recipe.yaml"]


def test_a_repository_within_one_travels_by_its_own_rules(repository: Path) -> None:
    inner = write(repository / "inner", _dot_gitignore="out\n", out="", kept_dot_py="")
    git(inner, "init", "--quiet")
    assert [name for name in names(snapshot_folder(repository)) if "inner" in name] == [
        "inner/.gitignore",
        "inner/kept.py",
    ]


def test_a_git_that_does_not_answer_is_reported_with_what_to_try(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "git"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\ncase \"$*\" in *' config '*) exit 1 ;; esac\nexec sleep 20\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(snapshot, "GIT_TIMEOUT_S", 0.2)
    with pytest.raises(UsageError, match=f"git did not answer within 0 s; try `git -C {repository}"):
        snapshot_folder(repository)


def test_a_recipe_that_git_ignores_is_refused(repository: Path) -> None:
    write(repository / "exp", _dot_gitignore="own.yaml\n", own_dot_yaml="")
    with pytest.raises(UsageError, match=r"own\.yaml: it would not travel with the job: git ignores it"):
        snapshot_folder(repository / "exp", required_file="own.yaml")


def test_a_folder_that_is_too_large_says_how_large_and_what_is_biggest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "MAX_SNAPSHOT_BYTES", 1000)
    write(tmp_path, model_dot_py="x" * 100, data__a="x" * 800, data__b="x" * 700, notes="x" * 200)
    with pytest.raises(UsageError) as refused:
        snapshot_folder(tmp_path)
    assert "1.80 kB in 4 files would travel with the job, and 1.00 kB is the most" in str(refused.value)
    assert "most of it: data/ 1.50 kB, notes 200 B, model.py 100 B" in str(refused.value)


def test_a_dry_run_tells_count_bytes_hash_and_what_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, model_dot_py="x" * 1500, a_dot_py="", _dot_env="swordfish")
    code = snapshot_folder(tmp_path)
    assert str(code).splitlines() == [
        f"# code that travels: 2 files, 1.50 kB, sha256 {code.digest}",
        f"# from {tmp_path}",
        "# left out: .env: its name says that it holds secrets",
    ]


def packed(*members: tuple[str, str | None]) -> bytes:
    """A tar of files that hold their names, and of links to what stands beside the name."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, target in members:
            info = tarfile.TarInfo(name)
            if target is not None:
                info.type, info.linkname = tarfile.SYMTYPE, target
            info.size = 0 if target is not None else len(name)
            archive.addfile(info, io.BytesIO(name.encode()))
    return made.getvalue()


@pytest.mark.parametrize(
    "members",
    [
        [("link", "../outside"), ("link/planted", None)],
        [("../outside/planted", None)],
        [("esc", "../outside")],
        [("p/q", "../a"), ("a/b", None), ("esc", "p/q/../../outside")],
    ],
    ids=["below a link", "above", "a link above", "over another link"],
)
def test_a_hostile_snapshot_writes_nothing_outside_of_its_folder(
    tmp_path: Path, members: list[tuple[str, str | None]]
) -> None:
    (tmp_path / "outside").mkdir()
    with pytest.raises((UsageError, OSError)):
        unpack_snapshot(packed(*members), tmp_path / "copy")
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_received_repository_runs_nothing_of_its_configuration(repository: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    hooks = write(tmp_path / "hooks", **{"post-index-change": f"#!/bin/sh\ntouch {ran}\n"})
    (hooks / "post-index-change").chmod(0o755)
    write(repository, **{".gitattributes": "* filter=evil\n"})
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "links")
    for key, value in (
        ("core.fsmonitor", f"touch {ran}; echo"),
        ("core.hooksPath", str(hooks)),
        ("filter.evil.clean", f"touch {ran}; cat"),
        ("filter.evil.smudge", f"touch {ran}; cat"),
        ("filter.evil.required", "true"),
        ("extensions.worktreeConfig", "true"),
    ):
        git(repository, "config", key, value)
    write(repository, **{"lib.py": "y", ".gitattributes": "* filter=evil\n*.py filter=worse\n"})
    git(repository, "config", "--worktree", "filter.worse.clean", f"touch {ran}; cat")
    os.utime(repository / ".gitattributes", (1, 1))
    read_git_state(repository)
    assert not ran.exists()
    with contextlib.suppress(UsageError):
        snapshot_folder(repository)
    assert not ran.exists()
