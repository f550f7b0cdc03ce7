"""A run at a URL: its files as objects, events and logs as segments, and local directories that follow them."""

from pathlib import Path

import pytest

from phalanx.errors import ExitCode, UsageError
from phalanx.run import EventLog, Run, read_events
from phalanx.run.directory import write_json
from phalanx.run.event_types import RunWarning
from phalanx.storage import run_objects, stored_run
from phalanx.storage.lease import LeaseLostError
from phalanx.storage.run_objects import RunObjects, make_local_directory, mirror_run
from phalanx.storage.url import StoreUrl


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store/runs/a run+1"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Machine":
    return Machine(tmp_path, monkeypatch)


class Machine:
    """Machines with caches of their own."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        self.tmp_path, self.monkeypatch = tmp_path, monkeypatch
        self.use("first")

    def use(self, name: str) -> None:
        """What follows happens on this machine."""
        self.monkeypatch.setenv("PHALANX_CACHE_DIR", str(self.tmp_path / name))

    def begin(self, url: str) -> RunObjects:
        """A process that trains the run on the machine in use."""
        run = make_local_directory(url, "runs")
        run.create()
        objects = RunObjects(run)
        objects.begin()
        objects.download()
        return objects


def write_lines(path: Path, *lines: str) -> None:
    with open(path, "a") as file:
        file.write("".join(f"{line}\n" for line in lines))


def stored_names(tmp_path: Path) -> list[str]:
    root = tmp_path / "store/runs/a run+1"
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_events_and_logs_follow_in_segments_of_whole_lines(url: str, machine: Machine, tmp_path: Path) -> None:
    objects = machine.begin(url)
    run = objects.run
    write_lines(run.events, "one")
    objects.upload()
    objects.upload()  # nothing is new
    write_lines(run.events, "two")
    (run.logs / "attempt-0000-rank-0.log").write_text("said\ntorn")
    with open(run.events, "a") as file:
        file.write("torn")
    objects.upload()
    objects.upload_logs()
    assert stored_names(tmp_path) == [
        "events/0000000000000000.jsonl",
        "events/0000000000000004.jsonl",
        "logs/attempt-0000-rank-0.log/0000000000000000",
        "run.json",
    ]
    assert (tmp_path / "store/runs/a run+1/events/0000000000000004.jsonl").read_text() == "two\n"
    assert (tmp_path / "store/runs/a run+1/logs/attempt-0000-rank-0.log/0000000000000000").read_text() == "said\n"
    objects.upload_logs(is_last=True)
    assert (tmp_path / "store/runs/a run+1/logs/attempt-0000-rank-0.log/0000000000000005").read_text() == "torn"


def test_small_files_are_written_when_they_change_and_removed_with_the_local_one(
    url: str, machine: Machine, tmp_path: Path
) -> None:
    objects = machine.begin(url)
    write_json(objects.run.result, {"status": "done"})
    write_json(objects.run.leader, {"host": "of this machine"})
    objects.upload()
    assert stored_names(tmp_path) == ["result.json", "run.json"]
    requests = objects.store.counters.requests
    objects.upload()
    assert objects.store.counters.requests == requests
    objects.run.result.unlink()
    objects.upload()
    assert stored_names(tmp_path) == ["run.json"]


def test_another_machine_continues_from_the_url_alone(url: str, machine: Machine) -> None:
    first = machine.begin(url)
    write_lines(first.run.events, "one", "two")
    write_json(first.run.plan, {"steps": 3})
    (first.run.path / "huggingface").mkdir()
    (first.run.path / "huggingface/vocab.txt").write_text("words")
    first.upload()
    machine.use("second")
    second = machine.begin(url)
    assert second.run.path != first.run.path
    assert second.run.events.read_text() == "one\ntwo\n"
    assert second.run.read_json(second.run.plan) == {"steps": 3}
    assert (second.run.path / "huggingface/vocab.txt").read_text() == "words"
    write_lines(second.run.events, "three")
    second.upload()
    machine.use("first")
    write_lines(first.run.events, "lost with the lease")
    with pytest.raises(LeaseLostError, match="another process has written events"):
        first.upload()
    assert machine.begin(url).run.events.read_text() == "one\ntwo\nthree\n"


def test_the_machine_of_a_killed_run_keeps_the_events_that_were_not_uploaded(url: str, machine: Machine) -> None:
    first = machine.begin(url)
    write_lines(first.run.events, "one")
    first.upload()
    write_lines(first.run.events, "two")
    again = machine.begin(url)
    again.upload()
    machine.use("second")
    assert machine.begin(url).run.events.read_text() == "one\ntwo\n"


def test_many_segments_are_merged(url: str, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_objects, "_MAX_SEGMENTS", 4)
    objects = machine.begin(url)
    reader = make_local_directory(url, "run-mirrors")
    for number in range(10):
        write_lines(objects.run.events, f"line {number}")
        objects.upload()
        if number % 3 == 0:
            RunObjects(reader).download()
            assert reader.events.read_text() == objects.run.events.read_text()
    RunObjects(reader).download()
    assert reader.events.read_text() == objects.run.events.read_text()
    assert [name for name in stored_names(tmp_path) if name.startswith("events/")] == [
        "events/0000000000000000.jsonl",
        "events/0000000000000028.jsonl",
        "events/0000000000000056.jsonl",
        "events/0000000000000063.jsonl",
    ]


def test_a_reader_skips_what_a_merge_that_was_cut_left(url: str, machine: Machine) -> None:
    objects = machine.begin(url)
    for line in ("one", "two", "three"):
        write_lines(objects.run.events, line)
        objects.upload()
    objects.store.write((objects.url / "events/0000000000000000.jsonl").key, b"one\ntwo\nthree\n")
    machine.use("second")
    assert machine.begin(url).run.events.read_text() == "one\ntwo\nthree\n"


def test_logs_of_a_fresh_machine_follow_those_of_the_one_before(url: str, machine: Machine) -> None:
    for name, text in (("first", "early"), ("second", "late")):
        machine.use(name)
        objects = machine.begin(url)
        write_lines(objects.run.logs / "tracker-wandb.log", text)
        objects.upload_logs()
        objects.upload()
    write_lines(objects.run.logs / "tracker-wandb.log", "later")
    objects.upload_logs()
    path = mirror_run(_started(url, objects), logs=True)
    assert (path / "logs/tracker-wandb.log").read_text() == "early\nlate\nlater\n"


def _started(url: str, objects: RunObjects) -> str:
    (objects.run.path / "resolved.yaml").write_text("name: a\n")
    objects.upload()
    return url


def test_another_run_at_the_url_does_not_get_what_was_here(url: str, machine: Machine, tmp_path: Path) -> None:
    objects = machine.begin(url)
    write_lines(objects.run.events, "of the first run")
    write_json(objects.run.plan, {"steps": 3})
    objects.upload()
    objects.store.delete([each.key for each in objects.store.list_objects(objects.url.key)])
    again = machine.begin(url)
    assert not again.run.plan.exists()
    assert not again.run.events.exists()
    assert again.run.store_url == url


def test_a_url_that_holds_something_else_is_refused(url: str, machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "store/runs/a run+1").mkdir(parents=True)
    (tmp_path / "store/runs/a run+1/thesis.tex").write_text("mine")
    with pytest.raises(UsageError, match=r"is not a run and holds other objects, such as thesis\.tex") as error:
        machine.begin(url)
    assert error.value.code is ExitCode.USAGE
    assert stored_names(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("location", ["hf://owner/name", "https://example.org/run"])
def test_a_run_is_not_kept_where_nothing_can_be_written(location: str, machine: Machine) -> None:
    with pytest.raises(UsageError, match="expected an s3://, gs:// or az:// URL"):
        machine.begin(location)


def test_a_url_without_a_run_is_one_sentence(url: str, machine: Machine) -> None:
    for read in (Run.open_existing, mirror_run):
        with pytest.raises(UsageError, match=r"no run here .*phalanx train RECIPE --run "):
            read(url)


def test_a_url_inside_a_run_is_answered_with_that_of_the_run(url: str, machine: Machine, tmp_path: Path) -> None:
    machine.begin(url)
    (tmp_path / "store/runs/a run+1/checkpoints/step-000000008").mkdir(parents=True)
    (tmp_path / "store/runs/a run+1/checkpoints/step-000000008/MANIFEST.json").write_text("{}")
    for inside in (f"{url}/checkpoints", f"{url}/checkpoints/step-000000008"):
        with pytest.raises(UsageError) as error:
            Run.open_existing(inside)
        assert str(error.value) == f"{inside}: is inside the run {url}; give that"


def test_a_run_is_read_by_its_url(url: str, machine: Machine) -> None:
    objects = machine.begin(url)
    _started(url, objects)
    log = EventLog(objects.run.events)
    log.write(RunWarning(text="careful"))
    objects.upload()
    machine.use("reader")
    run = Run(url)  # type: ignore[arg-type]
    assert (run.location, run.store_url) == (url, url)
    assert len(list(read_events(run.events))) == 1
    log.write(RunWarning(text="again"))
    log.close()
    objects.upload()
    assert len(list(read_events(Run.open_existing(url).events))) == 2


def test_another_node_that_may_not_write_there_is_refused_before_it_joins(
    url: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(url: StoreUrl) -> None:
        raise UsageError(f"{url}: access is denied")

    monkeypatch.setattr(stored_run, "check_writable", refuse)
    run = make_local_directory(url, "runs")
    with open(run.path / "renewal", "w+b") as renewal, pytest.raises(UsageError, match="access is denied"):
        stored_run._Keeper(str(run.path), False, True, 0.0, renewal.fileno(), None).open()
