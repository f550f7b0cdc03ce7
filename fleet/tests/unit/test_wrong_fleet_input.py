"""What is wrong in a fleet file, its jobs, targets and variants is said before anything is done."""

from pathlib import Path

import pytest

from phalanx.errors import PhalanxError, RecipeError, UsageError
from phalanx_fleet.commands.power_output import format_status, list_level_rows
from phalanx_fleet.fleet_file import FleetFile, load_fleet_file
from phalanx_fleet.power.committed_power import LevelSum
from phalanx_fleet.power.control import load_jobs_file, load_power_fleet, open_guard, open_links, read_nodes
from phalanx_fleet.power.guard import GuardStatus
from phalanx_fleet.power.load_targets import load_targets_file
from phalanx_fleet.power.node_helper import load_helper_file
from phalanx_fleet.power_tree import PowerTree, build_power_tree
from phalanx_fleet.simulate.job_state import CheckpointCosts
from phalanx_fleet.simulate.random_events import read_job_trace
from phalanx_fleet.simulate.variants import simulate_variants

FLEET = """\
name: hall
sites: {s: {}}
feeds: {a: {site: s, budget: 1 MW}}
rows: {r: {feed: a}}
racks: {"k[1-2]": {row: r, node_type: h, nodes: 2}}
node_types: {h: {node: dgx-h100}}
"""


SIMULATED = """\
simulate:
  days: 3
  jobs: {a: {count: 1, devices: {8: 1}, checkpoint: {mode: sync}}}
  failures: {gpu: {per_1000_node_days: 2, batch_factors: {old: 2}}}
  batches: {old: {racks: k1}}
"""


def load_text(folder: Path, text: str, *overrides: str) -> FleetFile:
    (folder / "fleet.yaml").write_text(text)
    return load_fleet_file(folder / "fleet.yaml", overrides)[0]


def test_a_level_without_any_power_is_the_tightest_one() -> None:
    status = GuardStatus([LevelSum("feed a", 0.0, 10.0), LevelSum("site s", 100.0, 90.0)], [], [], {}, [])
    assert format_status(status).startswith("feed a: 10 W of a budget of 0 W;")


@pytest.mark.parametrize("name", ["../../out", "..", '"\\e[31m"'])
def test_a_fleet_is_not_called_like_a_path(tmp_path: Path, name: str) -> None:
    """Its state is in a folder of this name."""
    with pytest.raises(RecipeError, match=r"name: found .*, expected text matching"):
        load_text(tmp_path, FLEET.replace("hall", name))


@pytest.mark.parametrize(
    ("variant", "problem"),
    [
        # would change nothing
        ("jobs.b.checkpoint.mode=async", "simulate.jobs: b is not in the file; there are a"),
        ("failures.gpus.per_1000_node_days=4", "simulate.failures: gpus is not in the file; .* did you mean gpu?"),
        ("spare=0.04", "override spare=0.04: spare: unknown key; did you mean spares?"),
        ("", "--what: expected KEY=VALUE"),
        ("jobs.a.sigma=1000", "sigma: found 1000, expected a number from 0 to 10"),
        ("failures.gpu.batch_factors.new=4", "failures.gpu.batch_factors: new: no such batch; there are old"),
        # is not simulated
        ("jobs.replay.activity=0.5", "jobs.replay are those of --replay JOBS.csv, which is not given"),
        ("power.margin=0.1", "power is not simulated"),
        ("seeds=3", "all variants have the same seeds; give --seeds"),
        ("days=30%", 'days: found "30%", expected a number above 0'),
        ("'cooling={design_it: 1 MW}'", "cooling is not simulated here; expected site.weather=FILE.csv as well"),
        ("'jobs.b={devices: {8: 1}}'", "jobs.b: has no jobs; expected count or per_day"),
        ("'jobs.a.hours={4: 1}'", "hours: none for 8 accelerators"),
        # is cut at a space
        *(
            (text, r"expected KEY=VALUE, such as spares=0.04; one with spaces stands in quotes")
            for text in ("spares=4 %", "spares", "jobs.a.devices={8: 1}", "=3")
        ),
    ],
)
def test_a_variant_that_cannot_be_meant_is_refused(tmp_path: Path, variant: str, problem: str) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET + SIMULATED)
    with pytest.raises(PhalanxError, match=problem):
        simulate_variants(tmp_path / "fleet.yaml", [variant], None, 1)


