"""Clusters by name and from files: what people write, what it means, and what they are told when it is wrong."""

import re
from pathlib import Path
from typing import Any

import pytest

from phalanx.cluster import Cluster, catalog, load_cluster, save_cluster
from phalanx.cluster.catalog import list_entries
from phalanx.cluster.spec import CollectiveTiming, GemmTiming, Measurements
from phalanx.errors import ExitCode, RecipeError

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "cluster-file.md"


def load(folder: Path, text: str) -> Cluster:
    (folder / "room.yaml").write_text(text)
    return load_cluster("room.yaml", folder)


def refused(folder: Path, text: str) -> str:
    """What is said about a file that is wrong, without the folder."""
    with pytest.raises(RecipeError) as error:
        load(folder, text)
    assert error.value.code is ExitCode.RECIPE
    return str(error.value).replace(f"{folder}/", "")


# names


def test_a_node_with_a_number_is_so_many_nodes() -> None:
    cluster = load_cluster("dgx-h100:128")
    assert (cluster.name, cluster.nodes, cluster.devices) == ("dgx-h100:128", 128, 1024)
    assert (cluster.topology.kind, cluster.topology.nodes_a_leaf) == ("rail", 32)


@pytest.mark.parametrize(
    ("text", "nodes", "node", "count"),
    [
        ("h100:8", 1, "dgx-h100", 8),
        ("H100-80GB-SXM:1024", 128, "dgx-h100", 8),
        ("H100-96GB(500W):512", 64, "grand-teton", 8),
        ("A100-40GB:16", 2, "dgx-a100-40gb", 8),
        ("GB200:256", 64, "gb200-nvl72", 4),
        ("K20X:128", 128, "titan", 1),
        ("MI250X:16", 2, "frontier", 8),
        ("TPUv5p:64", 16, "tpu-v5p-host", 4),
        ("V100-32GB:2048", 256, "dgx-1", 8),
        ("cpu", 1, "laptop", 1),
    ],
)
def test_an_accelerator_with_a_number_is_so_many_devices(text: str, nodes: int, node: str, count: int) -> None:
    cluster = load_cluster(text)
    assert (cluster.nodes, cluster.node.name, cluster.node.count) == (nodes, node, count)


def test_fewer_devices_than_a_node_has_are_a_part_of_it() -> None:
    cluster = load_cluster("h100:2")
    assert (cluster.nodes, cluster.node.count, cluster.devices) == (1, 2, 2)
    assert cluster.node.scale_up is not None
    assert cluster.node.scale_up.domain == 2


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("h100:12", r"h100:12: 12 are no whole number of nodes.*expected 8 or 16"),
        ("l40s:16", r"l40s:16: no node with the NVIDIA L40S is known.*in a file"),  # more than a workstation takes
        ("dgx-h10:4", r"no node and no accelerator has this name; the nearest are dgx-h100"),
        ("workstation:4", r"node.scale_out: missing, expected the network that joins the nodes"),
        *(
            (f"dgx-h100:{number}", r"expected NAME:NUMBER such as dgx-h100:16")
            for number in ("0", "-1", "many", "", "1.5", "9" * 5000)
        ),
    ],
    ids=lambda text: text[:20],
)
def test_a_name_that_is_no_cluster_is_refused(name: str, told: str) -> None:
    with pytest.raises(RecipeError, match=told) as error:
        load_cluster(name)
    assert error.value.code is ExitCode.RECIPE


def test_a_card_without_a_usual_node_stands_in_a_workstation() -> None:
    cluster = load_cluster("RTX 4090:2")
    assert (cluster.nodes, cluster.node.name, cluster.node.scale_out) == (1, "workstation", None)
    assert cluster.node.scale_up is not None
    assert (cluster.node.scale_up.link, cluster.node.scale_up.kind, cluster.node.scale_up.domain) == (
        "PCIe 4",
        "pcie",
        2,
    )
    assert load_cluster("RTX 4090").node.scale_up is None


# files


def test_a_short_file_is_filled_in_from_the_catalogue(tmp_path: Path) -> None:
    cluster = load(tmp_path, "nodes: 16\nnode: dgx-h100\n")
    assert (cluster.name, cluster.nodes) == ("room", 16)
    assert cluster.node == catalog.find_node("dgx-h100")


def test_a_node_may_be_put_together_from_names(tmp_path: Path) -> None:
    text = (
        "nodes: 4\n"
        "node:\n"
        "  accelerator: H100 SXM\n"
        "  count: 8\n"
        "  scale_up: NVLink 4\n"
        "  scale_out: {link: InfiniBand NDR, ports: 8}\n"
    )
    node = load(tmp_path, text).node
    assert node.accelerator == catalog.find_accelerator("H100 SXM")
    assert node.scale_up == catalog.find_node("dgx-h100").scale_up
    assert node.scale_out == catalog.find_node("dgx-h100").scale_out


