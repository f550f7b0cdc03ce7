"""Runs on emulated GPUs that compute as the CPU does: each way to train gives what one process gives."""

import json
import random
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from phalanx.run import Run, read_events
from phalanx.run.event_types import AttemptStarted, EvaluationDone
from run_nodes import make_nodes
from train_harness import TrainHarness, Values, merge_recipes, plan_fault, write_faults

if not torch.version.cuda:
    pytest.skip("needs torch's CUDA build: make test-emulated", allow_module_level=True)

SHORT: Values = {
    "steps": 6,
    "checkpoint": {"every": 3},
    "evaluation": {"every": 6},
    "memory": {"activation_checkpointing": "none", "chunked_loss": False},
}
EXPERTS: Values = {
    "model": {
        "build": "phalanx.models:moe",
        "args": {"layers": 2, "hidden_size": 32, "num_heads": 4, "num_experts": 4, "dense_layers": 1},
    }
}
GATHERED: Values = {"model": {"args": {"num_heads": 1}}, "memory": {"activation_checkpointing": "selective"}}
"""A single head cannot be divided by 2, so keys and values travel; attention's bias is made within torch's mode."""
STAGES: Values = {"model": {"args": {"layers": 2}}}
DOCUMENTS: Values = {"data": {"source": [{"jsonl": "documents.jsonl"}], "document_masking": True}}
LAYOUTS: Mapping[str, tuple[Values, Values, int]] = {
    "replicate 2": ({}, {"replicate": 2}, 2),
    "shard 2": ({}, {"shard": 2}, 2),
    "shard 2 with 8-bit AdamW": ({"optimizer": {"state_dtype": "int8"}}, {"shard": 2}, 2),
    "shard 2 x replicate 2": ({}, {"shard": 2, "replicate": 2}, 4),
    "tensor 2": ({}, {"tensor": 2}, 2),
    "pipeline 2": (STAGES, {"pipeline": 2}, 2),
    "context 2": ({}, {"context": 2}, 2),
    "context 2, gathered, selective recompute": (GATHERED, {"context": 2}, 2),
    "expert 2 x shard 2": (EXPERTS, {"expert": 2, "shard": 2}, 2),
}
EXACT = ("binomial-tree", "parameter-server")
LOSSY: Mapping[str, Values] = {
    "bf16": {"grad_sync": {"compression": "bf16"}},
    "int8": {"grad_sync": {"compression": "int8"}},
    "powersgd": {"grad_sync": {"compression": "powersgd", "warmup_steps": 1}},
    "average": {"local_sgd": {"method": "average", "sync_every": 3, "warmup_steps": 1}},
    "diloco": {"local_sgd": {"method": "diloco", "sync_every": 3, "warmup_steps": 1}},
}


def short(changes: Values | None = None) -> Values:
    return merge_recipes(SHORT, changes or {})


def device_of(run: Run) -> str:
    return str(run.read_json_or_empty(run.cluster)["device"])


def with_documents(lab: TrainHarness) -> None:
    rng = random.Random(3)
    lines = ({"text": "".join(rng.choices("abcdef ", k=rng.randint(5, 40)))} for _ in range(150))
    (lab.folder / "documents.jsonl").write_text("\n".join(map(json.dumps, lines)))


def test_the_command_trains_saves_evaluates_and_a_killed_worker_comes_back_with_the_same_bits(
    gpus: TrainHarness,
) -> None:
    changes = short({"precision": "bf16", "steps": 9})
    alone = gpus.train(changes, 1)
    assert device_of(alone.run) == "cuda"
    run = gpus.new_run()
    write_faults(run, [plan_fault(5)])
    done = gpus.command("train", gpus.recipe_file(changes), "--run", run.path, "--nproc-per-node", "1")
    ended = gpus.from_command_line(run, done.returncode)
    assert ended.code == 0, done.stderr[-3000:]
    assert ended.result["num_restarts"] == 1
    assert ended.digest == alone.digest
    assert ended.losses == alone.losses
    scores = [event.loss for event in ended.events_of_kind(EvaluationDone)]
    assert scores == sorted(scores, reverse=True)
    assert scores[-1] < 5.5


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="fp32"),
        pytest.param({"precision": "fp16"}, id="fp16"),
        pytest.param({"precision": "bf16"}, id="bf16"),
        pytest.param(merge_recipes(DOCUMENTS, {"memory": {"chunked_loss": True}}), id="documents, chunked loss"),
        pytest.param({"adapter": {"rank": 4}}, id="adapter"),
    ],
)
def test_one_gpu_has_the_losses_of_a_cpu(gpus: TrainHarness, cpu: TrainHarness, changes: Values) -> None:
    with_documents(gpus), with_documents(cpu)
    changes = short(changes)
    ended, expected = gpus.train_reference(changes), cpu.train_reference(changes)
    assert (device_of(ended.run), device_of(expected.run)) == ("cuda", "cpu")
    exact = changes.get("precision", "fp32") == "fp32"  # a CPU keeps some operations in fp32 that a GPU does not
    assert ended.losses == pytest.approx(expected.losses, rel=1e-6 if exact else 1e-4)


WEIGHTS = """
import torch

class Weights:
    def on_train_end(self, run, event):
        torch.save({name: value.cpu() for name, value in run.model.state_dict().items()}, run.path / "weights.pt")
"""


