"""What of a folder or a commit travels with a job, and what is refused."""

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
from phalanx.jobs.snapshot import Snapshot, snapshot_commit, snapshot_folder, unpack_snapshot


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
    assert "1.80 kB in 4 files would travel with the job, and 1.00 kB in 20000 files is the most" in str(refused.value)
    assert "most of it: data/ 1.50 kB, notes 200 B, model.py 100 B" in str(refused.value)


def test_a_commit_that_repeats_itself_is_refused_before_it_comes_into_memory(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "zeros").write_bytes(bytes(3 << 20))  # git packs it to 3 kB
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "zeros")
    monkeypatch.setattr(snapshot, "MAX_SNAPSHOT_BYTES", 1 << 20)
    monkeypatch.setattr(snapshot, "MAX_COMMIT_BYTES", 2 << 20)
    asked = monkeypatched_git(monkeypatch)
    with pytest.raises(UsageError, match=r"most of it: zeros 3\.15 MB"):
        snapshot_commit(repository, "HEAD")
    assert "archive" not in asked


def monkeypatched_git(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What git is asked from now on."""
    asked: list[str] = []
    real = snapshot._call_git

    def noted(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[bytes]":
        asked.append(arguments[0])
        return real(folder, *arguments)

    monkeypatch.setattr(snapshot, "_call_git", noted)
    return asked


def test_too_many_files_are_refused_with_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MAX_SNAPSHOT_FILES", 2)
    write(tmp_path, model_dot_py="x", data__a="", data__b="")
    with pytest.raises(UsageError, match=r"most of it: data/ 2 files, model\.py 1 file;"):
        snapshot_folder(tmp_path)


def test_a_commit_travels_whole_and_the_job_starts_where_the_recipe_is(repository: Path, tmp_path: Path) -> None:
    first = git(repository, "rev-parse", "HEAD")
    write(repository, exp__model_dot_py="new")
    git(repository, "commit", "--quiet", "-am", "second")
    write(repository, exp__model_dot_py="newer")
    code = snapshot_commit(repository / "exp", first[:10], "recipe.yaml")
    unpack_snapshot(code.tar, tmp_path / "copy")
    assert names(code) == ["exp/model.py", "exp/recipe.yaml", "lib.py"]
    assert (tmp_path / "copy" / code.start_dir / "model.py").read_text() == "old"
    assert (code.start_dir, code.commit, code.source_dir) == ("exp", first, repository.resolve())


def test_the_commit_that_is_checked_out_is_refused_when_something_changed_since(repository: Path) -> None:
    write(repository, unknown_dot_py="new files do not matter")
    assert snapshot_commit(repository, "HEAD").num_files == 3
    write(repository, exp__model_dot_py="changed", lib_dot_py="changed")
    with pytest.raises(
        UsageError, match=r"exp/model\.py and 1 more changed since that commit.*or use --snapshot workdir"
    ):
        snapshot_commit(repository, "HEAD")


@pytest.mark.parametrize("commit", ["v9", "", "HEAD:exp", "0" * 40, "folders"])
def test_a_commit_that_nobody_knows_is_refused(repository: Path, commit: str) -> None:
    with pytest.raises(UsageError, match="has no such commit"):
        snapshot_commit(repository, commit)


def test_a_word_that_git_would_take_for_an_option_is_no_commit(repository: Path) -> None:
    with pytest.raises(UsageError, match="expected `workdir`, or a revision"):
        snapshot_commit(repository, "--all")


def test_a_commit_outside_of_any_repository_is_refused_in_gits_words(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a git repository"):
        snapshot_commit(tmp_path, "HEAD")


def test_a_recipe_that_the_commit_does_not_have_is_refused(repository: Path) -> None:
    write(repository, exp__other_dot_yaml="")
    with pytest.raises(UsageError, match=r"other\.yaml: commit HEAD has no such file"):
        snapshot_commit(repository / "exp", "HEAD", "other.yaml")


def test_a_dry_run_tells_count_bytes_hash_and_what_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, model_dot_py="x" * 1500, a_dot_py="", _dot_env="swordfish")
    code = snapshot_folder(tmp_path)
    assert str(code).splitlines() == [
        f"# code that travels: 2 files, 1.50 kB, sha256 {code.digest}",
        f"# from {tmp_path}",
        "# left out: .env: its name says that it holds secrets",
    ]


def commit_of(folder: Path) -> str:
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "links")
    return git(folder, "rev-parse", "HEAD").strip()


@pytest.mark.parametrize(
    "links",
    [
        {"esc": "p/q/../../small.yaml", "p/q": "../a"},
        {"esc": "p/out/passwd", "p/out": "../../../etc"},
        {"esc": "loop", "loop": "esc"},
        {"esc": "/etc/passwd"},
        {"esc": "../outside"},
    ],
    ids=["lexically within", "over another link", "loop", "absolute", "above"],
)
def test_a_link_of_a_commit_that_leads_outside_is_left_out(repository: Path, links: dict[str, str]) -> None:
    write(repository, **{"a/b.txt": "b"})
    for name, target in links.items():
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).symlink_to(target)
    code = snapshot_commit(repository, commit_of(repository))
    assert "esc" in told(code)
    assert "esc" not in names(code)


def test_a_link_of_a_commit_over_another_link_within_it_travels(repository: Path, tmp_path: Path) -> None:
    write(repository, **{"a/b.txt": "b"})
    (repository / "folder").symlink_to("a")
    (repository / "file").symlink_to("folder/b.txt")
    unpack_snapshot(snapshot_commit(repository, commit_of(repository)).tar, tmp_path / "copy")
    assert (tmp_path / "copy" / "file").read_text() == "b"


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


@pytest.mark.parametrize("commit", [False, True])
def test_a_received_repository_runs_nothing_of_its_configuration(
    repository: Path, tmp_path: Path, commit: bool
) -> None:
    ran = tmp_path / "ran"
    hooks = write(tmp_path / "hooks", **{"post-index-change": f"#!/bin/sh\ntouch {ran}\n"})
    (hooks / "post-index-change").chmod(0o755)
    write(repository, **{".gitattributes": "* filter=evil\n"})
    head = commit_of(repository)
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
        snapshot_commit(repository, head) if commit else snapshot_folder(repository)
    assert not ran.exists()