def test_single_keys_of_an_entry_may_be_changed(tmp_path: Path) -> None:
    text = (
        "nodes: 2\n"
        "node:\n"
        "  like: dgx-h100\n"
        "  cores: 64\n"
        "  accelerator: {power_w: 500, tflops: {bf16: 900}}\n"
        "  scale_out: {link: 100GbE}\n"
    )
    node, usual = load(tmp_path, text).node, catalog.find_node("dgx-h100")
    assert (node.cores, node.accelerator.power_w, node.accelerator.memory_gib) == (64, 500, 80)
    assert node.accelerator.tflops == {**usual.accelerator.tflops, "bf16": 900}
    assert node.scale_out is not None
    assert (node.scale_out.gbps, node.scale_out.ports, node.scale_out.latency_us) == (12.5, 8, 25)


def test_an_accelerator_may_be_like_another(tmp_path: Path) -> None:
    device = load(tmp_path, "nodes: 1\nnode: {accelerator: {like: A100, name: my A100, memory_gib: 64}, count: 4}\n")
    assert (device.node.accelerator.name, device.node.accelerator.memory_gib) == ("my A100", 64)
    assert device.node.accelerator.memory_gbps == 2039


def test_another_link_brings_its_own_kind(tmp_path: Path) -> None:
    node = load(tmp_path, "nodes: 1\nnode: {like: dgx-h100, scale_up: PCIe 5}\n").node
    assert node.scale_up is not None
    assert (node.scale_up.kind, node.scale_up.gbps, node.scale_up.domain) == ("pcie", 63, 8)


def test_a_network_can_be_taken_away(tmp_path: Path) -> None:
    assert load(tmp_path, "nodes: 1\nnode: {like: dgx-h100, scale_up: null}\n").node.scale_up is None


def test_half_a_machine_joins_half_as_many(tmp_path: Path) -> None:
    cluster = load(tmp_path, "nodes: 2\nnode: {like: dgx-h100, count: 4}\n")
    assert cluster.domain == 4


def test_a_link_of_ones_own_needs_only_its_rate(tmp_path: Path) -> None:
    node = load(tmp_path, "nodes: 2\nnode: {like: dgx-h100, scale_out: {link: magic, gbps: 70}}\n").node
    assert node.scale_out is not None
    assert (node.scale_out.link, node.scale_out.gbps, node.scale_out.ports) == ("magic", 70, 8)
    assert node.scale_out.latency_us is None


def test_a_domain_larger_than_the_cluster_is_the_cluster(tmp_path: Path) -> None:
    assert load_cluster("gb200-nvl72:2").domain == 8
    assert load_cluster("gb200-nvl72:64").domain == 72
    assert load_cluster("titan:2").domain == 1


def test_nodes_that_one_network_joins_need_no_other(tmp_path: Path) -> None:
    assert load(tmp_path, "nodes: 18\nnode: {like: gb200-nvl72, scale_out: null}\n").devices == 72


@pytest.mark.parametrize(
    ("topology", "kind", "oversubscription"),
    [
        ("fat-tree", "fat-tree", 1),
        ("{kind: fat-tree, oversubscription: 2}", "fat-tree", 2),
        ("Llama 3 cluster", "fat-tree", 7),
        ("{like: Frontier, oversubscription: 1}", "dragonfly", 1),
    ],
)
def test_a_topology_is_a_name_or_a_mapping(tmp_path: Path, topology: str, kind: str, oversubscription: float) -> None:
    found = load(tmp_path, f"nodes: 64\nnode: dgx-h100\ntopology: {topology}\n").topology
    assert (found.kind, found.oversubscription) == (kind, oversubscription)