@pytest.mark.parametrize(
    ("variant", "problem"),
    [
        ("jobs.a.checkpoint.mode=async", "instead of jobs.a; expected jobs.replay.checkpoint.mode"),
        ("'jobs.b={count: 1}'", "instead of jobs.b; leave it out"),
        ("jobs.replay.median_h=3", "--replay ignores jobs.replay.median_h; expected checkpoint, activity or speed_by"),
    ],
)
def test_a_variant_of_jobs_that_a_trace_replaces_is_refused(tmp_path: Path, variant: str, problem: str) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET + SIMULATED)
    (tmp_path / "jobs.csv").write_text("submit_s,gpus,duration_s\n0,8,3600\n")
    with pytest.raises(RecipeError, match=problem):
        simulate_variants(tmp_path / "fleet.yaml", [variant], tmp_path / "jobs.csv", 1)
    assert simulate_variants(tmp_path / "fleet.yaml", ["jobs.replay.activity=0.5"], tmp_path / "jobs.csv", 1)


@pytest.mark.parametrize("price", ["8 ct", "0,08"])
@pytest.mark.parametrize("key", ["price_per_kwh", "carbon_g_per_kwh"])
def test_a_price_with_a_unit_is_no_missing_file(tmp_path: Path, key: str, price: str) -> None:
    text = FLEET + SIMULATED
    problem = (
        rf'fleet.yaml:12: simulate.site.{key}: found ".*", expected a number without a unit, such as 0.08, or a file'
    )
    with pytest.raises(RecipeError, match=problem):
        load_text(tmp_path, f"{text}  site: {{{key}: '{price}'}}\n")
    for name in ("2023.csv", "2023/prices.csv", "prices", "8 ct.csv", "{file: '8 ct'}"):
        assert load_text(tmp_path, f"{text}  site: {{{key}: {name}}}\n").simulate


@pytest.mark.parametrize(
    ("devices", "problem"),
    [
        ("{packages: 2}", "packages is not for kind: nvml; expected kind: rapl"),
        ("{kind: amdsmi}", "kind: found .*, expected"),
    ],
)
def test_devices_that_cannot_be_opened_are_refused_on_load(tmp_path: Path, devices: str, problem: str) -> None:
    (tmp_path / "helper.yaml").write_text(f"allow: {{}}\ndevices: {devices}\n")
    with pytest.raises(RecipeError, match=rf"helper.yaml:2: devices.*{problem}"):
        load_helper_file(tmp_path / "helper.yaml")


def test_levels_are_shown_below_their_own_feed(tmp_path: Path) -> None:
    text = FLEET.replace("budget: 1 MW}", "budget: 1 MW}, b: {site: s}").replace("{r: {", "{q: {feed: b}, r: {")
    (tmp_path / "fleet.yaml").write_text(text)
    fleet = load_power_fleet(tmp_path / "fleet.yaml")
    rows = list_level_rows(fleet, read_nodes(fleet, open_links(fleet, is_fake=True)))
    assert [row.label for row in rows] == ["site s", "feed a", "row r", "rack k1", "rack k2", "feed b", "row q"]
    assert [row.committed_w > 0 for row in rows] == [True, True, True, True, True, False, False]