@pytest.mark.slow
def test_exported_weights_are_those_of_the_run_and_its_commands_compute_with_them(
    gpus: TrainHarness, tmp_path: Path
) -> None:
    (gpus.folder / "weights.py").write_text(WEIGHTS)
    run = gpus.train(short({"callbacks": ["weights:Weights"]})).run
    trained = torch.load(run.path / "weights.pt", weights_only=True)
    assert gpus.command("checkpoint", "export", run.path, tmp_path / "out").returncode == 0
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert trained.keys() - exported.keys() == {"head.weight"}  # tied to the embedding
    assert all(torch.equal(exported[name], trained[name]) for name in exported)
    scored = gpus.command("evaluate", run.path, "--samples", "6", "--json")
    assert scored.returncode == 0, scored.stderr[-3000:]
    (last,) = [event.loss for event in read_events(run.events) if isinstance(event, EvaluationDone)][-1:]
    assert json.loads(scored.stdout)["loss"] == pytest.approx(last, rel=1e-6)
    written = gpus.command("generate", run.path, "--tokens", "4", "--temperature", "0")
    assert written.returncode == 0, written.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_has_the_losses_of_one_gpu(gpus: TrainHarness, name: str) -> None:
    changes, layout, world = LAYOUTS[name]
    alone = gpus.train_reference(short(changes))
    ended = gpus.train(short({**changes, "parallelism": layout}), world)
    assert ended.code == 0, ended.message
    assert ended.losses == pytest.approx(alone.losses, rel=1e-6)


def test_one_and_two_gpus_have_the_same_bits_where_replicas_are_exact(gpus: TrainHarness) -> None:
    changes = short({"determinism": "elastic"})
    assert gpus.train(changes, 2).digest == gpus.train(changes, 1).digest


def test_a_run_that_loses_a_node_trains_on_and_ends_in_the_undisturbed_bits(gpus: TrainHarness, tmp_path: Path) -> None:
    nodes = make_nodes(gpus, tmp_path)
    nodes.num_nodes, nodes.changes = "1:2", short({"determinism": "elastic", "steps": 9})
    write_faults(nodes.run, [plan_fault(4, "kill-agent", ranks=[1], attempt=0)])
    with nodes.stack:
        leader, lost = nodes.start(0), nodes.start(1)
        ended = nodes.end(leader, seconds=120)
        assert lost.wait(timeout=20) == -signal.SIGKILL
    assert device_of(ended.run) == "cuda"
    assert [event.world_size for event in ended.events_of_kind(AttemptStarted)] == [2, 1]
    assert ended.digest == gpus.train_reference(nodes.changes, 1).digest


def test_an_optimizer_in_host_memory_and_activations_computed_again_leave_the_bits(gpus: TrainHarness) -> None:
    alone, scaled_first = gpus.train_reference(short()), gpus.train_reference(short(SCALED_FIRST))
    assert (
        gpus.train(short(merge_recipes(SCALED_FIRST, {"optimizer": {"offload": True}}))).digest == scaled_first.digest
    )
    assert gpus.train(short({"memory": {"activation_checkpointing": "full"}})).digest == alone.digest


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", EXACT)
def test_an_exact_exchange_has_the_bits_of_allreduce(gpus: TrainHarness, algorithm: str) -> None:
    allreduce = gpus.train_reference(short({"determinism": "fixed-world", "grad_sync": {"algorithm": "all-reduce"}}), 2)
    assert (
        gpus.train(short({"determinism": "fixed-world", "grad_sync": {"algorithm": algorithm}}), 2).digest
        == allreduce.digest
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", LOSSY)
def test_a_lossy_exchange_learns_as_allreduce_does(gpus: TrainHarness, method: str) -> None:
    allreduce = gpus.train_reference(short({"determinism": "fixed-world", "grad_sync": {"algorithm": "all-reduce"}}), 2)
    ended = gpus.train(short({"determinism": "off", **LOSSY[method]}), 2)
    assert ended.code == 0, ended.message
    assert ended.losses != allreduce.losses
    assert ended.losses == pytest.approx(allreduce.losses, rel=2e-2)


def test_fp8_computes_something_else_than_bf16_and_learns(gpus: TrainHarness) -> None:
    bf16 = gpus.train_reference(short({**STAGES, "precision": "bf16"}))
    fp8 = gpus.train(short({**STAGES, "precision": "fp8"}))
    assert fp8.code == 0, fp8.message
    assert fp8.losses != bf16.losses
    assert fp8.losses == pytest.approx(bf16.losses, rel=1e-2)


SCALED_FIRST: Values = {"determinism": "elastic"}
"""Gradients are multiplied before the update, as where it is done in host memory; else the update divides them."""
QUICK: Values = {"batch": {"micro_size": 12}, "steps": 12}
"""The next update comes while a checkpoint is still copied."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "world"),
    [
        pytest.param({}, 1, id="one GPU"),
        pytest.param(merge_recipes(SCALED_FIRST, {"optimizer": {"offload": True}}), 1, id="offload"),
        pytest.param({"batch": {"micro_size": 6}, "parallelism": {"shard": 2}}, 2, id="shards"),
    ],
)
def test_copies_that_are_late_leave_the_bits(
    gpus: TrainHarness, late_gpus: TrainHarness, changes: Values, world: int
) -> None:
    """No wait is missing, and no memory used again too early: also in what a killed worker reads again."""
    expected = gpus.train_reference(short(merge_recipes(QUICK, {**changes, "memory": {}})), world)
    killed = plan_fault(4, when="told", delay=0.7, ranks=[0])
    ended = late_gpus.train(short(merge_recipes(QUICK, changes)), world, faults=[killed])
    assert ended.result["num_restarts"] == 1
    assert ended.digest == expected.digest