def test_storage_prices_and_reliability(tmp_path: Path) -> None:
    text = (
        "name: ours\nnodes: 2\nnode: dgx-h100\nstorage: {like: NVMe 4, read_gbps: 40}\n"
        "prices: {device_hour: 2.5, kwh: 0.2}\nreliability: {failures_per_1000_node_days: 6.5}\nnotes: {owner: me}\n"
    )
    cluster = load(tmp_path, text)
    assert cluster.name == "ours"
    assert (cluster.storage.name, cluster.storage.read_gbps, cluster.storage.node_read_gbps) == ("NVMe 4", 40, 6.5)
    assert (cluster.prices.device_hour, cluster.reliability.failures_per_1000_node_days) == (2.5, 6.5)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nodes: 2\nnode: dgx-h1000\n", "room.yaml:2: node: unknown node 'dgx-h1000'; the nearest are dgx-h100"),
        (
            "nodes: 1\nnode:\n  accelerator: H1O0 SXM\n  count: 8\n",
            "room.yaml:3: node.accelerator: unknown accelerator 'H1O0 SXM'; the nearest are NVIDIA H100 SXM",
        ),
        (
            "nodes: 2\nnode: {accelerator: H100, count: 8,\n scale_out: Infiniband ND}\n",
            "room.yaml:3: node.scale_out.link: unknown link 'Infiniband ND'; the nearest are InfiniBand NDR",
        ),
        ("nodes: 2\nnode: dgx-h100\ntopology: fat-tre\n", "room.yaml:3: topology: unknown topology 'fat-tre'"),
        ("nodes: 2\n", "room.yaml:1: node: missing, expected a node of the catalogue (dgx-h100) or a mapping"),
        ("node: dgx-h100\n", "room.yaml:1: nodes: missing, expected a whole number above 0"),
        ("nodes: 2\nnode: dgx-h100\nnods: 3\n", "room.yaml:3: nods: unknown key; did you mean nodes?"),
        ("nodes: 0\nnode: dgx-h100\n", "room.yaml:1: nodes: found 0, expected a whole number above 0"),
        (
            "nodes: 2\nnode: dgx-h100\ntopology: {oversubscription: 0.5}\n",
            "room.yaml:3: topology.oversubscription: found 0.5, expected a number of at least 1",
        ),
        (
            "nodes: 1\nnode:\n  like: dgx-h100\n  accelerator: {tflops: {bf61: 1}}\n",
            "room.yaml:4: node.accelerator.tflops.bf61: unknown key; did you mean bf16?",
        ),
        ("nodes: [\n", "room.yaml:2: not valid YAML"),
    ],
)
def test_a_mistake_is_told_with_line_key_and_what_was_expected(tmp_path: Path, text: str, told: str) -> None:
    assert told in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("accelerator: {memory_gbps: 300}", "node.scale_up.gbps: found 450, more than the device's own memory gives"),
        ("accelerator: {host_gbps: 4000}", "node.accelerator.host_gbps: found 4000, more than the device's own memory"),
        ("scale_out: {gbps: 5000}", "node.scale_out.gbps: found 5000, more than the device's own memory gives"),
        ("accelerator: {achieved_tflops: {bf16: 1500}}", "found 1500, expected at most the peak rate (tflops, 989)"),
        ("accelerator: {power_w: .inf}", "node.accelerator.power_w: found Infinity, expected a number above 0"),
    ],
)
def test_impossible_figures_are_refused(tmp_path: Path, change: str, told: str) -> None:
    said = refused(tmp_path, f"nodes: 1\nnode:\n  like: dgx-h100\n  {change}\n")
    assert told in said
    assert said.startswith("room.yaml:")


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    said = refused(tmp_path, "nodes: 0\nnode: {like: dgx-h100, count: 0}\ntopology: {kind: ring}\n")
    assert [line.split(":")[1] for line in said.splitlines()] == ["1", "2", "3"]


def test_a_file_that_is_not_there_is_told_with_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "room.yaml").write_text("nodes: 1\nnode: dgx-h100\n")
    with pytest.raises(RecipeError, match=r"there is no such file; did you mean room.yaml\?"):
        load_cluster(str(tmp_path / "rom.yaml"))


# files that programs write


@pytest.mark.parametrize("name", [*(one.name for one in list_entries("nodes")), "RTX 4090:4", "gb300:144", "h100:4"])
def test_a_saved_cluster_is_read_back_to_the_same(tmp_path: Path, name: str) -> None:
    cluster = load_cluster(name)
    save_cluster(cluster, tmp_path / "saved.yaml")
    assert load_cluster("saved.yaml", tmp_path) == cluster


def test_a_measured_cluster_is_read_back_to_the_same(tmp_path: Path) -> None:
    measured = Measurements(
        when="2026-11-21",
        key={"torch": "2.13"},
        products=[GemmTiming(precision="bf16", m=1, n=2, k=3, seconds=1e-6)],
        collectives=[
            CollectiveTiming(kind="all_reduce", backend="nccl", ranks=8, bytes=1024, seconds=1e-5, busbw_gbps=0.1)
        ],
        odd=["no: it is slow"],
    )
    usual = load_cluster("dgx-h100:2")
    assert usual.node.scale_up is not None
    node = usual.node.model_copy(
        update={
            "name": "host-7",
            "power_w": None,
            "scale_up": usual.node.scale_up.model_copy(update={"gbps": 361.0, "latency_us": None}),
        }
    )
    notes: dict[str, Any] = {"disks": [{"path": "/data", "free": None}]}
    cluster = usual.model_copy(update={"node": node, "measured": measured, "notes": notes})
    save_cluster(cluster, tmp_path / "probed.yaml")
    assert load_cluster("probed.yaml", tmp_path) == cluster


# the page


@pytest.mark.parametrize("block", re.findall(r"^```yml\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))
def test_the_files_on_the_page_are_clusters(tmp_path: Path, block: str) -> None:
    if "accelerators:" not in block:
        load(tmp_path, block)


def test_the_names_on_the_page_are_clusters() -> None:
    named = re.findall(r"^\| `([^`]+)` \| [\d,]+ (?:node|device)", PAGE.read_text(), re.MULTILINE)
    assert len(named) > 3
    for name in named:
        load_cluster(name)


def test_every_usual_node_can_be_named_by_its_accelerator() -> None:
    for node in list_entries("nodes"):
        if node.values.get("usual"):
            cluster = load_cluster(f"{node.values['accelerator']}:{node.values['count']}")
            assert cluster.node.name == node.name