def test_a_guard_that_has_nothing_to_fall_back_to_names_the_budget(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET.replace("1 MW", "12 kW"))
    fleet = load_power_fleet(tmp_path / "fleet.yaml")
    links = open_links(fleet, is_fake=True)
    with pytest.raises(UsageError, match=r"at their lowest caps feed a: 30966 W of a budget of 12000 W\. Raise"):
        open_guard(fleet, links, read_nodes(fleet, links), takes_over=False)


def test_a_job_has_nodes_of_several_racks(tmp_path: Path) -> None:
    (tmp_path / "jobs.yaml").write_text('jobs: {a: {nodes: "k[1-2]-1"}, b: {nodes: "k1-2,k2-2"}}')
    jobs = load_jobs_file(tmp_path / "jobs.yaml", load_tree(tmp_path, FLEET))
    assert [list(job.devices) for job in jobs] == [[0, 2], [1, 3]]


def test_a_user_that_this_machine_does_not_have_is_named(tmp_path: Path) -> None:
    (tmp_path / "helper.yaml").write_text("allow: {users: [nosuchuser]}\n")
    with pytest.raises(UsageError, match=r"^allow: this machine has no user 'nosuchuser'$"):
        load_helper_file(tmp_path / "helper.yaml")


def test_a_power_of_zero_is_not_the_catalogues(tmp_path: Path) -> None:
    tree = load_tree(tmp_path, FLEET.replace("dgx-h100", "dgx-h100, device_idle: 0 W"))
    assert tree.nodes[0].power.device_idle_w == 0
    with pytest.raises(RecipeError, match=r"node_types.h.device_power: 0 W, with which nothing runs"):
        load_tree(tmp_path, FLEET.replace("dgx-h100", "dgx-h100, device_power: 0 W"))
    with pytest.raises(RecipeError, match="do not fit into a node of 2900 to 0 W"):
        load_tree(tmp_path, FLEET.replace("dgx-h100", "dgx-h100, power: 0 W"))


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ("power: {margin: true}", "power.margin: found true, expected a number from 0 to 1"),
        ("power: {lease_s: 3}", "power: lease_s: 3 s is shorter than 2 periods of the guard, 4 s"),
        ("cooling: {supply_c: 30}", "cooling.design_it: missing, expected a power with its unit"),
        ("simulate: {failures: {gpu: {repair_h: 72}}}", "failures.gpu: has no rate; expected per_1000_node_days or"),
        ("simulate: {failures: {x: {age_factors: {-1: 2}}}}", "x.age_factors: key -1: input should be greater"),
        ("simulate: {jobs: {a: {count: 1, devices: {8: 1}, hours: {8: 1, 64: 2}}}}", "hours: 64 accelerators"),
        ("simulate: {jobs: {a: {devices: {0: 1}}}}", "jobs.a.devices: key 0: input should be greater than 0"),
        ("simulate: {jobs: {a: {devices: {}}}}", "jobs.a.devices: found a mapping, expected a mapping that is not em"),
        ("simulate: {site: {conversion_efficiency: 1e-300}}", "conversion_efficiency: found 1e-300, expected a number"),
        ("simulate: {site: {start: 2026-07-01}}", "simulate.site: start: is the first hour of hourly files, and there"),
        ("simulate: {site: {supply_limit_c: 30}}", "simulate.site: supply_limit_c needs weather"),
        ('simulate: {site: {currency: "\\e[31m"}}', "site.currency: found"),
    ],
)
def test_a_figure_that_cannot_be_is_refused(tmp_path: Path, section: str, problem: str) -> None:
    with pytest.raises(RecipeError) as raised:
        load_text(tmp_path, f"{FLEET}{section}\n")
    assert problem in str(raised.value)


def test_a_variant_takes_new_racks_and_jobs(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET + SIMULATED)
    settings = ["spares=0.25", "'racks.k3={row: r, node_type: h, nodes: 3}'", "'jobs.b={count: 2}'"]
    found = simulate_variants(tmp_path / "fleet.yaml", [" ".join(settings)], None, 1)[1]
    assert (found.settings.spares, found.num_nodes) == (0.25, 7)


