"""The scripts for Slurm: what they say, and what bash makes of them with Slurm's programs replaced by stubs."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backend_contract import SHELL_HOSTILE_WORDS
from phalanx.errors import UsageError
from phalanx.jobs.backends.slurm.batch_script import (
    render_array_scripts,
    render_scripts,
    render_secret_file,
)
from phalanx.jobs.backends.slurm.sbatch_options import parse_options
from phalanx.jobs.snapshot import Snapshot
from phalanx.jobs.spec import Job, make_array

GOLDEN = Path(__file__).parent / "golden" / "slurm"
VERSION = (22, 5, 8)
ODD = (*SHELL_HOSTILE_WORDS, "\udcff")
"""The last one is no UTF-8, which a file's name may be."""


def typical(folder: Path = Path("/shared/my work")) -> Job:
    return Job(
        "gpt-python",
        ("phalanx", "train", "recipe.yaml", "note=it's $HOME"),
        folder,
        num_nodes=4,
        gpus_per_node=8,
        cpus_per_node=96,
        time_limit_s=86400.0,
        priority=-5,
        environment={"NCCL_DEBUG": "WARN", "GREETING": "a 'b' $c"},
        secrets=("WANDB_API_KEY",),
        backend_options={
            "partition": "main",
            "account": "lab",
            "exclusive": "yes",
            "switches": "1@02:00:00",
            "comment": 'of "today" \\ %j',
            "container-image": "/shared/image.sqsh",
            "container-mounts": "/data:/data:ro",
            "max-requeues": "7",
        },
    )


@pytest.mark.parametrize("script", ["batch.sh", "node.sh"])
def test_a_typical_job_is_rendered_as_agreed(script: str) -> None:
    text = render_scripts(typical(), VERSION, Path("/home/me/state/slurm/gpt-python-0123abcd"))[script]
    assert text == (GOLDEN / script).read_text()


