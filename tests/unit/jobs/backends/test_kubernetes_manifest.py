"""What is rendered for Kubernetes: it is what the schemas allow, and says what was asked for. Nothing is sent."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from fake_kubernetes import SCHEMAS, core_faults, expanded, faults
from phalanx.errors import ExitCode, UsageError
from phalanx.jobs.backends.kubernetes.backend import KubernetesBackend
from phalanx.jobs.backends.kubernetes.manifest import escape_literal, make_failure_policy, make_pod_failure_policy
from phalanx.jobs.spec import Job

schemas = pytest.mark.skipif(not SCHEMAS.is_dir(), reason=f"the schemas of JobSet and Trainer are not in {SCHEMAS}")
FULL = {
    "namespace": "team-b",
    "queue": "gpus",
    "priority-class": "urgent",
    "topology-required": "cloud.provider.com/topology-block",
    "service-account": "trainer",
    "pvc": "data:/data,runs:/mnt/runs",
    "node-selector": "accelerator=h100,pool=",
    "tolerations": "nvidia.com/gpu:NoSchedule,team=a:NoExecute,spot",
}


def job(**fields: Any) -> Job:
    options = {"image": "example.org/phalanx:1"} | fields.pop("backend_options", {})
    return Job(
        **{
            "name": "gpt",
            "command": ("phalanx", "train", "recipe.yaml"),
            "working_dir": Path("/work"),
            "num_nodes": 4,
            "backend_options": options,
        }
        | fields
    )


def as_kubernetes_reads(text: str) -> Any:
    """By the rules of YAML 1.1, for which `on` is no string."""
    yaml = YAML(typ="safe", pure=True)
    yaml.version = (1, 1)
    return yaml.load(text)


def rendered(**fields: Any) -> dict[str, Any]:
    files = KubernetesBackend(environ={}).render(job(**fields)).files
    return {name.removesuffix(".yaml"): as_kubernetes_reads(text) for name, text in files.items()}


def test_pods_of_a_job_that_may_run_on_fewer_nodes_are_created_again_alone() -> None:
    jobset = rendered(min_nodes=2)["jobset"]
    template = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert template["backoffLimit"] > 0
    assert template["podFailurePolicy"]["rules"][0]["action"] == "Ignore"
    (variable,) = [each for each in pod(jobset)["containers"][0]["env"] if each["name"] == "PHALANX_NUM_NODES"]
    assert variable["value"] == "2:4"


def pod(jobset: dict[str, Any]) -> dict[str, Any]:
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def variables(container: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}


@schemas
@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
@pytest.mark.parametrize("options", [{}, FULL], ids=["plain", "full"])
def test_what_is_rendered_is_what_the_schemas_allow(kind: str, options: dict[str, str]) -> None:
    fields = {
        "gpus_per_node": 8,
        "cpus_per_node": 96,
        "memory_bytes": 10**12,
        "time_limit_s": 3600.0,
        "secrets": ("HF_TOKEN",),
    }
    objects = rendered(backend_options={"kind": kind} | options, environment={"A": "b"}, **fields)
    assert faults(objects[kind]) == []
    assert core_faults(objects["secret"]) == []


def test_each_node_is_told_its_place() -> None:
    objects = rendered(
        secrets=("HF_TOKEN",), environment={"A": "b", "PHALANX_NODE_RANK": "7", "PHALANX_NODE_NAME": "x"}
    )
    found = variables(pod(objects["jobset"])["containers"][0])
    assert found == {
        "A": "b",
        "PHALANX_NUM_NODES": "4",
        "PHALANX_LEADER_ADDR": "gpt-workers-0-0.gpt:29417",
        "PHALANX_NODE_RANK": {
            "fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
        },
        "PHALANX_NODE_NAME": {"fieldRef": {"fieldPath": "spec.nodeName"}},
        "PHALANX_TOKEN": {"secretKeyRef": {"name": "gpt", "key": "PHALANX_TOKEN"}},
        "HF_TOKEN": {"secretKeyRef": {"name": "gpt", "key": "HF_TOKEN"}},
    }


def test_a_trainjob_tells_the_same_under_its_own_names() -> None:
    trainer = rendered(backend_options={"kind": "trainjob", "runtime": "ours"})["trainjob"]["spec"]["trainer"]
    assert trainer["command"] == ["env", "-C", "/work", "phalanx", "train", "recipe.yaml"]
    assert trainer["numNodes"] == 4
    assert variables(trainer)["PHALANX_LEADER_ADDR"] == "gpt-node-0-0.gpt:29417"


def test_one_job_has_a_pod_a_node() -> None:
    spec = rendered()["jobset"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    wanted = {"parallelism": 4, "completions": 4, "completionMode": "Indexed", "backoffLimit": 0}
    assert {key: spec[key] for key in wanted} == wanted
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


def test_a_node_gets_what_it_needs_and_room_to_save() -> None:
    found = pod(rendered(gpus_per_node=8, cpus_per_node=96, memory_bytes=2**40, warning_s=300.5)["jobset"])
    amounts = {"cpu": "96", "memory": str(2**40), "nvidia.com/gpu": "8"}
    assert found["containers"][0]["resources"] == {"limits": amounts, "requests": amounts}
    assert found["terminationGracePeriodSeconds"] == 301
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory"}} in found["volumes"]
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in found["containers"][0]["volumeMounts"]


def test_the_limit_leaves_time_to_save() -> None:
    spec = rendered(time_limit_s=3600.0, warning_s=600.0)["jobset"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert spec["activeDeadlineSeconds"] + spec["template"]["spec"]["terminationGracePeriodSeconds"] == 3600


def test_kueue_is_told_where_and_how_urgent() -> None:
    thing = rendered(backend_options=FULL)["jobset"]
    labels = {"kueue.x-k8s.io/queue-name": "gpus", "kueue.x-k8s.io/priority-class": "urgent"}
    assert thing["metadata"]["labels"].items() >= labels.items()
    assert thing["spec"]["suspend"] is True
    annotations = thing["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["kueue.x-k8s.io/podset-required-topology"] == "cloud.provider.com/topology-block"
    assert "priorityClassName" not in pod(thing)


def test_without_a_queue_nothing_waits_for_one() -> None:
    thing = rendered(backend_options={"priority-class": "urgent"})["jobset"]
    assert "suspend" not in thing["spec"]
    assert pod(thing)["priorityClassName"] == "urgent"


def test_volumes_selectors_and_tolerations_are_put_in() -> None:
    found = pod(rendered(backend_options=FULL)["jobset"])
    assert found["nodeSelector"] == {"accelerator": "h100", "pool": ""}
    assert found["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "team", "operator": "Equal", "value": "a", "effect": "NoExecute"},
        {"key": "spot", "operator": "Exists"},
    ]
    claims = {
        mount["mountPath"]: volume["persistentVolumeClaim"]["claimName"]
        for mount in found["containers"][0]["volumeMounts"]
        for volume in found["volumes"]
        if volume["name"] == mount["name"] and "persistentVolumeClaim" in volume
    }
    assert claims == {"/data": "data", "/mnt/runs": "runs"}
    assert found["serviceAccountName"] == "trainer"


def action(message: str, reason: str = "PodFailurePolicy") -> str:
    """What JobSet does when its Job fails with this message: the first rule that fits."""
    for rule in make_failure_policy(10)["rules"]:
        reasons, patterns = rule.get("onJobFailureReasons", []), rule.get("onJobFailureMessagePatterns", [])
        if (not reasons or reason in reasons) and (not patterns or any(re.search(one, message) for one in patterns)):
            return str(rule["action"])
    return "RestartJobSet"


def job_message(code: int) -> tuple[str, str]:
    """How the Job controller fails a Job one of whose pods ended with a code."""
    for number, rule in enumerate(make_pod_failure_policy()["rules"]):
        if code in rule.get("onExitCodes", {}).get("values", ()):
            text = f"Container node for pod team-a/gpt-workers-0-1-abcde failed with exit code {code} matching FailJob"
            return f"{text} rule at index {number}", "PodFailurePolicy"
    return "Job has reached the specified backoff limit", "BackoffLimitExceeded"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (ExitCode.UNFINISHED, "RestartJobSet"),
        (ExitCode.UNFIT_NODE, "RestartJobSet"),
        (137, "RestartJobSet"),
        (ExitCode.GAVE_UP, "FailJobSet"),
        (ExitCode.USAGE, "FailJobSet"),
        (ExitCode.DATA, "FailJobSet"),
        (ExitCode.RECIPE, "FailJobSet"),
        (1, "FailJobSet"),
        (7, "FailJobSet"),
    ],
)
def test_exit_codes_decide_about_restarts(code: int, expected: str) -> None:
    assert action(*job_message(int(code))) == expected


def test_disruptions_do_not_count_and_the_time_limit_ends() -> None:
    message = "Pod team-a/gpt-workers-0-1-abcde has condition DisruptionTarget matching FailJob rule at index 0"
    assert make_pod_failure_policy()["rules"][0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert action(message) == "RestartJobSetAndIgnoreMaxRestarts"
    assert action("Job was active longer than specified deadline", "DeadlineExceeded") == "FailJobSet"


NASTY = ("sh", "-c", "echo $HOME; rm -rf '$(A)' \"$$\" `id`", "$(A)", "$$(A)", "a b\n\tc", "- x: {y}", "#", "é€😀", "")


def test_nasty_words_arrive_as_they_were() -> None:
    container = pod(rendered(command=NASTY, environment={"A": "$(PATH) $$ \\ '"})["jobset"])["containers"][0]
    assert tuple(expanded(word, {"A": "wrong", "PATH": "wrong"}) for word in container["command"]) == NASTY
    assert expanded(variables(container)["A"], {"PATH": "wrong"}) == "$(PATH) $$ \\ '"


@given(st.text(st.sampled_from("$()A b")))
def test_no_text_is_taken_for_a_variable(text: str) -> None:
    assert expanded(escape_literal(text), {"A": "wrong", "": "wrong", "b": "wrong"}) == text


def test_a_dry_run_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdef")
    text = str(KubernetesBackend(environ={}).render(job(secrets=("HF_TOKEN",))))
    assert "hf_abcdef" not in text
    assert "HF_TOKEN: <from the submitter's environment>" in text


@pytest.mark.parametrize(("given", "name"), [("GPT_2.small-", "gpt-2-small"), ("g" * 45, "g" * 45)])
def test_names_are_made_fit_for_dns_and_the_given_one_is_kept(given: str, name: str) -> None:
    thing = rendered(name=given)["jobset"]
    assert (thing["metadata"]["name"], thing["metadata"]["annotations"]["phalanx-job"]) == (name, given)
    assert len(f"{name}-workers-0-3-abcde") <= 63


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"name": "2gpt"}, "must begin with a letter"),
        ({"name": "g" * 46}, "which leaves it 45 characters; it has 46"),
        ({"backend_options": {"image": ""}}, "image=REGISTRY/NAME:TAG"),
        ({"backend_options": {"imgae": "x"}}, "no option 'imgae'; did you mean image?"),
        ({"backend_options": {"kind": "pod"}}, "expected one of jobset, trainjob"),
        ({"backend_options": {"pvc": "data"}}, "expected CLAIM:/PATH"),
        ({"backend_options": {"pvc": "data:relative"}}, "expected CLAIM:/PATH"),
        ({"backend_options": {"tolerations": "a:Never"}}, "'Never' is no effect of a taint"),
        ({"backend_options": {"node-selector": "gpu"}}, "expected KEY=VALUE"),
        ({"backend_options": {"max-restarts": "-1"}}, "a whole number"),
        ({"backend_options": {"topology-preferred": "rack"}}, "name one of its queues"),
        ({"backend_options": {"kind": "trainjob", "max-restarts": "3"}}, "as its runtime says"),
        ({"priority": 5}, "priority-class=NAME"),
        ({"command": ("a=b",), "backend_options": {"kind": "trainjob"}}, "holds a '='"),
        ({"command": ("x", "\udcff")}, "no UTF-8"),
    ],
)
def test_what_kubernetes_cannot_take_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as refused:
        rendered(**fields)
    assert told in str(refused.value)