def test_a_trace_is_read_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text("\ufeffsubmit_s,gpus,duration_s\r\n0,8,3e9\r\n0,8,3e9\r\n")
    assert read_job_trace(path) == [(0.0, 8, 3e9)] * 2


def load_tree(folder: Path, text: str) -> PowerTree:
    (folder / "fleet.yaml").write_text(text)
    return build_power_tree(*load_fleet_file(folder / "fleet.yaml"))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("site: s, budget", "feed: a, budget", "feeds.a.feed: a: feeds a are behind each other"),
        ("k[1-2]", "k[2-1]", "racks: expected a range such as"),
    ],
)
def test_what_is_wrong_with_a_level_is_not_said_of_those_below_it(
    tmp_path: Path, old: str, new: str, problem: str
) -> None:
    text = FLEET.replace("nodes: 2}", "nodes: 2, names: 'n[1-4]'}")
    with pytest.raises(RecipeError) as raised:
        load_tree(tmp_path, text.replace(old, new))
    assert problem in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("targets: 3", "targets: found 3, expected a list of mappings"),
        ("targets: [{level: a, limit: 1 W, start: 2026-11-28T10:00Z}]", "a: no such level; there are site s, feed"),
        ("limit: 1 kW, start: tomorrow", 'start: found "tomorrow", expected a time such as 2026'),
        ("limit: 1 kW, start: 2026-11-28T10:00Z, end: 2026-11-28T09:00Z", "end: .* is not after its start"),
    ],
)
def test_a_wrong_load_target_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    tree = load_tree(tmp_path, FLEET)
    (tmp_path / "targets.yaml").write_text(text if "targets" in text else f"targets: [{{level: feed a, {text}}}]")
    with pytest.raises(RecipeError, match=problem):
        load_targets_file(tmp_path / "targets.yaml", tree)


def test_a_job_that_cannot_be_is_refused(tmp_path: Path) -> None:
    sweep = "{h: [{cap: 300 W, rate: 7, draw: 298 kW}, {cap: 700 W, rate: 9, draw: 640 kW}]}"
    (tmp_path / "jobs.yaml").write_text(f"jobs: {{a: {{nodes: k1-1, sweep: {sweep}}}}}")
    with pytest.raises(RecipeError, match="at a cap of 300 W a device does not draw 298000 W"):
        load_jobs_file(tmp_path / "jobs.yaml", load_tree(tmp_path, FLEET))


def test_no_time_of_an_attempt_is_negative() -> None:
    costs = CheckpointCosts(float("inf"), 60.0, 0.0, 300.0)
    assert {costs.split_finished(1000 / divisor).blocked_s for divisor in range(1, 200)} == {0.0}


@pytest.mark.parametrize(
    ("batches", "problem"),
    [
        ("{old: {racks: 'k[1-'}}", r"simulate.batches.old.racks: expected a name, or one with a range"),
        ("{old: {racks: k1}, new: {racks: 'k[1-2]'}}", "simulate.batches.new.racks: k1 is of batch old, too"),
        ("{old: {racks: k9}}", "simulate.batches: k9: no such rack"),
    ],
)
def test_a_rack_is_of_one_batch(tmp_path: Path, batches: str, problem: str) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET + SIMULATED.replace("{old: {racks: k1}}", batches))
    with pytest.raises(UsageError, match=problem):
        simulate_variants(tmp_path / "fleet.yaml", [], None, 1)


def test_a_trace_of_unix_times_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET + SIMULATED)
    (tmp_path / "jobs.csv").write_text("submit_s,gpus,duration_s\n1782864000,8,3600\n")
    with pytest.raises(UsageError, match=r"the first job is submitted after 20,635 days, and failures end after 3;"):
        simulate_variants(tmp_path / "fleet.yaml", [], tmp_path / "jobs.csv", 1)