def test_shellcheck_finds_nothing_in_the_scripts(tmp_path: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("RENDERED SCRIPTS ARE NOT CHECKED: shellcheck is not installed")
    plain = [word for word in ODD if word.isprintable() and word.isascii()]
    job = Job("nasty", tuple(plain[2:]), tmp_path, environment={"ODD": "$(x) '"}, secrets=("S",))
    contained = Job("box", ("python", "x"), tmp_path, gpus_per_node=1, backend_options={"apptainer-image": "/it's.sif"})
    for each in (typical(), job, contained):
        for name, text in render_scripts(each, VERSION, tmp_path / "it's $(here)").items():
            (tmp_path / name).write_text(text)
            found = subprocess.run(["shellcheck", str(tmp_path / name)], capture_output=True, text=True)
            assert found.stdout == ""
    for name, text in render_array_scripts([typical(), job], VERSION, tmp_path / "it's $(here)").items():
        (tmp_path / "one.sh").write_text(text)
        found = subprocess.run(["shellcheck", str(tmp_path / "one.sh")], capture_output=True, text=True)
        assert found.stdout == "", name


SHOW = (sys.executable, "-c", "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]))")


def on_a_node(job: Job, folder: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a job's node script here, as srun would on the second of its nodes."""
    folder.mkdir(exist_ok=True)
    for name, text in render_scripts(job, VERSION, folder).items():
        (folder / name).write_text(text, errors="surrogateescape")
    place = {"PATH": os.environ["PATH"], "SLURM_PROCID": "1", "SLURMD_NODENAME": "n2", **environment}
    return subprocess.run(["bash", str(folder / "node.sh"), "3"], env=place, capture_output=True, timeout=60)


def test_every_word_reaches_the_program_as_it_was_given(tmp_path: Path) -> None:
    values = {f"V{number}": word for number, word in enumerate(ODD)}
    secret = {f"S{number}": word for number, word in enumerate(ODD)}
    start = tmp_path / "odd $(folder) 'x' \"y\"\\"
    start.mkdir()
    job = Job("words", (*SHOW, *ODD), start, environment=values, secrets=tuple(secret))
    folder = tmp_path / "state it's $(here)"
    folder.mkdir()
    (folder / "secrets.sh").write_text(render_secret_file(secret), errors="surrogateescape")
    done = on_a_node(job, folder)
    assert done.returncode == 0, done.stderr
    arguments, environment, cwd = json.loads(done.stdout)
    assert tuple(arguments) == ODD
    assert {name: environment[name] for name in (*values, *secret)} == values | secret
    assert cwd == str(start)
    assert environment["PHALANX_NODE_RANK"] == "1"
    assert (folder / "code.3.n2").read_text() == "0\n"


@pytest.mark.parametrize("word", ["exit", "A=b", "if"])
def test_the_first_word_is_a_program_and_never_the_shells(tmp_path: Path, word: str) -> None:
    done = on_a_node(Job("first", (word, "0"), tmp_path), tmp_path / "state", PATH="/usr/bin:/bin")
    assert (tmp_path / "state" / "code.3.n2").read_text() == "127\n"
    assert f"{word}: not found".encode() in done.stderr


@pytest.mark.parametrize(("code", "told"), [(0, 0), (75, 0), (77, 77), (93, 93), (1, 1)])
def test_unfinished_is_no_failure_to_srun(tmp_path: Path, code: int, told: int) -> None:
    done = on_a_node(Job("codes", ("bash", "-c", f"exit {code}"), tmp_path), tmp_path / "state")
    assert done.returncode == told
    assert (tmp_path / "state" / "code.3.n2").read_text() == f"{code}\n"


def test_a_variable_of_the_job_does_not_disturb_the_script(tmp_path: Path) -> None:
    job = Job("names", ("bash", "-c", "exit 5"), tmp_path, environment={"folder": "/nowhere", "PATH": "/bin"})
    on_a_node(job, tmp_path / "state")
    assert (tmp_path / "state" / "code.3.n2").read_text() == "5\n"


def test_a_node_that_does_not_see_the_folder_is_unfit(tmp_path: Path) -> None:
    done = on_a_node(Job("blind", ("true",), tmp_path / "missing"), tmp_path / "state")
    assert done.returncode == 77
    assert b"n2 does not see the job's folder" in done.stderr


STUB = """#!/bin/bash
case $(basename "$0") in
scontrol)
  case $1 in
  show) if [[ $2 == hostnames ]]; then printf '%s\\n' n1 n2 n3; else echo "   JobState=$STATE Reason=None"; fi ;;
  ping) echo 'Slurmctld(primary) at controller is UP' ;;
  *) echo "$*" >>"$CALLS" ;;
  esac ;;
srun)
  bytes=$(wc -c <"$PHALANX_TOKEN_FILE")
  echo "$PHALANX_NUM_NODES $PHALANX_LEADER_ADDR $(stat -c %a "$PHALANX_TOKEN_FILE") $bytes" >>"$CALLS"
  shift "$(($# - 1))"
  folder=$(dirname "$PHALANX_TOKEN_FILE")
  number=1
  for code in $CODES; do
    if [[ $code != - ]]; then echo "$code" >"$folder/code.$1.n$number"; fi
    number=$((number + 1))
  done
  exit "$SRUN" ;;
esac
"""


def batch(
    tmp_path: Path,
    codes: str,
    state: str = "RUNNING",
    restarts: int = 0,
    srun: int = 9,
    member: int | None = None,
    deaths: int = 0,
    min_nodes: int | None = None,
) -> tuple[int, list[str], dict[str, str]]:
    """Run a batch script here, with nodes that end with these codes: its own code, what it asked of Slurm, and the
    result that it left."""
    folder, programs, calls = tmp_path / "state", tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    programs.mkdir()
    job = Job("stubbed", ("true",), tmp_path, num_nodes=3, secrets=("S",), backend_options={"max-requeues": "2"})
    job = replace(job, min_nodes=min_nodes)
    whole, place = folder, {}
    texts = render_scripts(job, VERSION, folder)
    if member is not None:
        texts = render_array_scripts(make_array("stubbed", [job] * 2), VERSION, folder)
        place, folder = {"SLURM_ARRAY_JOB_ID": "12340", "SLURM_ARRAY_TASK_ID": str(member)}, folder / str(member)
    for name, text in texts.items():
        (whole / name).parent.mkdir(exist_ok=True)
        (whole / name).write_text(text)
    (folder / "secrets.sh").write_text("export S=x\n")
    if deaths:
        (folder / "deaths").write_text(f"{deaths}\n")
    for name in ("scontrol", "srun", "scancel"):
        (programs / name).write_text(STUB)
        (programs / name).chmod(0o755)
    place |= {"PATH": f"{programs}:/usr/bin:/bin", "SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "n[1-3]"}
    place |= {"SRUN": str(srun), "CODES": codes, "STATE": state, "CALLS": str(calls)} | (
        {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
    )
    done = subprocess.run(["bash", str(whole / "batch.sh")], env=place, capture_output=True, text=True, timeout=60)
    result = dict(line.split(" ", 1) for line in (folder / "result").read_text().splitlines())
    return done.returncode, calls.read_text().splitlines(), result


def test_nodes_are_told_their_number_leader_and_token(tmp_path: Path) -> None:
    _, calls, result = batch(tmp_path, "0 0 0", restarts=1)
    assert calls == ["3 n1:22346 600 64"]
    assert (result["code"], result["attempt"], result["nodes"]) == ("0", "1", "n1 n2 n3")


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ("0 0 0", 0),
        ("0 1 0", 0),  # the first node leads
        ("93 75 143", 93),
        ("143 1 143", 1),  # it was ended because another failed
        ("143 75 65", 65),
        ("- - -", 9),  # nobody came to an end
        ("1 77 0", 1),
    ],
)
def test_the_first_nodes_code_counts_unless_another_brought_it_down(tmp_path: Path, codes: str, code: int) -> None:
    found, calls, result = batch(tmp_path, codes)
    assert (found, result["code"]) == (code, str(code))
    assert len(calls) == 1  # nothing is queued again
    assert not (tmp_path / "state" / "secrets.sh").exists()
    assert list((tmp_path / "state").glob("token.*")) == []


@pytest.mark.parametrize(("codes", "code"), [("- 0 0", 0), ("77 0 0", 0), ("0 77 0", 0), ("75 75 -", 75)])
def test_a_job_that_may_run_on_fewer_nodes_is_done_when_one_of_them_says_so(
    tmp_path: Path, codes: str, code: int
) -> None:
    found, calls, _ = batch(tmp_path, codes, min_nodes=2)
    assert (found, calls[0].split()[0]) == (code, "2:3")


def test_a_job_that_may_run_on_fewer_nodes_keeps_those_that_are_left(tmp_path: Path) -> None:
    job = Job("elastic", ("true",), tmp_path, num_nodes=4, min_nodes=2)
    old, new = (parse_options(job, version) for version in ((22, 5), (25, 11)))
    assert {"--nodes=2-4", "--no-kill", "--requeue"} <= set(old.sbatch_options)
    assert "--requeue=expedite" in new.sbatch_options
    assert old.srun_options == ("--no-kill", "--kill-on-bad-exit=0", "--wait=0")


@pytest.mark.parametrize(("codes", "srun"), [("75 75 75", 9), ("- 0 0", 0)], ids=["unfinished", "first node silent"])
def test_a_job_that_is_not_done_is_queued_again(tmp_path: Path, codes: str, srun: int) -> None:
    assert batch(tmp_path, codes, srun=srun)[:2] == (75, ["3 n1:22345 600 64", "requeue 12345"])
    assert (tmp_path / "state" / "secrets.sh").exists()


@pytest.mark.parametrize("codes", ["75 77 77", "75 1 77", "143 77 77", "77 77 77"])
def test_a_job_on_unfit_nodes_is_held_and_they_are_named(tmp_path: Path, codes: str) -> None:
    code, calls, _ = batch(tmp_path, codes)
    assert (code, calls[1:]) == (77, ["requeuehold 12345"])
    unfit = (tmp_path / "state" / "unfit").read_text().split()
    assert unfit == [f"n{number}" for number, each in enumerate(codes.split(), 1) if each == "77"]


@pytest.mark.parametrize(("codes", "srun"), [("137 143 143", 137), ("- - -", 137), ("139 - -", 1), ("- - -", 233)])
def test_a_job_that_was_killed_is_queued_again(tmp_path: Path, codes: str, srun: int) -> None:
    code, calls, _ = batch(tmp_path, codes, srun=srun, deaths=1)
    assert (code > 128, calls[1:]) == (True, ["requeue 12345"])
    assert (tmp_path / "state" / "deaths").read_text() == "2\n"


@pytest.mark.parametrize(
    ("codes", "options", "code"),
    [
        ("75 75 75", {"state": "CANCELLED"}, 75),
        ("75 75 75", {"restarts": 2}, 75),
        ("255 - -", {"srun": 255}, 255),  # no signal
        ("137 143 143", {"srun": 137, "deaths": 2}, 137),
    ],
    ids=["cancelled", "more often than it may", "more than 192", "killed the third time in a row"],
)
def test_what_is_not_queued_again(tmp_path: Path, codes: str, options: dict[str, Any], code: int) -> None:
    found, calls, result = batch(tmp_path, codes, **options)
    assert (found, len(calls), result["code"]) == (code, 1, str(code))
    assert not (tmp_path / "state" / "secrets.sh").exists()


@pytest.mark.parametrize("progress", [False, True])
def test_deaths_in_a_row_end_with_progress_or_a_word_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress: bool
) -> None:
    monkeypatch.setattr("phalanx.jobs.backends.slurm.batch_script.MIN_PROGRESS_S", 0.0 if progress else 600.0)
    _, calls, _ = batch(tmp_path, "137 143 143" if progress else "75 75 75", deaths=2)
    assert calls[1:] == ["requeue 12345"]
    assert (tmp_path / "state" / "deaths").read_text() == f"{int(progress)}\n"


def test_a_member_of_an_array_keeps_its_own_folder_and_is_queued_again_by_itself(tmp_path: Path) -> None:
    code, calls, result = batch(tmp_path, "75 75 75", member=1)
    assert (code, calls, result["code"]) == (75, ["3 n1:22345 600 64", "requeue 12340_1"], "75")
    assert [path.name for path in (tmp_path / "state").iterdir() if not path.is_dir()] == ["batch.sh"]
    assert sorted(path.name for path in (tmp_path / "state" / "0").iterdir()) == ["node.sh"]


def test_an_array_is_one_script_for_slurm_and_one_more_for_each_member(tmp_path: Path) -> None:
    folder = tmp_path / "100% it's"
    jobs = make_array("many", [Job("x", ("run", word), tmp_path, run_dir=tmp_path / word) for word in ("a", "$(b)")], 1)
    texts = render_array_scripts(jobs, VERSION, folder)
    assert list(texts) == ["batch.sh", "0/node.sh", "1/node.sh"]
    quoted = str(folder).replace("%", "%%")
    assert f'#SBATCH "--output={quoted}/%a/log"' in texts["batch.sh"].splitlines()
    assert {"#SBATCH --job-name=many", '#SBATCH "--array=0-1%1"'} <= set(texts["batch.sh"].splitlines())
    assert "exec -- run '$(b)'" in texts["1/node.sh"]


def test_code_that_travels_is_where_the_job_starts(tmp_path: Path) -> None:
    job = Job("code", ("true",), Path("/not/here"), snapshot=Snapshot(b"", Path("/x"), "deep/er", 1, 1))
    texts = render_scripts(job, VERSION, tmp_path)
    assert f"#SBATCH --chdir={tmp_path}/code/deep/er" in texts["batch.sh"].splitlines()
    assert f"export PHALANX_SNAPSHOT_DIR={tmp_path}/code" in texts["node.sh"].splitlines()
    assert "/not/here" not in str(texts)


def header(**more: object) -> tuple[str, ...]:
    return parse_options(Job("a", ("true",), Path("/x"), **more), VERSION).sbatch_options  # type: ignore[arg-type]


def test_the_warning_comes_before_half_of_a_short_limit_is_over() -> None:
    assert {"--time=1440", "--signal=B:USR1@120"} <= set(header(time_limit_s=86400.0))
    assert {"--time=2", "--signal=B:USR1@31"} <= set(header(time_limit_s=61.0))
    assert "--signal=B:USR1@65535" in header(warning_s=1e6)


@pytest.mark.parametrize("limit", [1.0, 60.0, 61.0, 120.0, 180.0, 86400.0])
@pytest.mark.parametrize("warning", [5.0, 30.0, 120.0, 1e6])
def test_no_warning_comes_before_the_script_runs(limit: float, warning: float) -> None:
    """Slurm, which looks every 30 s, sends it once: on a real one those of a job's first second were lost."""
    words = header(time_limit_s=limit, warning_s=warning)
    granted = 60 * next(int(word.removeprefix("--time=")) for word in words if word.startswith("--time="))
    ahead = next(int(word.rpartition("@")[2]) for word in words if word.startswith("--signal="))
    assert granted - ahead - 30 >= 15 or ahead == 0
    assert ahead >= min(warning, limit / 2, 15)


def test_memory_is_what_is_asked_for_or_all_of_an_exclusive_node() -> None:
    assert "--mem=1025M" in header(memory_bytes=2**30 + 1)
    assert "--mem=0" in header(backend_options={"exclusive": "yes"})
    assert not [one for one in header() if one.startswith("--mem")]


def refused(options: dict[str, str]) -> str:
    with pytest.raises(UsageError) as found:
        parse_options(Job("a", ("true",), Path("/x"), backend_options=options), VERSION)
    return str(found.value)


def test_wrong_options_say_what_would_be_right() -> None:
    assert refused({"partiton": "x"}) == "job a: slurm has no option 'partiton'; did you mean partition?"
    assert "known are partition, account" in refused({"zzz": "x"})
    assert "option qos is empty" in refused({"qos": " "})
    assert "line break" in refused({"comment": "a\n#SBATCH --nodes=9"})
    assert "expected yes, no or user" in refused({"exclusive": "maybe"})
    assert "expected a whole number" in refused({"max-requeues": "-1"})
    assert "needs container-image" in refused({"container-mounts": "/a:/a"})
    assert "exclude each other" in refused({"container-image": "a", "apptainer-image": "b"})


def test_a_folder_that_slurm_could_not_take_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="control character"):
        render_scripts(Job("a", ("true",), Path("/x\ny")), VERSION, tmp_path)
    with pytest.raises(UsageError, match="backslash"):
        render_scripts(Job("a", ("true",), Path("/x")), VERSION, Path("/a\\b"))


