"""A step as it passes: what each pipeline rank computes and sends, from when to when; as text, and as a Chrome trace
for chrome://tracing or Perfetto (Trace Event Format, "X" events). The same arithmetic as `step_time.py`, laid out in
time.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.planner.device_costs import DeviceCosts
from phalanx.planner.layouts import layout_of
from phalanx.planner.moe import PASS_DIRECTIONS
from phalanx.planner.pipeline import PipelineSchedule, StageTime, simulate_schedule
from phalanx.planner.scenario import Scenario
from phalanx.planner.segment_costs import OpCost
from phalanx.planner.stages import split_into_stages
from phalanx.planner.step_time import (
    LayoutCosts,
    StepBreakdown,
    predict_step_time,
    stage_pass_time,
    stage_send_seconds,
)
from phalanx.text_table import Column, format_table

COMPUTE_STREAM, COMM_STREAM = "computing", "communicating"
MAX_SHOWN_MICRO_BATCHES = 64
"""Micro-batches that are laid out one by one; the further ones are equal and are drawn as one."""
BREAKDOWN_LABELS = {
    "gemm": "matrix products",
    "attention": "attention",
    "memory_bound": "memory-bound operations",
    "recomputation": "recomputation",
    "tp_all_reduce": "all-reduce over tensor ranks",
    "cp_all_gather_kv": "all-gather of keys and values",
    "ep_all_to_all": "all-to-all of tokens to experts",
    "fsdp_exposed": "exposed FSDP communication",
    "kernel_launch": "kernel launch",
    "pipeline_bubble": "pipeline bubble",
    "grad_sync": "gradient synchronization",
    "optimizer": "optimizer",
    "data_wait": "waiting for data",
    "checkpoint_stall": "checkpoints, divided over the steps",
    "other": "other, once a step",
}
"""Labels of the parts of a step, in the order in which they are printed."""
WAITING_LABELS = frozenset(BREAKDOWN_LABELS[name] for name in ("fsdp_exposed", "kernel_launch", "data_wait"))
"""Labels of the parts in which a device waits."""


@dataclass(frozen=True)
class TimelineEvent:
    """Something that takes time on one pipeline rank; seconds from the start of the step."""

    rank: int
    stream: str
    name: str
    start_s: float
    end_s: float


def build_timeline(
    scenario: Scenario, device: DeviceCosts, cost_of: OpCost | None = None, breakdown: StepBreakdown | None = None
) -> list[TimelineEvent]:
    """All events of a step; they end when `parts` do, by default those of `step(...)`."""
    breakdown = breakdown or predict_step_time(scenario, device, cost_of)
    events = (
        _pipelined_events(scenario, device, cost_of)
        if scenario.parallelism.pipeline > 1
        else _unpipelined_events(scenario, device, cost_of)
    )
    end = max((event.end_s for event in events), default=0.0)
    for name in ("grad_sync", "optimizer", "data_wait", "checkpoint_stall", "other"):
        if not (seconds := getattr(breakdown, name)):
            continue
        stream = COMM_STREAM if name == "grad_sync" else COMPUTE_STREAM
        events += [
            TimelineEvent(rank, stream, BREAKDOWN_LABELS[name], end, end + seconds)
            for rank in range(scenario.parallelism.pipeline)
        ]
        end += seconds
    return events


def _unpipelined_events(scenario: Scenario, device: DeviceCosts, cost_of: OpCost | None) -> list[TimelineEvent]:
    """Micro-batch after micro-batch, segment by segment; the weights of a segment travel while that before it is
    computed."""
    costs, stage = LayoutCosts(scenario, layout_of(scenario), device, cost_of), split_into_stages(scenario)[0]
    events: list[TimelineEvent] = []
    now_s, num_shown = 0.0, min(scenario.num_micro_batches, MAX_SHOWN_MICRO_BATCHES)
    for micro_batch in range(num_shown):
        for direction in PASS_DIRECTIONS:
            pass_time = stage_pass_time(costs, stage, direction)
            segments = stage.segments if direction == "forward" else stage.segments[::-1]
            for segment, count in segments:
                segment_time = costs.pass_of(segment, direction)
                seconds = count * (segment_time.total - segment_time.kernel_launch).item()
                name = f"{direction} {segment.name}" + (f" and {count - 1} more" if count > 1 else "")
                events.append(
                    TimelineEvent(0, COMPUTE_STREAM, f"{name}, micro-batch {micro_batch}", now_s, now_s + seconds)
                )
                comm_s = count * costs.gather_seconds(segment).item()
                if direction == "backward":
                    comm_s += count * costs.reduce_scatter_seconds(segment).item()
                if comm_s:
                    events.append(TimelineEvent(0, COMM_STREAM, f"weights of {segment.name}", now_s, now_s + comm_s))
                now_s += seconds
            for name in ("fsdp_exposed", "kernel_launch"):
                if (wait_s := getattr(pass_time, name).item()) > 0:
                    events.append(TimelineEvent(0, COMPUTE_STREAM, BREAKDOWN_LABELS[name], now_s, now_s + wait_s))
                    now_s += wait_s
    if scenario.num_micro_batches > num_shown:
        rest_s = now_s / num_shown * (scenario.num_micro_batches - num_shown)
        events.append(
            TimelineEvent(
                0,
                COMPUTE_STREAM,
                f"{scenario.num_micro_batches - num_shown} further micro-batches",
                now_s,
                now_s + rest_s,
            )
        )
    return events


def _pipelined_events(scenario: Scenario, device: DeviceCosts, cost_of: OpCost | None) -> list[TimelineEvent]:
    costs, ranks = LayoutCosts(scenario, layout_of(scenario), device, cost_of), scenario.parallelism.pipeline
    stages = [
        StageTime(*(stage_pass_time(costs, chunk, direction).total.item() for direction in PASS_DIRECTIONS))
        for chunk in split_into_stages(scenario)
    ]
    schedule: PipelineSchedule = (
        "interleaved" if scenario.virtual_stages > 1 else scenario.parallelism.pipeline_schedule
    )
    send_s = stage_send_seconds(costs).item()
    labels = {"F": "forward", "B": "backward", "W": "gradients of weights"}
    return [
        TimelineEvent(
            span.rank,
            COMPUTE_STREAM,
            f"{labels[span.op]}, micro-batch {span.micro_batch}"
            + (f", chunk {span.virtual_stage}" if scenario.virtual_stages > 1 else ""),
            span.start_s,
            span.end_s,
        )
        for span in simulate_schedule(schedule, stages, ranks, scenario.num_micro_batches, send_s)
    ]


def format_breakdown(step_breakdown: StepBreakdown, width: int = 40) -> str:
    """The parts of a step as bars; they sum to the step."""
    rows = []
    for name, words in BREAKDOWN_LABELS.items():
        seconds = getattr(step_breakdown, name)
        share = seconds / step_breakdown.total
        if share > 0.0005:
            rows.append((words, format_seconds(seconds), f"{share:.1%}", "#" * round(width * share)))
    rows.append(("a step", format_seconds(step_breakdown.total), "100.0%", ""))
    columns = [Column(min_width=42), Column(is_number=True), Column(is_number=True), Column()]
    return "\n".join(format_table(columns, rows, indent=2))


def draw_timeline(events: Sequence[TimelineEvent], width: int = 96) -> str:
    """The time line as text, a line for each rank and stream: F forward, B backward, W gradients of weights, ~ waiting,
    = communicating, o optimizer and the rest, . nothing."""
    end = max(event.end_s for event in events)
    rows: dict[tuple[int, str], list[str]] = {}
    for event in sorted(events, key=lambda each: each.start_s):
        row = rows.setdefault((event.rank, event.stream), ["."] * width)
        first, last = int(event.start_s / end * width), int(event.end_s / end * width)
        row[first:last] = [_symbol_of(event)] * (last - first)
    ordered = sorted(rows.items(), key=lambda item: (item[0][0], item[0][1] == COMM_STREAM))
    cells = [(f"rank {rank}", stream, "".join(row)) for (rank, stream), row in ordered]
    cells.append(("", "", f"0{format_seconds(end):>{width - 1}}"))
    columns = [Column(), Column(min_width=len("communicating")), Column()]
    return "\n".join(format_table(columns, cells, indent=2))


def chrome_trace(events: Sequence[TimelineEvent]) -> str:
    """The time line as a JSON file for trace viewers; a process for each rank, a thread for each stream, us."""
    streams = {COMPUTE_STREAM: 0, COMM_STREAM: 1}
    traced: list[dict[str, Any]] = []
    for rank in sorted({event.rank for event in events}):
        traced.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"pipeline rank {rank}"}})
        traced += [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": name}}
            for name, number in streams.items()
        ]
    for event in events:
        traced.append(
            {
                "ph": "X",
                "name": event.name,
                "pid": event.rank,
                "tid": streams[event.stream],
                "ts": round(event.start_s * 1e6, 3),
                "dur": round((event.end_s - event.start_s) * 1e6, 3),
            }
        )
    return json.dumps({"traceEvents": traced, "displayTimeUnit": "ms"})


def _symbol_of(event: TimelineEvent) -> str:
    if event.stream == COMM_STREAM:
        return "="
    if event.name in WAITING_LABELS:
        return "~"
    for start, letter in (("forward", "F"), ("backward", "B"), ("gradients of weights", "W")):
        if event.name.startswith(start):
            return letter
    return "o"


def format_seconds(seconds: float) -> str:
    """Seconds with as many digits as a forecast deserves."""
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.3f} s"
