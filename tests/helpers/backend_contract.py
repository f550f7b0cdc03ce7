"""What every engine must do, as tests: a file for each engine inherits them and says how to reach a real one."""

import signal
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from phalanx.errors import UsageError
from phalanx.jobs.backends.base import Backend
from phalanx.jobs.snapshot import snapshot_folder
from phalanx.jobs.spec import Job, JobState, JobStatus, make_array
from train_harness import wait_until

SHELL_HOSTILE_WORDS = (
    "$(touch never)",
    "`id`",
    "two words",
    "",
    "a'b\"c",
    "it's",
    '"',
    "\\",
    "new\nline",
    "*",
    "~",
    "$HOME",
    "--flag=$HOME",
    "A=b",
    "-n",
    "é ☃ “x”",
    "#",
    "!!",
    "{code}",
    "%j",
    "semi;colon",
    "'; exit 3; '",
    "\x01\x7f",
)
"""Words that a shell would take for something else."""


class BackendContract:
    """Subclasses give the fixture `engine`, and `options` and `timeout_s` where an engine wants them."""

    options: ClassVar[dict[str, str]] = {}
    timeout_s = 30.0

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """Where jobs work: seen by the engine's nodes."""
        return tmp_path

    def job(self, folder: Path, code: str, *words: str, name: str = "job", **more: Any) -> Job:
        """A job that runs Python code."""
        command = (sys.executable, "-c", code, *words)
        return Job(name, command, folder, backend_options=self.options, cpus_per_node=1, **more)

    def run_job(self, engine: Backend, job: Job) -> tuple[str, JobStatus]:
        """Submit it and wait for its end."""
        ident = engine.submit(engine.render(job))
        return ident, self.wait_for_end(engine, ident)

    def wait_for_end(self, engine: Backend, ident: str) -> JobStatus:
        def over() -> JobStatus | None:
            status = engine.poll(ident)
            return status if status.state.is_final else None

        found: JobStatus = wait_until(over, self.timeout_s, f"job {ident} to end")
        return found

    def wait_for_output(self, engine: Backend, ident: str, what: str) -> None:
        """Wait until a job has printed this."""
        wait_until(
            lambda: any(what in line for line in engine.read_logs(ident)), self.timeout_s, f"{what!r} in its output"
        )

    def test_a_job_runs_to_its_end_and_what_it_printed_can_be_read(self, engine: Backend, folder: Path) -> None:
        ident, status = self.run_job(engine, self.job(folder, "print('hello'); print('world')"))
        assert (status.state, status.exit_code, status.num_attempts) == (JobState.DONE, 0, 1)
        lines = list(engine.read_logs(ident))
        printed = [line for line in lines if "hello" in line or "world" in line]  # Ray may write lines of its own
        assert ["hello" in line for line in printed] == [True, False]

    def test_every_word_reaches_the_program_as_it_was_given(self, engine: Backend, folder: Path) -> None:
        code = "import json, sys; open('words', 'w').write(json.dumps(sys.argv[1:]))"
        _, status = self.run_job(engine, self.job(folder, code, *SHELL_HOSTILE_WORDS))
        assert status.state is JobState.DONE
        assert (folder / "words").read_text() == __import__("json").dumps(list(SHELL_HOSTILE_WORDS))
        assert not (folder / "never").exists()

    def test_variables_and_secrets_reach_the_program_and_secrets_stand_nowhere(
        self, engine: Backend, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MY_SECRET", "swordfish-1234")
        code = "import os; open('found', 'w').write(os.environ['PLAIN'] + '|' + os.environ['MY_SECRET'])"
        job = self.job(folder, code, environment={"PLAIN": "it's $plain"}, secrets=("MY_SECRET",))
        request = engine.render(job)
        assert "swordfish" not in str(request)
        ident = engine.submit(request)
        status = self.wait_for_end(engine, ident)
        assert status.state is JobState.DONE, list(engine.read_logs(ident))
        assert (folder / "found").read_text() == "it's $plain|swordfish-1234"
        assert not any("swordfish" in line for line in engine.read_logs(ident))

    def test_a_job_that_is_not_finished_is_started_again(self, engine: Backend, folder: Path) -> None:
        code = "import os, sys; n = len(os.listdir('.')); open(str(n), 'w'); print('start', n); sys.exit(75 * (n < 2))"
        ident, status = self.run_job(engine, self.job(folder, code))
        assert (status.state, status.num_attempts) == (JobState.DONE, 3)
        assert sorted(path.name for path in folder.iterdir()) == ["0", "1", "2"]
        assert [line[-7:] for line in engine.read_logs(ident) if "start " in line] == ["start 0", "start 1", "start 2"]

    @pytest.mark.parametrize("code", [1, 65, 93])
    def test_a_job_that_failed_is_not_started_again(self, engine: Backend, folder: Path, code: int) -> None:
        _, status = self.run_job(engine, self.job(folder, f"import sys; open('began', 'x'); sys.exit({code})"))
        assert (status.state, status.exit_code, status.num_attempts) == (JobState.FAILED, code, 1)

    def test_a_signal_reaches_the_program(self, engine: Backend, folder: Path) -> None:
        code = (
            "import signal, sys, time\n"
            "def asked(*_):\n    print('asked', flush=True)\n    sys.exit(0)\n"
            "signal.signal(signal.SIGUSR1, asked)\nprint('ready', flush=True)\ntime.sleep(300)"
        )
        ident = engine.submit(engine.render(self.job(folder, code)))
        self.wait_for_output(engine, ident, "ready")
        engine.send_signal(ident, signal.SIGUSR1)
        assert self.wait_for_end(engine, ident).state is JobState.DONE
        assert any("asked" in line for line in engine.read_logs(ident))

    def test_a_cancelled_job_ends_for_good_and_may_be_cancelled_again(self, engine: Backend, folder: Path) -> None:
        code = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(75)); print('up', flush=True)"
        code += "; time.sleep(300)"
        ident = engine.submit(engine.render(self.job(folder, code)))
        self.wait_for_output(engine, ident, "up")
        engine.cancel(ident)
        assert self.wait_for_end(engine, ident).state is JobState.CANCELLED
        engine.cancel(ident)
        assert engine.poll(ident).state is JobState.CANCELLED

    def test_a_paused_job_saves_and_waits_until_it_is_resumed(self, engine: Backend, folder: Path) -> None:
        code = (
            "import os, pathlib, signal, sys, time\n"
            "def save(*_): pathlib.Path('saved').touch(); os._exit(75)\n"
            "if os.path.exists('saved'): sys.exit(0)\n"
            "signal.signal(signal.SIGTERM, save), signal.signal(signal.SIGUSR1, save)\n"
            "print('up', flush=True)\ntime.sleep(300)"
        )
        ident = engine.submit(engine.render(self.job(folder, code)))
        self.wait_for_output(engine, ident, "up")
        assert not engine.resume(ident)
        engine.pause(ident, "for a test")
        wait_until(lambda: engine.poll(ident).reason == "paused: for a test", self.timeout_s, "the job to be paused")
        assert (engine.poll(ident).state, (folder / "saved").exists()) == (JobState.QUEUED, True)
        assert engine.resume(ident)
        assert self.wait_for_end(engine, ident).num_attempts == 2
        assert engine.poll(ident).state is JobState.DONE
        with pytest.raises(UsageError, match="there is nothing to pause"):
            engine.pause(ident, "again")

    def test_jobs_are_listed_and_one_that_is_not_there_is_told(self, engine: Backend, folder: Path) -> None:
        ident, _ = self.run_job(engine, self.job(folder, "pass", name="listed.job"))
        assert (ident, "listed.job") in [(status.id, status.name) for status in engine.list_jobs()]
        for ask in (
            engine.poll,
            engine.cancel,
            lambda job: list(engine.read_logs(job)),
            lambda job: engine.send_signal(job, 10),
        ):
            with pytest.raises(UsageError, match="no such job"):
                ask("424242")

    def test_two_jobs_of_one_name_are_refused(self, engine: Backend, folder: Path) -> None:
        job = self.job(folder, "import time; time.sleep(300)", name="twin")
        ident = engine.submit(engine.render(job))
        with pytest.raises(UsageError, match="twin"):
            engine.submit(engine.render(job))
        engine.cancel(ident)
        self.wait_for_end(engine, ident)

    def test_code_that_travels_stays_what_it_was_when_it_was_submitted(self, engine: Backend, folder: Path) -> None:
        (folder / "deep").mkdir()
        (folder / "deep" / "version.py").write_text("VERSION = 'old'")
        (folder / "deep" / "main.py").write_text(
            "import os, pathlib, sys, time, version\n"
            "print('it is', version.VERSION, os.path.samefile(os.environ['PHALANX_SNAPSHOT_DIR'], '..'), flush=True)\n"
            "edited, again = (pathlib.Path(sys.argv[1]) / name for name in ('edited', 'again'))\n"
            "while not edited.exists(): time.sleep(0.05)\n"
            "if not again.exists(): again.touch(); sys.exit(75)"
        )
        command = (sys.executable, "main.py", str(folder))
        code = snapshot_folder(folder, "deep")
        job = Job("carried", command, folder / "gone", backend_options=self.options, cpus_per_node=1, snapshot=code)
        request = engine.render(job)
        assert code.digest in str(request)
        ident = engine.submit(request)
        (folder / "deep" / "version.py").write_text("VERSION = 'new'")
        (folder / "edited").touch()
        status = self.wait_for_end(engine, ident)
        lines = list(engine.read_logs(ident))
        assert (status.state, status.num_attempts) == (JobState.DONE, 2), lines
        assert [line[-11:] for line in lines if "it is" in line] == ["is old True", "is old True"]

    def test_each_member_of_an_array_has_its_own_words_starts_and_end(self, engine: Backend, folder: Path) -> None:
        code = (
            "import os, pathlib, sys; began = pathlib.Path(sys.argv[2]); again = began.exists(); began.touch()\n"
            "print('word', repr(sys.argv[3]), flush=True); sys.exit(0 if again else int(sys.argv[1]))"
        )
        ends = ((0, "$(touch never)"), (93, "a'b\"c"), (75, "new\nline"))
        jobs = [self.job(folder, code, str(end), f"began-{end}", word) for end, word in ends]
        idents = engine.submit_array(engine.render_array(make_array("swept", jobs)))
        found = [self.wait_for_end(engine, ident) for ident in idents]
        assert [(each.name, each.state, each.exit_code, each.num_attempts) for each in found] == [
            ("swept.0", JobState.DONE, 0, 1),
            ("swept.1", JobState.FAILED, 93, 1),
            ("swept.2", JobState.DONE, 0, 2),
        ]
        for ident, (_, word) in zip(idents, ends, strict=True):
            assert any(f"word {word!r}" in line for line in engine.read_logs(ident))
        assert [each.id for each in engine.list_jobs("swept")] == idents

    def test_one_member_of_an_array_can_be_cancelled_and_then_all(self, engine: Backend, folder: Path) -> None:
        jobs = [self.job(folder, "import time; print('up', flush=True); time.sleep(300)") for _ in range(3)]
        idents = engine.submit_array(engine.render_array(make_array("stopped", jobs)))
        self.wait_for_output(engine, idents[0], "up")
        engine.cancel(idents[1])
        assert self.wait_for_end(engine, idents[1]).state is JobState.CANCELLED
        assert engine.poll(idents[0]).state is JobState.RUNNING
        assert not engine.poll(idents[2]).state.is_final
        for each in engine.list_jobs("stopped"):
            engine.cancel(each.id)
        assert [self.wait_for_end(engine, ident).state for ident in idents] == [JobState.CANCELLED] * 3

    def test_what_would_be_submitted_names_the_command_and_starts_nothing(self, engine: Backend, folder: Path) -> None:
        request = engine.render(self.job(folder, "open('began', 'x')", "a word"))
        assert "began" in str(request)
        assert engine.render(request.job).files == request.files
        assert list(folder.iterdir()) == []

    def test_an_option_that_the_engine_does_not_know_is_refused(self, engine: Backend, folder: Path) -> None:
        job = Job("job", ("true",), folder, backend_options={**self.options, "partitoin": "x"})
        with pytest.raises(UsageError, match="partitoin"):
            engine.render(job)

    def test_a_program_that_is_not_there_fails_with_a_reason(self, engine: Backend, folder: Path) -> None:
        job = Job("job", ("/nowhere/program",), folder, backend_options=self.options, cpus_per_node=1)
        ident = engine.submit(engine.render(job))
        assert self.wait_for_end(engine, ident).state is JobState.FAILED
        assert any("/nowhere/program" in line for line in engine.read_logs(ident))
