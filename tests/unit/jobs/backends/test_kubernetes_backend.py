"""The engine against a stand-in for the API server, through the official client: what is created, what is answered, and
what every refusal is called. No cluster is needed, and none was at hand."""

import io
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from fake_kubernetes import SCHEMAS, FakeApiServer, job_of, kubeconfig
from phalanx.app.submit import follow_job
from phalanx.errors import UsageError
from phalanx.jobs.backends.base import poll_again
from phalanx.jobs.backends.kubernetes.backend import KubernetesBackend
from phalanx.jobs.snapshot import Snapshot
from phalanx.jobs.spec import Job, JobState, make_array
from phalanx.observe.progress import DeferredDisplay
from phalanx.run import EventTail, Run
from train_harness import wait_until

pytestmark = pytest.mark.skipif(not SCHEMAS.is_dir(), reason=f"the schemas of JobSet and Trainer are not in {SCHEMAS}")


@pytest.fixture
def server() -> FakeApiServer:
    return FakeApiServer()


class Engine(KubernetesBackend):
    """One that talks to this server."""

    def __init__(self, folder: Path, address: str, server: FakeApiServer):
        super().__init__(kubeconfig(folder, address), environ={"HF_TOKEN": "hf_abc"}, token=lambda: "drawn")
        self.server = server


@pytest.fixture
def engine(server: FakeApiServer, tmp_path: Path) -> Iterator[Engine]:
    with server.serving() as address:
        yield Engine(tmp_path, address, server)


def job(**fields: Any) -> Job:
    options = {"image": "example.org/phalanx:1"} | fields.pop("backend_options", {})
    return Job(
        **{"name": "gpt", "command": ("phalanx", "train"), "working_dir": Path("/work"), "backend_options": options}
        | fields
    )


def submitted(engine: Engine, **fields: Any) -> str:
    return engine.submit(engine.render(job(**fields)))


def add_pod(server: FakeApiServer, index: int, log: str = "", phase: str = "Running") -> str:
    """A pod as the Job controller makes it."""
    group = job_of(server.objects["jobsets", "team-a", "gpt"])
    name = f"{group['metadata']['name']}-{index}-abcde"
    labels = {"jobset.sigs.k8s.io/jobset-name": "gpt", "batch.kubernetes.io/job-completion-index": str(index)}
    metadata = {"name": name, "namespace": "team-a", "labels": labels, "uid": name}
    server.objects["pods", "team-a", name] = {"metadata": metadata, "spec": {}, "status": {"phase": phase}}
    server.logs[name] = log
    return name


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_a_job_and_its_secret_are_created(engine: Engine, kind: str) -> None:
    request = engine.render(job(secrets=("HF_TOKEN",), backend_options={"kind": kind}))
    assert engine.submit(request) == f"team-a/{kind}/gpt"
    made = engine.server.objects[f"{kind}s", "team-a", "gpt"]
    sent = YAML(typ="safe").load(request.files[f"{kind}.yaml"])
    assert made["spec"] == sent["spec"]
    secret = engine.server.objects["secrets", "team-a", "gpt"]
    assert secret["stringData"] == {"PHALANX_TOKEN": "drawn", "HF_TOKEN": "hf_abc"}
    assert [owner["uid"] for owner in secret["metadata"]["ownerReferences"]] == [made["metadata"]["uid"]]


def test_code_that_travels_is_refused_with_what_to_do_instead(engine: Engine) -> None:
    with pytest.raises(UsageError, match="comes with the image"):
        engine.render(job(snapshot=Snapshot(b"", Path("/x"), ".", 0, 0)))
    with pytest.raises(UsageError, match="does not count the members"):
        engine.render(job(max_parallel=1))


