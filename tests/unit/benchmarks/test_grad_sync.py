"""benchmarks/grad_sync without its links: the paced model, the figures, the tables."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from phalanx.train.checkpoint import format_checkpoint_name

BENCHMARKS = Path(__file__).parents[3] / "benchmarks" / "grad_sync"
MODULES = (
    "rate_limited",
    "tables",
    "competitors",
    "workloads",
    "links",
    "network_namespaces",
    "node",
    "run",
    "node_processes",
    "loss",
    "plot",
    "pictures",
)


@pytest.fixture(scope="module", autouse=True)
def on_the_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCHMARKS), str(BENCHMARKS.parent), *sys.path])
        yield
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def paced() -> ModuleType:
    import rate_limited

    return rate_limited


@pytest.fixture
def figures() -> ModuleType:
    import tables

    return tables


class Clock:
    """A clock that goes only when somebody sleeps, and a sleep that is late."""

    def __init__(self, late: float = 0.0) -> None:
        self.now, self.late = 100.0, late

    def read(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.late


SHAPES = {"a.weight": (3, 2), "a.bias": (3,), "b.weight": (4, 3)}


def pace_of_three(paced: ModuleType) -> object:
    return paced.ComputeTiming(
        1.0, (paced.GradientArrival(("b.weight",), 0.5), paced.GradientArrival(("a.weight", "a.bias"), 2.0))
    )


def test_hooks_fire_in_the_order_and_at_the_times_of_the_pace(paced: ModuleType) -> None:
    clock = Clock()
    model = paced.RateLimitedModel(SHAPES, pace_of_three(paced), pacer=paced.DeadlineSleeper(clock.read, clock.sleep))
    fired = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.append((name, clock.now - 100)))
    model().backward()
    assert fired[0] == ("b/weight", 1.5)
    assert sorted(fired[1:]) == [("a/bias", 3.5), ("a/weight", 3.5)]


def test_gradients_are_what_was_drawn_in_each_step_and_differ_between_nodes(paced: ModuleType) -> None:
    pacer = paced.DeadlineSleeper(sleep=lambda seconds: None, clock=iter(range(10**6)).__next__)
    here, there = (paced.RateLimitedModel(SHAPES, pace_of_three(paced), seed, pacer) for seed in (0, 1))
    assert [tuple(p.shape) for p in here.parameters()] == list(SHAPES.values())
    for _ in range(2):
        here.zero_grad()
        here().backward()
        for parameter, drawn in zip(here.parameters(), here.drawn, strict=True):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, drawn)
            parameter.grad.zero_()  # an exchange may write into them
    assert not torch.equal(here.drawn[0], there.drawn[0])


def test_the_sum_of_waits_is_right_though_each_is_late(paced: ModuleType) -> None:
    clock = Clock(late=0.1)
    pacer = paced.DeadlineSleeper(clock.read, clock.sleep)
    for _ in range(50):
        pacer.wait(1.0)
    assert clock.now - 100 == pytest.approx(50.1)


def test_what_is_done_meanwhile_takes_no_time_of_its_own(paced: ModuleType) -> None:
    clock = Clock()
    paced.DeadlineSleeper(clock.read, clock.sleep).wait(1.0, lambda: clock.sleep(0.7))
    assert clock.now - 100 == pytest.approx(1.0)


def test_a_pacer_that_hurries_does_what_is_to_be_done_and_does_not_wait(paced: ModuleType) -> None:
    clock = Clock()
    pacer, done = paced.DeadlineSleeper(clock.read, clock.sleep), []
    pacer.hurries = True
    pacer.wait(1.0, lambda: done.append(1))
    assert (clock.now, pacer.late, done) == (100.0, 0.0, [1])


def test_a_pace_of_another_model_is_refused(paced: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"another model: c\.weight"):
        paced.RateLimitedModel({**SHAPES, "c.weight": (2,)}, pace_of_three(paced))


def test_the_pace_of_a_real_model_has_its_order_and_all_its_parameters(paced: ModuleType) -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    inputs = torch.randn(512, 512)
    pace = paced.measure_timing(model, lambda: model(inputs).square().mean(), repeats=2)
    order = [name.split(".")[0] for moment in pace.backward for name in moment.names]
    assert order == sorted(order, reverse=True)
    assert sorted(name for moment in pace.backward for name in moment.names) == sorted(paced.list_shapes(model))
    assert pace.forward > 0
    assert all(parameter.grad is None for parameter in model.parameters())
    assert paced.ComputeTiming.from_dict(pace.as_dict()) == pace


def test_gradients_that_come_at_once_are_one_moment(paced: ModuleType) -> None:
    moments = paced.group_arrivals({"first": 1.0, "bias": 2.0001, "weight": 2.0, "last": 4.0})
    assert [moment.names for moment in moments] == [("first",), ("weight", "bias"), ("last",)]
    assert [moment.seconds for moment in moments] == pytest.approx([1.0, 1.0001, 1.9999])


def test_the_best_efficiency_hides_transfers_behind_backward_only(paced: ModuleType, figures: ModuleType) -> None:
    pace = pace_of_three(paced)  # 1 s forward, 2.5 s backward
    assert figures.compute_best_efficiency(pace, 10**9, None) == 1.0
    assert figures.compute_best_efficiency(pace, 2.5e9 / 8, 1e9) == 1.0
    assert figures.compute_best_efficiency(pace, 6e9 / 8, 1e9) == pytest.approx(3.5 / 7)


def test_a_turn_is_told_by_periods_and_by_the_busiest_node(figures: ModuleType) -> None:
    one = {"seconds": [1.0, 3.0, 1.0, 5.0], "period": 2, "sent": 400, "received": 800, "error": 0.1}
    two = {"seconds": [1.0, 5.0, 1.0, 7.0], "period": 2, "sent": 600, "received": 200, "error": 0.3}
    assert figures.make_turn([one, two]) == figures.Turn((2.5, 3.5), busiest=200.0, mean=125.0, error=0.3)


def test_the_table_has_a_line_for_each_and_says_who_failed(paced: ModuleType, figures: ModuleType) -> None:
    alone = [figures.Turn((3.5, 3.5), 0.0, 0.0, None)]
    turns = [figures.Turn((7.0, 8.0), 6e9 / 8, 3e9 / 8, 1e-3), figures.Turn((9.0, 8.0), 6e9 / 8, 3e9 / 8, 2e-3)]
    row = figures.make_row("ring", turns, alone, pace_of_three(paced), 1e9)
    assert (row.seconds, row.efficiency, row.error) == (8.0, 3.5 / 8.0, 2e-3)
    lines = figures.format_table([row], {"ddp-bf16": "TypeError: a | b"})
    ring = "8000.0 (7750.0 to 8250.0) | 750.00, 375.00 | 0.438 | 0.500 | 0.875 | 2.0e-03"
    assert lines[2:] == [f"| ring | {ring} |", "| ddp-bf16 | failed: TypeError: a / b | | | | | |"]
    assert {line.count("|") for line in lines} == {8}


def test_a_wrong_sum_is_far_from_what_is_wanted(paced: ModuleType) -> None:
    import node

    wanted = [torch.ones(3), torch.full((4,), 2.0)]
    assert node.relative_distance([4 * each for each in wanted], wanted, 4.0) == 0.0
    assert node.relative_distance([3 * each for each in wanted], wanted, 4.0) == pytest.approx(0.25)


def test_steps_are_rounded_up_to_whole_periods() -> None:
    import node

    assert [node.round_up_to_period(*each) for each in ((3, 1), (3, 25), (26, 25), (0, 4))] == [3, 25, 50, 4]


def test_workloads_have_the_parameters_that_are_published() -> None:
    import workloads
    from rate_limited import list_shapes

    counts = {}
    with torch.device("meta"):
        for name in ("gpt-1024", "nin-64", "googlenet-32"):
            counts[name] = sum(math.prod(shape) for shape in list_shapes(workloads.WORKLOADS[name].build()).values())
    assert counts == {"gpt-1024": 3_279_616, "nin-64": 7_595_176, "googlenet-32": 6_998_552}


def test_ours_gives_the_sum_of_one_node(paced: ModuleType) -> None:
    import competitors

    pacer = paced.DeadlineSleeper(sleep=lambda seconds: None, clock=iter(range(10**6)).__next__)
    model = paced.RateLimitedModel(SHAPES, pace_of_three(paced), pacer=pacer)
    contender = competitors.COMPETITORS["all-reduce"](
        model, competitors.TurnInfo(rank=0, world_size=1, sync_every=5, turn=0)
    )
    for _ in range(2):
        contender.step()
    assert all(torch.equal(a, b) for a, b in zip(contender.values(), model.drawn, strict=True))
    contender.close()


def test_a_rate_is_read_as_tc_writes_it_and_bursts_are_of_a_millisecond() -> None:
    import links
    import network_namespaces

    assert [links.parse_rate(rate) for rate in ("100mbit", "1gbit", "2.5gbit")] == [1e8, 1e9, 2.5e9]
    assert [network_namespaces.burst(rate) for rate in ("100mbit", "1gbit", "10gbit")] == [32768, 125_000, 1_250_000]
    with pytest.raises(ValueError, match="'fast' is no rate such as 100mbit"):
        links.parse_rate("fast")


def test_losses_are_compared_seed_by_seed() -> None:
    import loss

    losses = {loss.REFERENCE_NAME: {0: 2.0, 1: 4.0}, "int8": {0: 2.002, 1: 3.992}}
    lines = loss.table(losses, {"ring": "exit 78: a | b"})
    assert lines[2] == f"| {loss.REFERENCE_NAME} | 2.0000 | 4.0000 | +0.00%, +0.00% | +0.00% |"
    assert lines[3] == "| int8 | 2.0020 | 3.9920 | +0.10%, -0.20% | -0.05% |"
    assert lines[4].startswith("| ring | failed: exit 78: a / b |")
    assert {line.count("|") for line in lines} == {6}


def test_a_run_goes_on_from_where_the_reference_was(tmp_path: Path) -> None:
    import loss

    reference, folder = tmp_path / "reference", tmp_path / "other"
    for name in ("recipe.yaml", "resolved.yaml", "events.jsonl", "result.json"):
        (reference / name).parent.mkdir(exist_ok=True)
        (reference / name).write_text(name)
    for step in (4, 8):
        (reference / "checkpoints" / format_checkpoint_name(step)).mkdir(parents=True)
    loss.back_to(4, reference, folder)
    there = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    assert there == {"recipe.yaml", "resolved.yaml", "checkpoints", f"checkpoints/{format_checkpoint_name(4)}"}
    assert loss.saving(4) == ["checkpoint.every=4", "checkpoint.keep=1000"]
    assert loss.saving(0) == []


def test_only_the_reference_is_exact() -> None:
    import loss

    assert loss.overrides(None, ["exchange.h=5"]) == ["grad_sync.algorithm=all-reduce", "determinism=fixed-world"]
    assert loss.overrides("int8", ["exchange.h=5"]) == ["grad_sync.compression=int8", "determinism=off", "exchange.h=5"]
    own = ["local_sgd.method=average", "determinism=off", "local_sgd.sync_every=10", "local_sgd.sync_dtype=int8"]
    assert loss.overrides("average:sync_every=10,sync_dtype=int8", []) == own


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--links", "100mbit", "fast"], "--links: 'fast' is no rate such as 100mbit or 1gbit, nor none"),
        (["--nodes", "4", "1"], "--nodes: [4, 1] must be 2 to 64 each"),
        (["--local-steps", "0"], "--local-steps: must be at least 1"),
        (["--strategies", "rign"], "invalid choice: 'rign'"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import run

    with pytest.raises(SystemExit):
        run.parse_options(given)
    assert said in capsys.readouterr().err


def case_of(link: str, **efficiencies: float) -> dict[str, Any]:
    """As benchmarks/grad_sync/run.py writes it."""
    rows = [{"name": f"{name.replace('_', '-')}-1mib", "efficiency": value} for name, value in efficiencies.items()]
    return {"workload": "gpt-1024", "told": "GPT", "nodes": 4, "link": link, "rows": rows}


def test_a_picture_names_each_contender_that_is_shown() -> None:
    pytest.importorskip("matplotlib")
    from plot import by_workload, picture

    results = [{"cases": [case_of("1gbit", all_reduce=0.9, ddp=0.8), case_of("100mbit", all_reduce=0.2, ring=0.1)]}]
    ((workload, cases),) = by_workload([*results, {"cases": [case_of("none", all_reduce=1.0)]}]).items()
    drawn = picture(cases)
    assert workload == "gpt-1024"
    assert ">all-reduce</text>" in drawn
    assert ">torch's DDP</text>" in drawn
    assert ">ring" not in drawn


@pytest.mark.parametrize("link", ["1gbps", "fast", "mbit"])
def test_a_picture_of_a_link_without_a_speed_is_refused(link: str) -> None:
    from plot import picture

    with pytest.raises(ValueError, match=r"expected a number and mbit or gbit|could not convert"):
        picture([case_of(link, all_reduce=0.5)])


def test_results_of_several_numbers_of_nodes_are_not_drawn_as_one() -> None:
    from plot import picture

    with pytest.raises(ValueError, match="several numbers of nodes"):
        picture([case_of("1gbit", all_reduce=0.9), case_of("1gbit", all_reduce=0.8) | {"nodes": 8}])
