"""The page that `phalanx report RUN` prints: plain text, at most 100 columns, the same in a pipe."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from phalanx.observe import units
from phalanx.observe.advice import Advice
from phalanx.observe.history import PARTS
from phalanx.observe.ledger import Ledger, Loss
from phalanx.observe.summary import Summary
from phalanx.observe.what import What

WIDTH = 100
_LABEL = 21

PART_NAMES = {"data": "data wait", "exchange": "gradient sync", "checkpoint": "checkpoint stall"}


def text_page(summary: Summary, advices: Sequence[Advice]) -> str:
    """The whole page, ending in a newline."""
    sections = [
        _headline(summary),
        _section("What ran", what_facts(summary.what)),
        _section("Loss", loss_facts(summary)),
        _section("Speed", speed_facts(summary)),
        _split(summary),
        _section("Duration", duration_facts(summary)),
        _section("Safety", safety_facts(summary)),
        _advice(advices, summary),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def verdict(summary: Summary) -> str:
    """How the run ended, in one line."""
    of = f"{summary.last_step} of {units.times(summary.planned_steps, 'step')}" if summary.planned_steps else ""
    of = of or units.times(summary.last_step, "step")
    wall = f" in {units.duration(summary.durations.wall)}" if summary.durations.wall else ""
    if summary.status == "not known":
        return f"unknown: {of} at least"
    if summary.status == "not started":
        return "not started: no events yet"
    if summary.status == "incomplete":
        return f"incomplete: {of}{wall}; still running, or killed"
    return f"{summary.status}: {of}{wall}"


def what_facts(what: What) -> list[tuple[str, str]]:
    """Name and value of everything that was fixed before the first step."""
    args = ", ".join(f"{key} {value}" for key, value in what.model_args.items())
    size = f"{units.count(what.parameters)} parameters" if what.parameters is not None else "parameters not counted"
    batch = units.UNKNOWN
    if what.global_batch is not None:
        batch = units.times(what.global_batch, "sample")
        if what.unit == "tokens" and what.units_per_sample > 1:
            batch += f" = {what.global_batch * what.units_per_sample} tokens"
        if what.micro_batch:
            batch += f", in micro-batches of {what.micro_batch}"
    workers = units.times(what.world, "worker")
    workers += f" with {units.times(what.threads, 'thread')} each" if what.threads and what.device == "cpu" else ""
    workers += f" on {what.nodes} machines" if what.nodes > 1 else ""
    cores = f", {units.times(what.cores, 'core')}" if what.cores else ""
    facts = [
        ("model", f"{what.model}, {size}" + (f" ({args})" if args else "")),
        ("task", what.task),
        ("data", what.data),
        ("batch", batch),
        ("optimizer", what.optimizer),
        ("precision", what.precision),
        ("parallelism", f"{what.layout}; {workers}"),
        ("device", f"{what.device or units.UNKNOWN}{f', {what.device_name}' if what.device_name else ''}{cores}"),
    ]
    facts += [("auto", f"{key} = {value}{f': {why}' if why else ''}") for key, value, why in what.chosen]
    if what.versions:
        facts.append(("versions", ", ".join(f"{name} {version}" for name, version in what.versions.items())))
    return facts


def loss_facts(summary: Summary) -> list[tuple[str, str]]:
    """Training loss first to last, held-out loss and metrics."""
    loss = summary.loss
    if loss.last is None and summary.last_step:
        return [("training", "unknown: the events of its steps are lost")]
    if loss.last is None:
        return [("training", "no step finished yet")]
    training = f"{units.loss(loss.first)} -> {units.loss(loss.last)}"
    training += f" (mean of the last steps {units.loss(loss.end)})" if loss.end is not None else ""
    facts = [("training", training)]
    if loss.not_finite:
        facts.append(("non-finite loss", f"{loss.not_finite} of {units.times(summary.last_step, 'step')}"))
    if loss.noise_scale is not None:
        facts.append(("noise scale", noise_in_words(loss.noise_scale, summary.what.global_batch)))
    if loss.held_out_last is None:
        facts.append(("validation", "not evaluated"))
        return facts
    held_out = f"{units.loss(loss.held_out_first)} -> {units.loss(loss.held_out_last)}"
    if loss.held_out_best is not None:
        held_out += f", best {units.loss(loss.held_out_best)} at step {loss.held_out_best_step}"
    facts.append(("validation", held_out))
    if loss.metrics:
        facts.append(("metrics", ", ".join(f"{name} {units.loss(value)}" for name, value in loss.metrics.items())))
    return facts


def noise_in_words(samples: float, batch: int | None) -> str:
    """The gradient noise scale, and how far the global batch may grow by it."""
    scale = f"gradient noise scale about {units.times(_rounded(samples), 'sample')}"
    if batch is None:
        return scale
    if samples > 2 * batch:
        times = float(f"{samples / batch:.2g}")
        return f"{scale}; batch.global_size is {batch}: room to grow to about {_rounded(samples)} ({times:g} x)"
    if samples > batch / 2:
        return f"{scale}; batch.global_size is {batch}: at the limit of efficient scaling"
    return f"{scale}; batch.global_size is {batch}: a smaller one would need few more steps"


def _rounded(samples: float) -> int:
    """To two digits: it is an estimate."""
    return max(1, int(float(f"{samples:.2g}")))


def speed_facts(summary: Summary) -> list[tuple[str, str]]:
    """Rates, MFU with what it is relative to, and the prediction beside what happened."""
    speed = summary.speed
    if speed.median is None:
        return []
    pace = f"{units.rate(speed.median, speed.unit)} (median; mean {units.rate(speed.mean, speed.unit)})"
    step = f"{units.duration(speed.step_median)} (median; 95% within {units.duration(speed.step_slow)})"
    if speed.step_predicted and speed.step_median:
        off = speed.step_median / speed.step_predicted - 1
        step += f"; predicted {units.duration(speed.step_predicted)}, {_off(off)}"
    if speed.step_foretold and speed.step_median:
        off = speed.step_median / speed.step_foretold - 1
        step += f"; predicted from the calibration {units.duration(speed.step_foretold)}, {_off(off)}"
    facts = [("speed", pace), ("step", step)]
    if (speed.step_predicted or speed.step_foretold) and (most := speed.differs_most) is not None:
        parts = f"{units.duration(most.foretold)} predicted, {units.duration(most.measured)} measured"
        facts.append(("largest error", f"{most.part}: {parts}; {most.why}"))
    computed = f" ({units.flops(speed.flops)} of {{}})"
    measured, sheet = units.percent(speed.mfu_measured), units.percent(speed.mfu_data_sheet)
    if speed.mfu_measured is not None:
        measured += computed.format(f"{units.flops(speed.matmul_rate)} measured in {summary.what.precision} matmul")
    if speed.mfu_data_sheet is not None:
        source = f", {speed.data_sheet_source}" if speed.data_sheet_source else ""
        sheet += computed.format(f"{units.flops(speed.data_sheet_rate)}{source}")
    facts += [("MFU (measured peak)", measured), ("MFU (data-sheet peak)", sheet)]
    if (energy := summary.energy) is not None:
        drawn = f"{units.significant(energy.joules / 3.6e6)} kWh by {units.times(energy.devices, 'GPU')}"
        if energy.per_unit is not None:
            drawn += f", {units.significant(energy.per_unit)} J per {speed.unit.removesuffix('s')}"
        facts.append(("energy", drawn))
    if speed.flops_rule:
        facts.append(("FLOPs counted", speed.flops_rule))
    return facts


def _off(share: float) -> str:
    if abs(share) < 0.005:
        return "as predicted"
    return f"{units.percent(abs(share))} {'slower' if share > 0 else 'faster'}"


def duration_facts(summary: Summary) -> list[tuple[str, str]]:
    """Wall time and what became of it."""
    spent = summary.durations
    if spent.wall <= 0:
        return []
    named = (
        ("training", spent.productive),
        ("evaluation", spent.evaluating),
        ("startup", spent.starting),
        ("wasted", spent.redone),
        ("unavailable", spent.down),
        ("other", spent.rest),
    )
    total = units.duration(spent.wall)
    total += f", {units.percent(spent.productive / spent.wall)} productive"
    total += f"; not counted: paused for {units.duration(spent.paused)}" if spent.paused else ""
    parts = [f"{name} {units.duration(seconds)}" for name, seconds in named if seconds > 0.0005 * spent.wall]
    if spent.compiling:
        within = f" (compiling {units.duration(spent.compiling)})"
        parts = [part + within if part.startswith("startup") else part for part in parts]
    facts = [("wall time", total), ("breakdown", ", ".join(parts)), (summary.what.unit, units.count(summary.units))]
    return facts + ledger_facts(summary.ledger)


def ledger_facts(ledger: Ledger) -> list[tuple[str, str]]:
    """What became of the devices, and what each fault cost."""
    if ledger.goodput is None:
        return []

    def share(value: float) -> str:
        return units.percent(value / ledger.allocated)

    blocked = [("startup", ledger.starting), ("data wait", ledger.data), ("checkpoint stall", ledger.checkpoint)]
    named = ", ".join(f"{name} {share(value)}" for name, value in blocked if value > 0.0005 * ledger.allocated)
    goodput = f"{share(ledger.productive)} of {units.duration(ledger.allocated)} device time"
    goodput += f"; blocked {share(ledger.blocked)}" + (f" ({named})" if named else "")
    goodput += f", wasted {share(ledger.discarded)}, unavailable {share(ledger.unavailable)}"
    return [("goodput", goodput), *(("failure cost", cost(loss)) for loss in ledger.losses)]


def cost(loss: Loss) -> str:
    """A fault and what it cost."""
    parts = [("wasted", loss.discarded), ("unavailable", loss.unavailable), ("restart", loss.starting)]
    made = ", ".join(f"{name} {units.duration(seconds)}" for name, seconds in parts if seconds > 0)
    found = f"; detected after {units.duration(loss.detected)}"
    return f"{loss.what}: {units.duration(loss.total)} device time ({made}){found}"


def safety_facts(summary: Summary) -> list[tuple[str, str]]:
    """Restarts, guards, checkpoints, faults, warnings. A quiet run has three lines."""
    saves = summary.checkpoints
    restarts = units.times(summary.restarts, "restart") if summary.restarts else "none"
    if summary.redone_steps:
        restarts += f"; {units.times(summary.redone_steps, 'step')} wasted"
        restarts += f" ({units.duration(summary.durations.redone)})"
    worlds = {life.world for life in summary.attempts}
    if len(worlds) > 1:
        restarts += f"; workers: {' -> '.join(str(life.world) for life in summary.attempts)}"
    saved = "none saved"
    if saves.count:
        saved = f"{saves.count} saved, the last at step {saves.last_step} ({units.size(saves.bytes)})"
        saved += f"; stall {units.duration(saves.stall)} in total"
        saved += f", {units.duration(saves.stall_longest)} at most" if saves.stall_longest else ""
    guards = ", ".join(f"{what} {count}x" for what, count in summary.guards.items()) or "none"
    facts = [("restarts", restarts), ("non-finite steps", guards), ("checkpoints", saved)]
    facts += [("save failed", text) for text in saves.failed]
    facts += [("rejected", text) for text in saves.rejected]
    facts += [("failure", text) for text in summary.faults]
    facts += [("warning", text) for text in summary.warnings]
    facts += [("lost", text) for text in summary.lost]
    if summary.digest:
        facts.append(("digest", summary.digest))
    return facts


def _headline(summary: Summary) -> str:
    name, ending = summary.what.name, verdict(summary)
    if len(name) + len(ending) + 2 > WIDTH:
        line = f"{name}\n{textwrap.fill(ending, WIDTH)}"
    else:
        line = f"{name}{ending:>{WIDTH - len(name)}}"
    began = f"{summary.what.run}, started {units.moment(summary.began)}" if summary.began else summary.what.run
    return f"{line}\n{textwrap.shorten(began, WIDTH)}"


def _section(title: str, facts: Iterable[tuple[str, str]]) -> str:
    lines = []
    before = ""
    for label, value in facts:
        lines.append(_line("" if label == before else label, value))
        before = label
    return "\n".join([title, *lines]) if lines else ""


def _line(label: str, value: str) -> str:
    indent = " " * (2 + _LABEL + 1)
    return textwrap.fill(
        value,
        WIDTH,
        initial_indent=f"  {label:<{_LABEL}} ",
        subsequent_indent=indent,
        break_on_hyphens=False,
    )


def _split(summary: Summary) -> str:
    split, shares = summary.split, summary.split_shares
    if not split or not shares:
        return ""
    lines = [f"{'Step time':<{_LABEL + 25}}{'share':>6}{'time':>12}"]
    longest = max(shares.values())
    for part in PARTS:
        if split[part] > 0:
            bar = "#" * max(1 if shares[part] > 0.002 else 0, round(22 * shares[part] / longest))
            name = PART_NAMES.get(part, part)
            lines.append(
                f"  {name:<{_LABEL}} {bar:<22}{units.percent(shares[part]):>6}{units.duration(split[part]):>12}"
            )
    return "\n".join(lines)


def _advice(advices: Sequence[Advice], summary: Summary) -> str:
    title = "Recommendations"
    if not summary.last_step:
        return ""
    if not advices:
        return f"{title}\n  No issues found."
    lines = []
    for number, advice in enumerate(advices, 1):
        gain = f" [up to {units.percent(advice.gain)} of the run]" if advice.gain >= 0.005 else ""
        key = f" (recipe: {advice.key})" if advice.key else ""
        lines.append(
            textwrap.fill(
                f"{advice.text}{key}{gain}",
                WIDTH,
                initial_indent=f"  {number:>2}. ",
                subsequent_indent="      ",
                break_on_hyphens=False,
            )
        )
    return "\n".join([title, *lines])
