"""The page that `phalanx report RUN` prints: plain text, at most 100 columns, the same in a pipe."""

import textwrap
from collections.abc import Sequence

from phalanx import formatting
from phalanx.observe.goodput import JOULES_PER_KWH, CostSummary, DeviceTime, EnergySummary, FailureCost
from phalanx.observe.history import STEP_COMPONENTS
from phalanx.observe.progress import describe_scores
from phalanx.observe.recommendations import Recommendation
from phalanx.observe.run_info import RunInfo
from phalanx.observe.summary import RUN_OUTCOMES, DataSummary, RunSummary
from phalanx.run.mixture import format_epochs
from phalanx.text_table import Column, format_facts, format_table

PAGE_WIDTH = 100
_LABEL_WIDTH = 21
_BAR_WIDTH = 22
MAX_DATA_WAIT_SHARE = 0.005
"""Share of a step that waits for data, from which on the report says what would suffice."""

COMPONENT_LABELS = {"data_wait": "data wait", "grad_sync": "gradient sync", "checkpoint_stall": "checkpoint stall"}


def render_report_text(summary: RunSummary, recommendations: Sequence[Recommendation]) -> str:
    """The whole page, ending in a newline."""
    sections = [
        _render_headline(summary),
        _render_section("What ran", run_info_rows(summary.run_info)),
        _render_section("Loss", loss_rows(summary)),
        _render_section("Speed", speed_rows(summary)),
        _render_breakdown(summary),
        _render_section("Duration", duration_rows(summary)),
        _render_section("Safety", safety_rows(summary)),
        _render_recommendations(recommendations, summary),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def describe_outcome(summary: RunSummary) -> str:
    """How the run ended, in one line."""
    steps_text = formatting.format_plural(summary.planned_steps or summary.last_step, "step")
    steps_text = f"{summary.last_step} of {steps_text}" if summary.planned_steps else steps_text
    wall_text = f" in {formatting.format_duration(summary.durations.wall_s)}" if summary.durations.wall_s else ""
    if summary.status == "not known":
        return f"unknown: {steps_text} at least"
    if summary.status == "not started":
        return "not started: no events yet"
    if summary.status == "incomplete":
        return f"incomplete: {steps_text}{wall_text}; still running, or killed"
    why = summary.attempts[-1].end_reason if summary.attempts else next(iter(summary.failures[-1:]), None)
    why_text = f"; {why}" if why else ""
    return f"{summary.status}: {steps_text}{wall_text}{why_text}"


def run_info_rows(run_info: RunInfo) -> list[tuple[str, str]]:
    """Name and value of everything that was fixed before the first step."""
    args = ", ".join(f"{key} {value}" for key, value in run_info.model_args.items())
    is_counted = run_info.parameters is not None
    size = f"{formatting.format_count(run_info.parameters)} parameters" if is_counted else "parameters not counted"
    batch = formatting.NOT_MEASURED_TEXT
    if run_info.global_batch is not None:
        batch = formatting.format_plural(run_info.global_batch, "sample")
        if run_info.unit == "tokens" and run_info.units_per_sample > 1:
            batch += f" = {run_info.global_batch * run_info.units_per_sample} tokens"
        if run_info.micro_batch:
            batch += f", in micro-batches of {run_info.micro_batch}"
    workers = formatting.format_plural(run_info.world_size, "worker")
    if run_info.threads_per_worker and run_info.device == "cpu":
        workers += f" with {formatting.format_plural(run_info.threads_per_worker, 'thread')} each"
    workers += f" on {run_info.num_nodes} machines" if run_info.num_nodes > 1 else ""
    device = run_info.device or formatting.NOT_MEASURED_TEXT
    device += f", {run_info.device_name}" if run_info.device_name else ""
    cores = f", {formatting.format_plural(run_info.physical_cores, 'core')}" if run_info.physical_cores else ""
    facts = [
        ("model", f"{run_info.model}, {size}" + (f" ({args})" if args else "")),
        *([("adapter", run_info.adapters)] if run_info.adapters else []),
        ("task", run_info.task),
        ("data", run_info.data),
        ("batch", batch),
        ("optimizer", run_info.optimizer),
        ("precision", run_info.precision),
        ("parallelism", f"{run_info.parallelism}; {workers}"),
        ("device", f"{device}{cores}"),
    ]
    for key, value, reason in run_info.auto_choices:
        facts.append(("auto", f"{key} = {value}{f': {reason}' if reason else ''}"))
    if run_info.versions:
        facts.append(("versions", ", ".join(f"{name} {version}" for name, version in run_info.versions.items())))
    return facts


def loss_rows(summary: RunSummary) -> list[tuple[str, str]]:
    """Training loss first to last, validation loss and metrics."""
    loss = summary.loss
    if loss.last is None and summary.last_step:
        return [("training", "unknown: the events of its steps are lost")]
    if loss.last is None:
        return [("training", "no step finished yet")]
    training = f"{formatting.format_loss(loss.first)} -> {formatting.format_loss(loss.last)}"
    if loss.final_mean is not None:
        training += f" (mean of the last steps {formatting.format_loss(loss.final_mean)})"
    facts = [("training", training)]
    if summary.epochs:
        facts.append(("epochs", format_epochs(summary.epochs)))
    if loss.num_nonfinite:
        steps = formatting.format_plural(summary.last_step, "step")
        facts.append(("non-finite loss", f"{loss.num_nonfinite} of {steps}"))
    if loss.noise_scale is not None:
        facts.append(("noise scale", describe_noise_scale(loss.noise_scale, summary.run_info.global_batch)))
    if loss.tasks:
        facts.append((f"tasks, step {loss.tasks[-1].step}", describe_scores(loss.tasks[-1])))
    if loss.validation_last is None:
        facts.append(("validation", "not evaluated"))
        return facts
    first, last = map(formatting.format_loss, (loss.validation_first, loss.validation_last))
    validation_text = f"{first} -> {last}"
    if loss.validation_best is not None:
        validation_text += f", best {formatting.format_loss(loss.validation_best)} at step {loss.validation_best_step}"
    if loss.num_validation_samples is not None:
        validation_text += f", on {formatting.format_plural(loss.num_validation_samples, 'sample')}"
    facts.append(("validation", validation_text))
    if loss.metrics:
        metrics = (f"{name} {formatting.format_loss(value)}" for name, value in loss.metrics.items())
        facts.append(("metrics", ", ".join(metrics)))
    return facts


def describe_noise_scale(samples: float, batch: int | None) -> str:
    """The gradient noise scale, up to which the global batch may grow; to two digits, as it is an estimate."""
    scale = f"gradient noise scale about {formatting.format_plural(max(1, int(float(f'{samples:.2g}'))), 'sample')}"
    return scale if batch is None else f"{scale}; batch.global_size is {batch}, and can efficiently grow to about that"


def speed_rows(summary: RunSummary) -> list[tuple[str, str]]:
    """Rates, MFU with its reference, and predicted against measured."""
    speed = summary.speed
    if speed.median_per_s is None:
        return []
    median, mean = (formatting.format_rate(rate, speed.unit) for rate in (speed.median_per_s, speed.mean_per_s))
    speed_text = f"{median} (median; mean {mean})"
    step_median, step_p95 = map(formatting.format_duration, (speed.step_median_s, speed.step_p95_s))
    step = f"{step_median} (median; 95% within {step_p95})"
    predicted_s = speed.predicted_step_s or speed.calibrated_step_s
    if predicted_s and speed.step_median_s:
        share = speed.step_median_s / predicted_s - 1
        error = f"{formatting.format_percent(abs(share))} {'slower' if share > 0 else 'faster'}"
        error = error if abs(share) >= 0.005 else "as predicted"
        step += f"; predicted {formatting.format_duration(predicted_s)}, {error}"
    facts = [("speed", speed_text), ("step", step)]
    if predicted_s and (largest_error := speed.largest_error) is not None:
        times = map(formatting.format_duration, (largest_error.predicted_s, largest_error.measured_s))
        facts.append(("largest error", "{}: {} predicted, {} measured".format(largest_error.component, *times)))
    computed = f" ({formatting.format_flops(speed.model_flops_per_s)} of {{}})"
    measured, sheet = formatting.format_percent(speed.mfu_measured), formatting.format_percent(speed.mfu_data_sheet)
    if speed.mfu_measured is not None:
        peak = formatting.format_flops(speed.matmul_flops_per_s)
        measured += computed.format(f"{peak} measured in {summary.run_info.precision} matmul")
        if (speed.model_flops_per_s or 0.0) > (speed.matmul_flops_per_s or 0.0):
            measured += "; training beats this peak, so it was measured too low, on a busy machine"
    if speed.mfu_data_sheet is not None:
        source = f", {speed.data_sheet_source}" if speed.data_sheet_source else ""
        sheet += computed.format(f"{formatting.format_flops(speed.data_sheet_flops_per_s)}{source}")
    facts += [("MFU (measured peak)", measured), ("MFU (data-sheet peak)", sheet)]
    if summary.data is not None:
        facts.append(("data", describe_data_read(summary.data)))
    if summary.energy is not None:
        facts.append(("energy", describe_energy(summary.energy, speed.unit)))
    if summary.cost is not None and (cost_text := describe_cost(summary.cost, speed.unit)):
        facts.append(("cost", cost_text))
    if speed.flops_rule:
        facts.append(("FLOPs counted", speed.flops_rule))
    return facts


def describe_data_read(data: DataSummary) -> str:
    """The rate of the data, and where it did not suffice by how much."""
    text = f"{formatting.format_bytes(data.bytes_per_s)}/s, data wait {formatting.format_percent(data.wait_share)}"
    if data.wait_share < MAX_DATA_WAIT_SHARE:
        return text
    more = data.needed_bytes_per_s / data.bytes_per_s - 1
    needed = formatting.format_bytes(data.needed_bytes_per_s)
    return f"{text}: {needed}/s from {data.location} would suffice, {formatting.format_percent(more)} more"


def describe_energy(energy: EnergySummary, unit: str) -> str:
    """How much energy, of what, for each token and step, and at the end."""
    parts = []
    if energy.num_devices:
        parts.append(f"{_format_kwh(energy.device_j)} by {formatting.format_plural(energy.num_devices, 'GPU')}")
    parts.append(f"{_format_kwh(energy.cpu_j)} by CPUs{' (estimate)' if energy.cpu_is_estimate else ''}")
    text = parts[0] if len(parts) == 1 else f"{_format_kwh(energy.energy_j)}: {', '.join(parts)}"
    rates = [
        f"{formatting.format_significant(joules)} J per {name}"
        for joules, name in ((energy.energy_j_per_unit, unit.removesuffix("s")), (energy.energy_j_per_step, "step"))
        if joules is not None
    ]
    at_end = [] if energy.energy_j_at_end is None else [f"{_format_kwh(energy.energy_j_at_end)} at the last step"]
    return "; ".join(part for part in (text, ", ".join(rates), *at_end) if part)


def describe_cost(cost: CostSummary, unit: str) -> str:
    """Energy at the building, carbon and money: of the run, and for a million tokens."""

    def join(site_kwh: float | None, carbon_kg: float | None, money: float | None, pue: str = "") -> str:
        values = ((site_kwh, f"kWh{pue}"), (carbon_kg, "kg CO2e"), (money, cost.currency))
        return ", ".join(f"{formatting.format_significant(each)} {name}" for each, name in values if each is not None)

    whole = join(cost.site_kwh, cost.carbon_kg, cost.cost, f" at the building (PUE {cost.pue:.4g})")
    share = join(cost.site_kwh_per_million, cost.carbon_kg_per_million, cost.cost_per_million)
    return f"{whole}; {share} per million {unit}" if share else whole


def _format_kwh(joules: float) -> str:
    return f"{formatting.format_significant(joules / JOULES_PER_KWH)} kWh"


def duration_rows(summary: RunSummary) -> list[tuple[str, str]]:
    """Wall time and what became of it."""
    durations = summary.durations
    if durations.wall_s <= 0:
        return []
    names = ("training", "evaluation", "startup", "wasted", "unavailable", "other")
    total = formatting.format_duration(durations.wall_s)
    total += f", {formatting.format_percent(durations.productive_s / durations.wall_s)} productive"
    total += f"; not counted: paused for {formatting.format_duration(durations.paused_s)}" if durations.paused_s else ""
    named = [("loading torch", durations.load_s), ("trace", durations.trace_s), ("trials", durations.trials_s)]
    data_s = durations.resolving_s - sum(seconds for _, seconds in named)
    within = [*named, ("preparing data", data_s), ("compiling", durations.compilation_s)]
    within_text = ", ".join(_format_part(*each) for each in within if each[1] >= 0.05)
    parts = [
        _format_part(name, seconds) + (f" ({within_text})" if name == "startup" and within_text else "")
        for name in names
        if (seconds := getattr(durations, f"{name}_s")) > 0.0005 * durations.wall_s
    ]
    facts = [("wall time", total), ("breakdown", ", ".join(parts))]
    facts.append((summary.run_info.unit, formatting.format_count(summary.num_units)))
    steps, planned = summary.last_step, summary.planned_steps
    if summary.status not in RUN_OUTCOMES and steps and planned:
        left_s = max(0, planned - steps) * durations.wall_s / steps
        facts.append(("time left", f"{formatting.format_duration(left_s)} at the pace so far"))
    return facts + goodput_rows(summary.device_time)


def _format_part(name: str, seconds: float) -> str:
    return f"{name} {formatting.format_duration(seconds)}"


def goodput_rows(device_time: DeviceTime) -> list[tuple[str, str]]:
    """What became of the devices, and what each fault cost."""
    if device_time.goodput_share is None:
        return []

    def share(value: float) -> str:
        return formatting.format_percent(value / device_time.allocated_s)

    blocked = [("startup", device_time.startup_s), ("data wait", device_time.data_wait_s)]
    blocked.append(("checkpoint stall", device_time.checkpoint_stall_s))
    named = ", ".join(f"{name} {share(value)}" for name, value in blocked if value > 0.0005 * device_time.allocated_s)
    goodput = f"{share(device_time.productive_s)} of {formatting.format_duration(device_time.allocated_s)} device time"
    goodput += f"; blocked {share(device_time.blocked_s)}" + (f" ({named})" if named else "")
    goodput += f", wasted {share(device_time.wasted_s)}, unavailable {share(device_time.unavailable_s)}"
    costs = map(describe_failure_cost, device_time.failure_costs)
    return [("goodput", goodput), *(("failure cost", text) for text in costs)]


def describe_failure_cost(failure_cost: FailureCost) -> str:
    """A fault and what it cost."""
    cost = failure_cost
    parts = (("wasted", cost.wasted_s), ("unavailable", cost.unavailable_s), ("restart", cost.startup_s))
    breakdown_text = ", ".join(_format_part(*part) for part in parts)
    total, detection = map(formatting.format_duration, (failure_cost.total_s, failure_cost.detection_s))
    return f"{failure_cost.description}: {total} device time ({breakdown_text}); detected after {detection}"


def safety_rows(summary: RunSummary) -> list[tuple[str, str]]:
    """Restarts, guards, checkpoints, faults, warnings. A quiet run has three lines."""
    checkpoints = summary.checkpoints
    restarts = formatting.format_plural(summary.num_restarts, "restart") if summary.num_restarts else "none"
    if summary.wasted_steps:
        restarts += f"; {formatting.format_plural(summary.wasted_steps, 'step')} wasted"
        restarts += f" ({formatting.format_duration(summary.durations.wasted_s)})"
    worlds = {attempt.world_size for attempt in summary.attempts}
    if len(worlds) > 1:
        restarts += f"; workers: {' -> '.join(str(attempt.world_size) for attempt in summary.attempts)}"
    checkpoint_text = "none saved"
    if checkpoints.count:
        size = formatting.format_bytes(checkpoints.last_bytes)
        checkpoint_text = f"{checkpoints.count} saved, the last at step {checkpoints.last_step} ({size})"
        checkpoint_text += f"; stall {formatting.format_duration(checkpoints.total_stall_s)} in total"
    nonfinite_text = ", ".join(f"{what} {count}x" for what, count in summary.nonfinite_actions.items()) or "none"
    facts = [("restarts", restarts), ("non-finite steps", nonfinite_text), ("checkpoints", checkpoint_text)]
    facts += [("uploads", checkpoints.uploads)] if checkpoints.uploads else []
    facts += [("save failed", text) for text in checkpoints.failed]
    facts += [("rejected", text) for text in checkpoints.rejected]
    facts += [("failure", text) for text in summary.failures]
    facts += [("warning", text) for text in summary.warnings]
    facts += [("lost", text) for text in summary.lost]
    if summary.digest:
        facts.append(("digest", summary.digest))
    return facts


def _render_headline(summary: RunSummary) -> str:
    started = f", started {formatting.format_timestamp(summary.started_at)}" if summary.started_at else ""
    lines = format_facts([(summary.run_info.name, describe_outcome(summary))], width=PAGE_WIDTH)
    return "\n".join([*lines, textwrap.shorten(f"{summary.run_info.run_path}{started}", PAGE_WIDTH)])


def _render_section(title: str, facts: Sequence[tuple[str, str]]) -> str:
    labels = ["", *(label for label, _ in facts)]
    rows = [("" if label == before else label, value) for before, (label, value) in zip(labels, facts, strict=False)]
    lines = format_facts(rows, indent=2, label_width=_LABEL_WIDTH, width=PAGE_WIDTH)
    return "\n".join([title, *lines]) if facts else ""


def _render_breakdown(summary: RunSummary) -> str:
    split, shares = summary.breakdown_s, summary.breakdown_shares
    if not split or not shares:
        return ""
    longest = max(shares.values())
    rows = [
        (
            f"  {COMPONENT_LABELS.get(part, part)}",
            "#" * max(1 if shares[part] > 0.002 else 0, round(_BAR_WIDTH * shares[part] / longest)),
            formatting.format_percent(shares[part]),
            formatting.format_duration(split[part]),
        )
        for part in STEP_COMPONENTS
        if split[part] > 0
    ]
    label, bar = Column("Step time", min_width=2 + _LABEL_WIDTH), Column(min_width=_BAR_WIDTH)
    return "\n".join(format_table([label, bar, Column("share", is_number=True), Column("time", is_number=True)], rows))


def _render_recommendations(recommendations: Sequence[Recommendation], summary: RunSummary) -> str:
    title = "Recommendations"
    if not summary.last_step:
        return ""
    if not recommendations:
        return f"{title}\n  No issues found."
    rows = []
    for number, recommendation in enumerate(recommendations, 1):
        gain = ""
        if recommendation.max_gain >= 0.005:
            gain = f" [up to {formatting.format_percent(recommendation.max_gain)} of the run]"
        key = f" (recipe: {recommendation.recipe_key})" if recommendation.recipe_key else ""
        rows.append((f"{number}.", f"{recommendation.full_text}{key}{gain}"))
    return "\n".join([title, *format_table([Column(is_number=True), Column()], rows, indent=2, width=PAGE_WIDTH)])