def test_an_array_is_several_workloads_and_none_when_one_is_refused(engine: Engine) -> None:
    jobs = make_array("sweep", [job(run_dir=Path(f"/runs/{name}")) for name in "ab"])
    idents = engine.submit_array(engine.render_array(jobs))
    assert idents == ["team-a/jobset/sweep-0", "team-a/jobset/sweep-1"]
    found = engine.list_jobs("sweep")
    assert [(status.name, status.run_dir) for status in found] == [("sweep.0", "/runs/a"), ("sweep.1", "/runs/b")]
    engine.cancel(idents[0])
    with pytest.raises(UsageError, match=r"member 1 could not be submitted.*those before it were cancelled"):
        engine.submit_array(engine.render_array(jobs))
    assert [status.name for status in engine.list_jobs()] == ["sweep.1"]


def test_a_job_goes_to_the_namespace_it_names(engine: Engine) -> None:
    assert submitted(engine, backend_options={"namespace": "team-b"}) == "team-b/jobset/gpt"
    assert ("jobsets", "team-b", "gpt") in engine.server.objects


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_a_job_is_suspended_and_resumed(engine: Engine, kind: str) -> None:
    ident = submitted(engine, backend_options={"kind": kind})
    made = engine.server.objects[f"{kind}s", "team-a", "gpt"]
    assert not engine.resume(ident)
    engine.pause(ident, "for power")
    assert made["spec"]["suspend"] is True
    assert (engine.poll(ident).state, engine.poll(ident).reason) == (JobState.QUEUED, "paused: for power")
    assert engine.resume(ident)
    assert made["spec"]["suspend"] is False
    assert "phalanx-paused" not in made["metadata"]["annotations"]
    assert not engine.resume(ident)