def test_apptainer_starts_the_command_and_sees_both_folders(tmp_path: Path) -> None:
    job = Job("box", ("python", "x y"), tmp_path, gpus_per_node=1, backend_options={"apptainer-image": "/it's.sif"})
    line = next(
        line for line in render_scripts(job, VERSION, Path("/state"))["node.sh"].splitlines() if line.startswith("exec")
    )
    start = tmp_path
    assert line == (
        f"exec -- apptainer exec --nv --bind=/state:/state --bind={start}:{start} --pwd={start} "
        "'/it'\"'\"'s.sif' python 'x y'"
    )


COMMANDS = {
    # the warning comes at once; of a step that is not there, Slurm shows others if it is named by a member of an array
    "scontrol": 'case "$2" in hostnames) kill -USR1 "$BATCH"; echo here ;; step) [[ $3 == *_* || -e pid ]] ;; esac',
    "srun": 'sleep 0.5; trap "exit 0" TERM; echo $$ >pid; for _ in {1..600}; do sleep 0.05; done; exit 3',
    "scancel": 'if [[ -e pid ]]; then echo "$*"; else echo early; fi >>told; kill "$(cat pid)"',
}


@pytest.mark.parametrize("member", [False, True])
def test_a_warning_that_comes_before_there_is_a_step_is_told_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member: bool
) -> None:
    monkeypatch.setattr("phalanx.jobs.backends.slurm.batch_script.SIGNAL_GRACE_S", 0)
    job, folder, found = Job("early", ("true",), tmp_path), tmp_path / "job", tmp_path / "bin"
    (folder / "1").mkdir(parents=True)
    found.mkdir()
    for name, text in COMMANDS.items():
        (found / name).write_text(f"#!/bin/bash\n{text}\n")
        (found / name).chmod(0o755)
    both = (
        render_array_scripts(make_array("early", [job, job]), VERSION, folder)
        if member
        else render_scripts(job, VERSION, folder)
    )
    (folder / "batch.sh").write_text(both["batch.sh"])
    environment = {"PATH": f"{found}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost"}
    if member:
        environment |= {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "1"}
    started = ["bash", "-c", 'BATCH=$$ exec bash "$0"', str(folder / "batch.sh")]
    subprocess.run(started, cwd=tmp_path, env=environment, timeout=30, check=False)
    id = "6_1.0" if member else "7.0"
    assert set((tmp_path / "told").read_text().splitlines()) == {f"--signal=USR1 {id}"}
