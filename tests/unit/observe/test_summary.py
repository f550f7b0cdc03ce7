"""What a run did, from its directory; sensible for every run that is not a whole one."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from make_run import Maker, healthy, render_pages, troubled
from phalanx.errors import UsageError
from phalanx.observe.history import read_history
from phalanx.observe.run_info import _describe_data
from phalanx.observe.summary import RunSummary, build_summary
from phalanx.observe.text_report import PAGE_WIDTH
from phalanx.recipe import Recipe
from phalanx.run import Run
from phalanx.run.directory import write_json
from phalanx.run.event_types import (
    AttemptStarted,
    CheckpointUploaded,
    Compiled,
    EvaluationDone,
    RunEnded,
    StepPhases,
    WorkerFailure,
    WorkerStarted,
)
from phalanx.run.telemetry_minutes import NodeEnergy, NodeMinute, Rollups


def summary(path: Path) -> RunSummary:
    return build_summary(Run(path), read_history(Run.open_existing(path).events))


def test_a_whole_run_is_summed_up(tmp_path: Path) -> None:
    found = summary(healthy(tmp_path / "run"))
    assert (found.status, found.last_step, found.planned_steps) == ("done", 300, 300)
    assert found.run_info.name == "gpt-python"
    assert found.run_info.parameters == 3_247_360
    assert found.num_units == 300 * 4096
    assert found.loss.first == pytest.approx(5.5, abs=0.2)
    assert found.loss.final_mean == pytest.approx(1.4, abs=0.05)
    assert found.loss.validation_best_step == 300
    assert found.speed.mfu_measured == pytest.approx(0.45, rel=0.02)
    assert found.speed.predicted_step_s == pytest.approx(0.384)
    assert found.checkpoints.count == 6
    assert (found.num_restarts, found.wasted_steps, found.nonfinite_actions) == (0, 0, {})
    assert found.digest is not None


def test_epochs_are_counted_source_by_source_in_the_stages_that_were_trained(tmp_path: Path) -> None:
    run = Run(whole := healthy(tmp_path / "run", total=300))
    stages = [[0, [3, 1]], [100, [1, 1]], [400, [0, 1]]]  # of 16 samples a step
    write_json(
        run.plan, {**run.read_json_or_empty(run.plan), "mixture": {"num_samples": [1000, 200], "stages": stages}}
    )
    assert summary(whole).epochs == pytest.approx([(1200 + 1600) / 1000, (400 + 1600) / 200])
    assert "2.80 of source 0, 10.0 of source 1" in render_pages(whole)[0]


@pytest.mark.parametrize(
    "mixture", [None, [], {}, {"num_samples": [0], "stages": [[0, [1]]]}, {"num_samples": [1], "stages": [[0, []]]}]
)
def test_a_mixture_that_is_damaged_is_none(tmp_path: Path, mixture: object) -> None:
    run = Run(whole := healthy(tmp_path / "run", total=20))
    write_json(run.plan, {**run.read_json_or_empty(run.plan), "mixture": mixture})
    assert summary(whole).epochs is None


def test_durations_sum_to_the_wall_time(tmp_path: Path) -> None:
    for make in (healthy, troubled):
        spent = summary(make(tmp_path / make.__name__)).durations
        parts = (
            spent.training_s
            + spent.wasted_s
            + spent.evaluation_s
            + spent.startup_s
            + spent.unavailable_s
            + spent.other_s
        )
        assert parts == pytest.approx(spent.wall_s, rel=1e-6)


def test_compiling_is_told_as_a_part_of_starting(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "run", total=10).start()
    maker.t += 40
    maker.event(Compiled, duration_s=34.0, num_blocks=12).steps(1, 10).end()
    assert summary(tmp_path / "run").durations.compilation_s == 34.0
    assert re.search(r"startup 4\d(\.\d)? s \(compiling 34 s\)", render_pages(tmp_path / "run")[0])


def make_waiting(path: Path, wait_s: float) -> Path:
    """A run of which each step of 0.4 s waits so long for its data."""
    maker = Maker(
        path, total=10, split={"data_wait": wait_s / 0.4}, data={"source": {"prepared": "s3://b/set"}}
    ).start()
    maker.steps(1, 10).end()
    return path


def test_data_that_do_not_suffice_are_named_with_what_would(tmp_path: Path) -> None:
    path = make_waiting(tmp_path / "run", 0.1)
    data = summary(path).data
    assert data is not None
    assert (data.location, data.wait_share) == ("s3://b/set", pytest.approx(0.25, abs=0.05))
    assert data.bytes_per_s == pytest.approx(512 * 16 / sum((summary(path).breakdown_s or {}).values()))
    assert data.needed_bytes_per_s == pytest.approx(data.bytes_per_s / (1 - data.wait_share))
    text = " ".join(render_pages(path)[0].split())
    assert re.search(r"data [\d.]+ kB/s, data wait \d+%: [\d.]+ kB/s from s3://b/set would suffice, \d+% more", text)


def test_data_that_suffice_have_their_rate_only(tmp_path: Path) -> None:
    text = render_pages(make_waiting(tmp_path / "run", 0.0))[0]
    assert re.search(r"\n  data +[\d.]+ kB/s, data wait 0%\n", text)


def test_uploads_are_summed_up_with_bytes_seconds_requests_and_retries(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "run", total=10).start()
    for step, retries in ((5, {"503": 2}), (10, {})):
        maker.steps(step - 4, step)
        values = {"url": "s3://b/run", "sent_bytes": 10**6, "skipped_bytes": 0, "duration_s": 2.0, "requests": 7}
        maker.event(CheckpointUploaded, step=step, retries=retries, **values)
    maker.end()
    assert summary(tmp_path / "run").checkpoints.uploads == (
        "2 to s3://b/run, the last of step 10; 2.00 MB sent in 4.0 s, 0 B there already; 14 requests, 2 repeated, "
        "2 x 503"
    )


def write_energy(run: Path, node: str, energy: NodeEnergy, is_estimate: bool = True) -> None:
    (run / "telemetry").mkdir(exist_ok=True)
    minute = NodeMinute(60.0, 60.0, 60, node, Rollups(), {}, is_estimate, energy)
    (run / "telemetry" / f"{node}.jsonl").write_bytes(minute.to_line())


def energy_run(path: Path, world: int, device: str, num_steps: int = 10) -> Path:
    maker = Maker(path, total=20, world=world)
    maker.event(AttemptStarted, world_size=world, attempt=0, start_step=0, total_steps=20, device=device)
    maker.steps(1, num_steps)
    return path


def test_energy_of_all_nodes_is_charged_to_run_step_and_token(tmp_path: Path) -> None:
    run = energy_run(tmp_path / "run", 4, "cuda")
    for node in ("n1", "n2"):
        write_energy(run, node, NodeEnergy(1000.0, 2, 200.0, 60.0))
    found = summary(run).energy
    assert found is not None
    assert (found.energy_j, found.device_j, found.num_devices, found.cpu_j) == (2400.0, 2000.0, 4, 400.0)
    assert found.energy_j_per_step == pytest.approx(240.0)
    assert found.energy_j_per_unit == pytest.approx(2400 / (10 * 4096))
    assert found.energy_j_at_end == pytest.approx(4800.0)
    assert "by 4 GPUs, 1.11e-4 kWh by CPUs (estimate); " in " ".join(render_pages(run)[0].split())


def test_the_prices_kept_with_a_run_give_its_cost_and_carbon(tmp_path: Path) -> None:
    run = energy_run(tmp_path / "run", 2, "cuda")
    write_energy(run, "n1", NodeEnergy(3.5e6, 2, 0.1e6, 60.0))
    prices = {"currency": "EUR", "kwh": 0.3, "pue": 1.5, "carbon_g_per_kwh": 400.0}
    (run / "cluster.json").write_text(json.dumps({"prices": prices}))
    found = summary(run).cost
    assert found is not None
    assert (found.site_kwh, found.carbon_kg, found.cost) == (1.5, pytest.approx(0.6), pytest.approx(0.45))
    assert found.cost_per_million == pytest.approx(0.45 / (10 * 4096 / 1e6))
    assert "1.50 kWh at the building (PUE 1.5), 0.600 kg CO2e, 0.450 EUR; " in " ".join(render_pages(run)[0].split())
    (run / "cluster.json").write_text(json.dumps({"prices": {**prices, "device_hour": 2.0}}))
    rented = summary(run)
    assert rented.cost is not None
    assert rented.cost.cost == pytest.approx(2.0 * rented.device_time.allocated_s / 3600)


@pytest.mark.parametrize("prices", [None, 7, {"pue": -1}, {"nosuch": 1}])
def test_prices_that_are_damaged_are_none(tmp_path: Path, prices: object) -> None:
    run = energy_run(tmp_path / "run", 1, "cpu")
    (run / "cluster.json").write_text(json.dumps({"prices": prices}))
    assert summary(run).cost is None


@pytest.mark.parametrize(
    ("device", "recorded", "found"),
    [
        ("cpu", NodeEnergy(9000.0, 8, 100.0, 60.0), (100.0, 0, 10.0)),
        ("cuda", NodeEnergy(9000.0, 8, 100.0, 60.0), (100.0, 0, None)),
        ("cuda", NodeEnergy(1000.0, 2, 100.0, 60.0, missing_device_s=5.0), (1100.0, 2, None)),
    ],
    ids=["no GPUs", "GPUs that other runs may use", "GPUs that were missing for a while"],
)
def test_a_step_has_an_energy_only_where_all_devices_of_the_run_were_measured(
    tmp_path: Path, device: str, recorded: NodeEnergy, found: tuple[float, int, float | None]
) -> None:
    run = energy_run(tmp_path / "run", 2, device)
    write_energy(run, "n1", recorded)
    energy = summary(run).energy
    assert energy is not None
    assert (energy.energy_j, energy.num_devices, energy.energy_j_per_step) == found


def test_telemetry_of_another_kind_is_left_out(tmp_path: Path) -> None:
    run = energy_run(tmp_path / "run", 2, "cpu")
    (run / "telemetry").mkdir()
    (run / "telemetry" / "n1.jsonl").write_text('{"format": 1, "run_energy": {"device_j": "x"}}\n' * 3)
    os.mkfifo(run / "telemetry" / "n2.jsonl")
    assert summary(run).energy is None


def test_restarts_and_the_steps_that_they_lost_are_counted(tmp_path: Path) -> None:
    found = summary(troubled(tmp_path / "run"))
    assert (found.num_restarts, found.wasted_steps, found.num_rollbacks) == (1, 87 + 12, 1)
    assert found.durations.unavailable_s == pytest.approx(22.0, abs=0.01)
    assert found.nonfinite_actions == {"non-finite loss: skip": 2, "non-finite loss: rollback": 1}
    assert "rank-00001.safetensors" in found.checkpoints.rejected[0]
    assert "no space left" in found.checkpoints.failed[0]


def test_going_on_after_done_with_more_steps_is_a_pause_and_not_a_restart(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "run", total=10).start().steps(1, 10).end()
    maker.t += 86_400
    maker.total = 20
    maker.start(from_step=10).steps(11, 20).end()
    found = summary(tmp_path / "run")
    assert (found.num_restarts, found.wasted_steps, found.planned_steps) == (0, 0, 20)
    assert found.durations.paused_s == pytest.approx(86_400)
    assert found.durations.wall_s < 60


def test_the_digest_of_an_earlier_end_is_not_that_of_a_run_which_went_on(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "run", total=10).start().steps(1, 10).end()
    assert summary(tmp_path / "run").digest
    maker.start(from_step=10).steps(11, 12)
    assert summary(tmp_path / "run").digest is None


def test_without_plan_and_cluster_the_page_says_not_measured(tmp_path: Path) -> None:
    path = healthy(tmp_path / "run", total=30)
    for name in ("plan.json", "cluster.json", "environment.json", "result.json"):
        (path / name).unlink()
    found = summary(path)
    assert found.speed.mfu_measured is None
    assert found.speed.median_per_s is not None
    text, html = render_pages(path)
    assert "MFU (measured peak)    not measured" in text
    assert "not measured" in html


def tear(maker: Maker) -> None:
    with open(maker.path / "events.jsonl", "a") as file:
        file.write('{"kind": "step", "time": 1790000012.5, "ste')


def add_steps(maker: Maker, count: int, changes: Callable[[int], dict[str, Any]]) -> Maker:
    for step in range(1, count + 1):
        maker.step(step, **changes(step))
    return maker


ODD: dict[str, Callable[[Maker], object]] = {
    "only created": lambda maker: (maker.path / "events.jsonl").unlink(),
    "only started": lambda maker: maker.start(),
    "one step": lambda maker: maker.start().step(1),
    "two steps torn": lambda maker: tear(maker.start().steps(1, 2)),
    "none finite": lambda maker: add_steps(maker.start(), 39, lambda _: {"loss": None, "grad_norm": None}).event(
        EvaluationDone, step=39, loss=None, metrics={"accuracy": None}
    ),
    "null loss": lambda maker: maker.start().step(1, loss=None, grad_norm=None, skip_reason="non-finite loss"),
    "zero seconds": lambda maker: add_steps(
        maker.start(), 29, lambda _: {"duration_s": 0.0, "breakdown_s": StepPhases()}
    ).end("failed", step=29),
    "events without a start": lambda maker: maker.steps(1, 60).event(RunEnded),
    "huge loss": lambda maker: add_steps(
        maker.start(), 59, lambda step: {"loss": 10.0 ** (step - 20), "grad_norm": 1e300}
    ),
}


@pytest.mark.parametrize("odd", ODD)
def test_odd_runs_have_sensible_pages_and_strict_json(tmp_path: Path, odd: str) -> None:
    maker = Maker(tmp_path / "run", total=300)
    ODD[odd](maker)
    text, html = render_pages(maker.path)
    assert text.startswith("gpt-python")
    assert all(len(line) <= PAGE_WIDTH for line in text.splitlines())
    for page in (text, html):
        assert "None" not in page
        assert "nan" not in page.replace("nance", "")
    json.dumps(summary(maker.path).to_json(), allow_nan=False)


def test_a_run_that_failed_before_its_first_step_says_so_with_the_failure(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "run", world=2)
    for attempt in range(3):
        for rank in range(2):
            maker.event(WorkerStarted, pid=1, rank=rank, host="node-1", attempt=attempt)
        maker.event(WorkerFailure, rank=1, cause="exit_code", exit_code=1, message=f"no network {attempt}")
    assert (summary(maker.path).status, summary(maker.path).num_restarts) == ("incomplete", 2)
    maker.end("failed", step=0)
    found = summary(maker.path)
    assert (found.status, found.last_step, found.num_restarts, found.lost) == ("failed", 0, 2, ())
    for page in render_pages(maker.path):
        assert "0 of 300 steps; rank 1: exit 1 (no network 2)" in " ".join(page.split())
        assert "not started" not in page


def test_an_attempt_that_failed_before_its_first_step_counts_as_restarted(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "run", total=10).event(WorkerStarted, pid=1, rank=0, host="node-1", attempt=0)
    maker.attempt = 0
    maker.start().steps(1, 4)
    assert summary(maker.path).num_restarts == 1
    maker.event(WorkerStarted, pid=1, rank=0, host="node-1", attempt=2)
    assert summary(maker.path).num_restarts == 2


def test_losses_that_are_not_numbers_are_counted_and_said(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "run", total=10).start().steps(1, 8).step(9, loss=None).step(10, loss=None)
    text, _ = render_pages(maker.path)
    assert "2 of 10 steps" in text
    assert "-> not a number" in text


def test_no_run_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run here"):
        summary(tmp_path)


DAMAGES = {"missing": None, "half": "{", "list": "[1]", "no text": "\0"}


@pytest.mark.parametrize("content", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("name", ["plan.json", "cluster.json", "environment.json", "result.json", "resolved.yaml"])
def test_a_lost_file_is_named_and_the_rest_is_shown(tmp_path: Path, name: str, content: str | None) -> None:
    path = healthy(tmp_path / "run", total=5)
    damaged = path / name
    damaged.unlink() if content is None else damaged.write_text(content)
    found = summary(path)
    also = ["recipe.yaml"] if name == "resolved.yaml" else []  # which such a run does not have
    assert [each in text for each, text in zip([name, *also], found.lost, strict=True)] == [True] * len(found.lost)
    assert (found.status, found.last_step) == ("done", 5)
    for page in render_pages(path):
        assert name in "".join(page.split())  # lines are broken
        assert "5 of 5 steps" in page


def test_a_recipe_as_it_was_given_stands_in_for_a_resolved_one(tmp_path: Path) -> None:
    path = healthy(tmp_path / "run", total=5)
    (path / "resolved.yaml").rename(path / "recipe.yaml")
    found = summary(path)
    assert found.run_info.name == "gpt-python"
    assert found.lost == (f"{path / 'resolved.yaml'}: is missing; the recipe is shown as it was given",)


@pytest.mark.parametrize("content", [None, "", "\0\n", "folder"])
def test_where_events_are_lost_the_result_says_how_it_ended(tmp_path: Path, content: str | None) -> None:
    path = healthy(tmp_path / "run", total=5)
    events = path / "events.jsonl"
    if content == "folder":
        events.unlink()
        events.mkdir()
    else:
        events.unlink() if content is None else events.write_text(content)
    found = summary(path)
    assert (found.status, found.last_step) == ("done", 5)
    assert found.digest is not None
    assert found.lost[-1:] == (f"{events}: ends at step 0; result.json says done at step 5",)
    text, _ = render_pages(path)
    assert "done: 5 of 5 steps" in text
    assert "unknown: the events of its steps are lost" in text


def test_lines_that_are_no_event_are_counted(tmp_path: Path) -> None:
    path = healthy(tmp_path / "run", total=5)
    events = path / "events.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    events.write_text("".join([*lines[:3], '{"kind": "step", "st\n', "\0\n", *lines[3:]]))
    found = summary(path)
    assert (found.status, found.last_step) == ("done", 5)
    assert found.lost == (f"{events}: 2 lines cannot be read; what is shown leaves them out",)


def test_where_the_end_of_the_events_is_lost_the_result_says_how_it_ended(tmp_path: Path) -> None:
    path = healthy(tmp_path / "run", total=100)
    lines = (path / "events.jsonl").read_text().splitlines(keepends=True)
    (path / "events.jsonl").write_text("".join(lines[: len(lines) // 2]))
    found = summary(path)
    assert (found.status, found.last_step) == ("done", 100)
    assert "result.json says done at step 100" in found.lost[0]


def test_where_events_and_result_are_lost_checkpoints_say_how_far_it_came(tmp_path: Path) -> None:
    path = healthy(tmp_path / "run", total=5)
    (path / "events.jsonl").unlink()
    (path / "result.json").unlink()
    (path / "checkpoints" / "step-000000004").mkdir(parents=True)
    found = summary(path)
    assert (found.status, found.last_step) == ("not known", 4)
    assert "unknown: 4 of 5 steps at least" in render_pages(path)[0]


def test_a_run_that_goes_on_is_not_taken_for_its_earlier_end(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "run", total=10).start().steps(1, 5).end("interrupted")
    (maker.path / "result.json").write_text(json.dumps({"status": "interrupted", "steps": 5}))
    maker.start(from_step=4)
    found = summary(maker.path)
    assert (found.status, found.last_step, found.lost) == ("incomplete", 4, ())


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"replicate": 1, "pipeline_schedule": "1f1b", "layers_per_stage": None}, "one process"),
        ({"tensor": 2, "async_tp": True, "pipeline_schedule": "1f1b"}, "tensor 2 (async_tp)"),
        (
            {"replicate": 2, "pipeline": 2, "pipeline_schedule": "gpipe", "layers_per_stage": None},
            "replicate 2 x pipeline 2 (gpipe)",
        ),
        ({"pipeline": 2, "pipeline_schedule": "1f1b", "layers_per_stage": [3, 1]}, "pipeline 2 (1f1b, blocks 3 + 1)"),
    ],
)
def test_a_layout_is_told_by_what_it_divides(tmp_path: Path, layout: dict[str, object], expected: str) -> None:
    assert summary(healthy(tmp_path / "run", total=5, parallelism=layout)).run_info.parallelism == expected


def test_a_recipe_of_another_version_still_has_a_page(tmp_path: Path) -> None:
    path = healthy(tmp_path / "run", total=5, key_from_the_future=1)
    assert render_pages(path)[0].startswith("gpt-python")


def noisy(path: Path, *estimates: float) -> Path:
    """A run of which every eighth step made an estimate of the gradient noise, the last of them these."""
    maker = Maker(path, total=8 * len(estimates)).start()
    for step in range(1, maker.total + 1):
        maker.step(step, **({} if step % 8 else {"noise_scale_samples": estimates[step // 8 - 1]}))
    maker.end()
    return path


def test_the_gradient_noise_scale_is_shown_next_to_the_batch(tmp_path: Path) -> None:
    path = noisy(tmp_path / "run", 9.0, 9.0, 9.0, 9.0, 412.3)
    assert summary(path).to_json()["loss"]["noise_scale"] == 412.3
    for page in render_pages(path):
        assert "gradient noise scale about 410 samples; batch.global_size is 16" in " ".join(page.split())


def test_too_few_estimates_of_the_noise_say_nothing(tmp_path: Path) -> None:
    path = noisy(tmp_path / "run", 9.0, 9.0, 9.0, 9.0)
    assert summary(path).loss.noise_scale is None
    assert not any("noise scale" in page for page in render_pages(path))


def test_data_are_described_by_the_keys_of_the_recipe() -> None:
    recipe = Recipe.model_validate({"data": {"source": {"text": "a.txt"}, "seq_len": 128}})
    assert _describe_data(recipe.model_dump(mode="json")["data"], "x") == "a.txt; tokenizer bytes, sequence 128"