def test_a_pause_is_a_disruption_and_no_restart_that_counts(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Of a pod that ends with 75 while its Job is suspended, the first rule that matches decides."""
    ident = submitted(engine)
    caplog.clear()
    pods = [engine.server.objects["pods", "team-a", add_pod(engine.server, index)] for index in range(2)]
    engine.pause(ident, "for power")
    (group,) = engine.server.objects["jobsets", "team-a", "gpt"]["spec"]["replicatedJobs"]
    (pattern,) = group["template"]["spec"]["podFailurePolicy"]["rules"][0]["onPodConditions"]
    assert all(pattern.items() <= condition.items() for pod in pods for condition in pod["status"]["conditions"])
    assert caplog.messages == []


def test_a_pause_without_the_right_to_evict_says_that_it_may_count(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    ident = submitted(engine)
    caplog.clear()
    add_pod(engine.server, 0)
    engine.server.refuse["POST", "pods"] = (403, "pods/eviction is forbidden")
    engine.pause(ident, "for power")
    assert engine.server.objects["jobsets", "team-a", "gpt"]["spec"]["suspend"] is True
    (message,) = caplog.messages
    assert "needs the verb create on pods/eviction: you may not do this" in message
    assert message.endswith("Kubernetes may count the pause as a restart of gpt")


def test_a_job_that_kueue_would_start_again_or_that_is_over_cannot_be_paused(engine: Engine) -> None:
    ident = submitted(engine, backend_options={"queue": "gpus"})
    with pytest.raises(UsageError, match="Kueue decides when jobs of its queue gpus run"):
        engine.pause(ident, "for power")
    engine.server.objects["jobsets", "team-a", "gpt"]["status"] = {
        "conditions": [{"type": "Completed", "status": "True"}]
    }
    with pytest.raises(UsageError, match="it is done: there is nothing to pause"):
        engine.pause(ident, "for power")
    engine.server.refuse["PATCH", "jobsets"] = (403, "jobsets is forbidden")
    other = submitted(engine, name="other")
    with pytest.raises(UsageError, match="needs the verb patch on jobsets: you may not do this"):
        engine.pause(other, "for power")


def test_every_job_has_a_token_of_its_own(server: FakeApiServer, tmp_path: Path) -> None:
    with server.serving() as address:
        engine = KubernetesBackend(kubeconfig(tmp_path, address))
        for name in ("one", "two"):
            submitted(engine, name=name)
    tokens = {server.objects["secrets", "team-a", name]["stringData"]["PHALANX_TOKEN"] for name in ("one", "two")}
    assert len(tokens) == 2
    assert min(map(len, tokens)) >= 32


def test_a_secret_that_is_not_in_the_environment_is_named_before_anything_is_sent(engine: Engine) -> None:
    with pytest.raises(UsageError, match="WANDB_API_KEY is not in your environment"):
        submitted(engine, secrets=("WANDB_API_KEY",))
    assert engine.server.objects == {}


def test_two_jobs_of_one_name_are_refused_and_the_first_stays(engine: Engine) -> None:
    submitted(engine)
    before = dict(engine.server.objects)
    with pytest.raises(UsageError, match=r'there is one of that name already .*"gpt" already exists'):
        submitted(engine)
    assert engine.server.objects == before


def test_an_unknown_field_is_refused_by_the_server(engine: Engine) -> None:
    request = engine.render(job())
    changed = request.files["jobset.yaml"].replace("coordinator:", "cordinator:")
    with pytest.raises(UsageError, match=r"refuses it as wrong: strict decoding error: .*cordinator"):
        engine.submit(replace(request, files={**request.files, "jobset.yaml": changed}))
    assert engine.server.objects == {}


@pytest.mark.parametrize(
    ("resource", "status", "message", "told"),
    [
        ("jobsets", 401, "Unauthorized", "does not know you"),
        ("jobsets", 403, "jobsets is forbidden", "you may not do this: jobsets is forbidden"),
        ("jobsets", 500, "etcdserver: request timed out", "could not do it .HTTP status 500.: etcdserver"),
        ("secrets", 403, "secrets is forbidden", "making its Secret: you may not do this: secrets is forbidden"),
    ],
)
def test_refusals_are_told_in_words_and_leave_nothing(
    engine: Engine, resource: str, status: int, message: str, told: str
) -> None:
    engine.server.refuse["POST", resource] = (status, message)
    with pytest.raises(UsageError, match=told):
        submitted(engine)
    assert engine.server.objects == {}


def test_a_cluster_without_jobset_says_so(engine: Engine) -> None:
    engine.server.kinds.remove("jobsets")
    with pytest.raises(UsageError, match="could not find the requested resource; is this kind of object installed"):
        submitted(engine)


def test_a_cluster_that_does_not_answer_is_an_error_in_words(tmp_path: Path) -> None:
    engine = KubernetesBackend(kubeconfig(tmp_path, "http://127.0.0.1:9"))
    with pytest.raises(UsageError, match=r"the cluster does not answer: .*refused"):
        engine.list_jobs()


def test_without_a_kubeconfig_there_is_no_cluster(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no cluster is configured"):
        KubernetesBackend(tmp_path / "none").list_jobs()


def test_a_job_is_followed_from_waiting_to_its_end(engine: Engine) -> None:
    found = submitted(engine, name="GPT")
    assert engine.poll(found).state is JobState.QUEUED
    add_pod(engine.server, 0)
    assert (engine.poll(found).state, engine.poll(found).name) == (JobState.RUNNING, "GPT")
    done = {"type": "Completed", "status": "True", "lastTransitionTime": "2026-11-22T08:00:00Z"}
    engine.server.objects["jobsets", "team-a", "gpt"]["status"] = {"conditions": [done]}
    assert (engine.poll(found).state, engine.poll(found).exit_code) == (JobState.DONE, 0)


def test_our_jobs_are_listed_and_nobody_elses(engine: Engine) -> None:
    submitted(engine, name="one")
    submitted(engine, name="two", backend_options={"kind": "trainjob"})
    engine.server.objects["jobsets", "team-a", "two"] = {"metadata": {"name": "two", "labels": {}}, "spec": {}}
    assert {status.id for status in engine.list_jobs()} == {"team-a/jobset/one", "team-a/trainjob/two"}


def test_a_list_of_many_jobs_goes_by_pages(engine: Engine) -> None:
    engine.server.page = 3
    idents = {submitted(engine, name=f"gpt-{number}") for number in range(7)}
    assert {status.id for status in engine.list_jobs()} == idents


def test_one_of_the_two_kinds_is_enough(engine: Engine) -> None:
    submitted(engine)
    engine.server.kinds.remove("trainjobs")
    assert [status.id for status in engine.list_jobs()] == ["team-a/jobset/gpt"]
    engine.server.kinds.remove("jobsets")
    with pytest.raises(UsageError, match="neither JobSet nor Kubeflow Trainer is installed"):
        engine.list_jobs()


def test_lines_of_several_nodes_are_merged_by_time(engine: Engine) -> None:
    found = submitted(engine, num_nodes=2)
    add_pod(engine.server, 0, "2026-11-22T07:00:01.5Z one\n2026-11-22T07:00:03.0Z  three: é\n")
    add_pod(engine.server, 1, "2026-11-22T07:00:02.25Z two\n2026-11-22T07:00:04.0Z four")
    assert list(engine.read_logs(found)) == ["[node 0] one", "[node 1] two", "[node 0]  three: é", "[node 1] four"]


def test_lines_of_one_node_are_as_they_were_printed(engine: Engine) -> None:
    found = submitted(engine)
    assert list(engine.read_logs(found)) == []
    add_pod(engine.server, 0, "2026-11-22T07:00:01Z \n2026-11-22T07:00:02Z a\tb\r\n")
    assert list(engine.read_logs(found)) == ["", "a\tb\r"]


def test_a_signal_is_sent_to_each_node(engine: Engine) -> None:
    found = submitted(engine, num_nodes=2)
    pods = [add_pod(engine.server, 0), add_pod(engine.server, 1)]
    engine.send_signal(found, signal.SIGUSR1)
    assert engine.server.commands == [(pod, ["/bin/sh", "-c", "kill -10 1"]) for pod in pods]


def test_a_signal_that_cannot_be_sent_is_an_error(engine: Engine) -> None:
    found = submitted(engine)
    with pytest.raises(UsageError, match="does not run"):
        engine.send_signal(found, signal.SIGTERM)
    add_pod(engine.server, 0)
    engine.server.kill_fails = True
    with pytest.raises(UsageError, match="could not be sent signal 15: no such process"):
        engine.send_signal(found, signal.SIGTERM)
    with pytest.raises(UsageError, match="`phalanx jobs cancel"):
        engine.send_signal(found, signal.SIGKILL)


def test_cancelling_removes_a_job_with_its_secret(server: FakeApiServer, tmp_path: Path) -> None:
    with server.serving() as address:
        engine, later = (KubernetesBackend(kubeconfig(tmp_path, address), environ={}) for _ in range(2))
        found = submitted(engine)
        engine.cancel(found)
        assert server.objects == {}
        with pytest.raises(UsageError, match="kubernetes has no such job"):
            later.poll(found)


def test_a_job_that_was_cancelled_here_is_known_as_that_and_may_be_cancelled_again(engine: Engine) -> None:
    found = submitted(engine)
    engine.cancel(found)
    for _ in range(2):
        status = engine.poll(found)
        assert (status.state, status.reason, status.name) == (JobState.CANCELLED, "it was deleted", "gpt")
        engine.cancel(found)
    assert engine.list_jobs() == []
    assert submitted(engine) == found  # a name that is taken again is the new job
    assert engine.poll(found).state is JobState.QUEUED


def test_who_follows_a_job_that_another_deletes_is_told_its_end(engine: Engine, tmp_path: Path) -> None:
    found = submitted(engine)
    assert engine.poll(found).state is JobState.QUEUED
    engine.server.delete("jobsets", "team-a", "gpt")
    ended = follow_job(
        engine,
        found,
        EventTail(Run(tmp_path / "run").events),
        DeferredDisplay(Run(tmp_path / "run"), io.StringIO()),
        io.StringIO(),
    )
    assert (ended.state, ended.reason) == (JobState.CANCELLED, "it was deleted")


def test_a_job_that_was_over_before_it_went_away_keeps_its_end_for_who_saw_it(engine: Engine) -> None:
    found = submitted(engine)
    engine.server.objects["jobsets", "team-a", "gpt"]["status"] = {
        "conditions": [{"type": "Completed", "status": "True"}]
    }
    last = engine.poll(found)
    assert last.state is JobState.DONE
    engine.server.delete("jobsets", "team-a", "gpt")
    other = KubernetesBackend(engine._config, environ={})
    assert poll_again(other, last) == last
    with pytest.raises(UsageError, match="kubernetes has no such job"):
        other.poll(found)


def test_a_job_that_is_over_is_left_as_it_is(engine: Engine) -> None:
    found = submitted(engine)
    engine.server.objects["jobsets", "team-a", "gpt"]["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    engine.cancel(found)
    assert ("jobsets", "team-a", "gpt") in engine.server.objects


@pytest.mark.parametrize("name", ["gpt", "team-a/jobset/none", "team-a/pod/gpt"])
def test_a_job_that_is_not_there_is_an_error_in_words(engine: Engine, name: str) -> None:
    for ask in (
        engine.poll,
        engine.cancel,
        lambda job: engine.send_signal(job, 15),
        lambda job: list(engine.read_logs(job)),
    ):
        with pytest.raises(UsageError, match="kubernetes has no such job; `phalanx jobs ls --on kubernetes`"):
            ask(name)


def stamped(*seconds: int) -> str:
    return "".join(f"2026-11-22T07:00:{second:02d}.000000000Z t={second}\n" for second in seconds)


def collected(read: Callable[[bool], list[str]], count: int) -> list[str]:
    """So many lines, as they come."""
    lines: list[str] = []

    def enough() -> bool:
        lines.extend(read(False))
        return len(lines) >= count

    wait_until(enough, 10)
    return lines


def test_a_followed_log_has_each_line_once_also_one_that_comes_late(engine: Engine) -> None:
    found = submitted(engine, num_nodes=2)
    first, second = add_pod(engine.server, 0, stamped(1, 2, 5)), add_pod(engine.server, 1, stamped(3))
    read = engine.follow_logs(found)
    assert sorted(collected(read, 4)) == ["[node 0] t=1", "[node 0] t=2", "[node 0] t=5", "[node 1] t=3"]
    engine.server.logs[second] += stamped(4, 4)
    assert collected(read, 2) == ["[node 1] t=4"] * 2
    engine.server.logs[first] += stamped(6)
    for pod in (first, second):
        engine.server.objects["pods", "team-a", pod]["status"]["phase"] = "Succeeded"
    assert read(True) == ["[node 0] t=6"]
    assert (
        max(engine.server.sent[pod] / len(engine.server.logs[pod]) for pod in (first, second)) <= 2
    )  # and once more at the end


def test_a_followed_log_that_breaks_off_goes_on_where_it_was(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.jobs.backends.kubernetes.client.REOPEN_INTERVAL_S", 0.01)
    found = submitted(engine)
    text = stamped(1, 2, 2, 2, 3)
    engine.server.breaks = [len(text) * 2 // 5, len(text) * 3 // 5]  # after the first and the second of the same moment
    pod = add_pod(engine.server, 0, text)
    read = engine.follow_logs(found)
    assert collected(read, 5) == ["t=1", "t=2", "t=2", "t=2", "t=3"]
    engine.server.objects["pods", "team-a", pod]["status"]["phase"] = "Succeeded"
    assert read(True) == []


def test_a_pod_that_a_restart_brings_is_followed_from_its_first_line(engine: Engine) -> None:
    found = submitted(engine)
    old = add_pod(engine.server, 0, stamped(1))
    read = engine.follow_logs(found)
    assert collected(read, 1) == ["t=1"]
    thing = engine.server.objects.pop(("pods", "team-a", old))
    labels = thing["metadata"]["labels"] | {"jobset.sigs.k8s.io/restart-attempt": "1"}
    new = thing | {"metadata": thing["metadata"] | {"name": "again", "labels": labels}, "status": {"phase": "Running"}}
    engine.server.objects["pods", "team-a", "again"] = new
    engine.server.logs["again"] = stamped(2)
    assert collected(read, 1) == ["t=2"]
    new["status"]["phase"] = "Failed"
    engine.server.logs[old] = ""
    assert read(True) == []
