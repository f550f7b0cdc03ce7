"""The catalogue: every figure has a source, every name means one thing, and nothing in it is impossible."""

import re
from importlib.resources import files
from pathlib import Path
from typing import get_args

import pytest
from ruamel.yaml import YAML

from phalanx.cluster import catalog
from phalanx.cluster.catalog import (
    CatalogKind,
    find_entry,
    get_entry,
    list_entries,
    name_words,
)
from phalanx.errors import RecipeError

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "cluster-file.md"
NOT_FIGURES = {"vendor", "generation", "usual"}


@pytest.mark.parametrize("kind", get_args(CatalogKind))
def test_every_figure_has_a_source(kind: CatalogKind) -> None:
    file = YAML(typ="safe").load((files("phalanx.cluster") / "data" / f"{kind}.yaml").read_text("utf-8"))
    for name, values in file[kind].items():
        sources = {key for keys in values["sources"] for key in keys.split()}
        figures = set(values) - {"sources", "aliases", "also"}
        assert figures - NOT_FIGURES <= sources <= figures, name
        assert all(text.strip() for text in values["sources"].values()), name


@pytest.mark.parametrize("kind", get_args(CatalogKind))
def test_every_name_finds_its_own_entry(kind: CatalogKind) -> None:
    for entry in list_entries(kind):
        for alias in (entry.name, *entry.aliases):
            assert find_entry(kind, alias) is entry
            assert find_entry(kind, alias.upper().replace(" ", "_")) is entry
            assert name_words(alias), f"{alias}: nothing of it counts"


def test_no_node_can_be_meant_by_the_name_of_an_accelerator() -> None:
    for entry in list_entries("nodes"):
        for alias in (entry.name, *entry.aliases):
            assert find_entry("accelerators", alias) is None, alias


def test_an_accelerator_is_usual_in_one_node_at_most() -> None:
    usual = [
        find_entry("accelerators", node.values["accelerator"])
        for node in list_entries("nodes")
        if node.values.get("usual")
    ]
    assert len({entry.name for entry in usual if entry}) == len(usual)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("H100-80GB-SXM", "NVIDIA H100 SXM"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM"),
        ("h100 sxm5", "NVIDIA H100 SXM"),
        ("H100-96GB(500W)", "NVIDIA H100 SXM 96GB 500W"),
        ("NVIDIA H100 PCIe", "NVIDIA H100 PCIe"),
        ("A100", "NVIDIA A100 SXM 80GB"),
        ("A100-80GB", "NVIDIA A100 SXM 80GB"),
        ("A100-40GB", "NVIDIA A100 SXM 40GB"),
        ("NVIDIA A100-PCIE-40GB", "NVIDIA A100 PCIe 40GB"),
        ("NVIDIA A100 80GB PCIe", "NVIDIA A100 PCIe 80GB"),
        ("V100", "NVIDIA V100 SXM2 32GB"),
        ("V100-16GB", "NVIDIA V100 SXM2 16GB"),
        ("V100(DGX-2H)", "NVIDIA V100 SXM3 32GB"),
        ("Tesla_V100-PCIE-32GB", "NVIDIA V100 PCIe 32GB"),
        ("Tesla K20Xm", "NVIDIA K20X"),
        ("K20/K20X", "NVIDIA K20X"),
        ("TitanX(Maxwell)", "NVIDIA TITAN X (Maxwell)"),
        ("GeForce RTX 4090", "NVIDIA RTX 4090"),
        ("RTX4090", "NVIDIA RTX 4090"),
        ("NVIDIA H100 NVL", "NVIDIA H100 NVL"),
        ("NVIDIA H200", "NVIDIA H200 SXM"),
        ("NVIDIA B200", "NVIDIA B200 SXM"),
        ("AMD Instinct MI300X", "AMD MI300X"),
        ("NVIDIA B300 SXM6 AC", "NVIDIA B300 SXM"),
        ("NVIDIA Blackwell Ultra GPU (GB300)", "NVIDIA GB300"),
        ("NVIDIA GH200 480GB", "NVIDIA GH200 96GB"),
        ("AMD_Instinct_MI250", "AMD MI250, one of its two dies"),
        ("AMD Instinct MI250X", "AMD MI250X, one of its two dies"),
        ("MI250X OAM", "AMD MI250X OAM, both dies"),
        ("TPU-Ironwood(v7x)", "Google TPU v7x"),
        ("TPUv6e(Trillium)", "Google TPU v6e"),
        ("TPUv5p", "Google TPU v5p"),
        ("TPU v5e", "Google TPU v5e"),
        ("TPUv3 chip", "Google TPU v3"),
        ("Trainium2", "AWS Trainium2"),
        ("Intel Gaudi 2", "Intel Gaudi2"),
        ("Intel(R) Xeon(R) Platinum 8480+ CPU @ 2.00GHz", "Intel Xeon Platinum 8480+"),
        ("AMD EPYC 9654 96-Core Processor", "AMD EPYC 9654"),
    ],
)
def test_people_and_drivers_names_are_understood(name: str, meant: str) -> None:
    assert catalog.find_accelerator(name).name == meant


@pytest.mark.parametrize(
    "name",
    [
        *("H100 40GB", "H100 141GB", "A100 PCIe 96GB", "V100 64GB", "H200 80GB", "B200 288GB", "A100 SXM PCIe"),
        *("NVIDIA H100 CNX", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A100-SXM-64GB", "NVIDIA L40", ""),
        *("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3090 Ti", "AMD Instinct MI300A"),
    ],
)
def test_other_memory_or_another_form_is_another_device(name: str) -> None:
    with pytest.raises(RecipeError, match="unknown accelerator"):
        catalog.find_accelerator(name)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(RecipeError, match=r"unknown accelerator 'H1O0 SXM'; the nearest are NVIDIA H100 SXM"):
        catalog.find_accelerator("H1O0 SXM")
    with pytest.raises(RecipeError, match=r"unknown node 'dgx-h1000'; the nearest are dgx-h100, dgx-h200"):
        catalog.find_node("dgx-h1000")
    with pytest.raises(RecipeError, match=r"unknown link 'NVLinq 4'; the nearest are NVLink 4"):
        get_entry("links", "NVLinq 4")


def test_fitted_curves_and_best_measured_rates_are_there() -> None:
    curve = catalog.find_accelerator("A100").curves["bf16"]
    assert (curve.efficiency, curve.bandwidth, curve.overhead_us, curve.sharpness) == (0.740, 0.832, 5.26, 1.41)
    assert {one.name for one in list_entries("accelerators") if "curves" in one.values} == {
        "NVIDIA A100 SXM 80GB",
        "NVIDIA A40",
        "NVIDIA H100 SXM",
    }
    assert catalog.find_accelerator("B200").achieved_tflops == {"bf16": 1745, "fp8": 3432.5}


def test_a_node_is_filled_in_from_what_it_names() -> None:
    node = catalog.find_node("DGX H100")
    assert (node.accelerator.name, node.count, node.cores) == ("NVIDIA H100 SXM", 8, 112)
    assert node.scale_up is not None
    assert (node.scale_up.link, node.scale_up.gbps, node.scale_up.domain, node.scale_up.kind) == (
        "NVLink 4",
        450,
        8,
        "switch",
    )
    assert node.scale_out is not None
    assert (node.scale_out.link, node.scale_out.gbps, node.scale_out.ports) == ("InfiniBand NDR", 50, 8)


def test_a_rack_joins_more_devices_than_a_node_has() -> None:
    node = catalog.find_node("GB200 NVL72")
    assert node.scale_up is not None
    assert (node.count, node.scale_up.domain) == (4, 72)


@pytest.mark.parametrize(
    ("name", "gbps"),
    [
        ("PCIe 4.0 x16", 31),
        ("PCIe gen5", 63),
        ("NVLink4", 450),
        ("NVLink 5 (Blackwell)", 900),
        ("NDR", 50),
        ("InfiniBand EDR 4x", 12.5),
        ("400GbE", 50),
        ("RoCE 400 GbE", 50),
        ("HPE Slingshot-11", 25),
        ("EFAv2", 12.5),
        ("ICI v5p", 600),
    ],
)
def test_a_link_has_many_names(name: str, gbps: float) -> None:
    assert get_entry("links", name).values["gbps"] == gbps


def test_storage_and_topologies_have_names() -> None:
    assert get_entry("storage", "local NVMe").values["node_read_gbps"] == 6.5
    assert get_entry("topologies", "rail-optimised").values["kind"] == "rail"
    assert get_entry("topologies", "Llama 3").values["oversubscription"] == 7


def row(kind: CatalogKind, name: str) -> str:
    """The row of an entry on the page."""

    def shown(value: float | None) -> str:
        return "" if value is None else f"{value:,g}"

    if kind == "accelerators":
        device = catalog.find_accelerator(name)
        rates = "; ".join(
            f"{key} {device.tflops[key]:,g}" for key in ("fp32", "fp16", "bf16", "fp8") if key in device.tflops
        )
        return (
            f"| {name} | {rates} | {shown(device.memory_gib)} | {shown(device.memory_gbps)} | {shown(device.power_w)} |"
        )
    if kind == "nodes":
        node = catalog.find_node(name)
        near = f"{node.scale_up.link}, {node.scale_up.domain} devices" if node.scale_up else ""
        out = f"{node.scale_out.ports} x {node.scale_out.link}" if node.scale_out else ""
        return f"| `{name}` | {node.count} x {node.accelerator.name} | {near} | {out} |"
    link = get_entry("links", name).values
    return f"| {name} | {shown(link['gbps'])} | {shown(link.get('latency_us'))} |"


@pytest.mark.parametrize("kind", ["accelerators", "nodes", "links"])
def test_the_page_lists_what_there_is(kind: CatalogKind) -> None:
    page = PAGE.read_text()
    missing = [row(kind, one.name) for one in list_entries(kind) if row(kind, one.name) not in page]
    assert not missing, "docs/reference/cluster-file.md lacks:\n" + "\n".join(missing)


@pytest.mark.parametrize("kind", ["topologies", "storage"])
def test_the_page_names_topologies_and_storage(kind: CatalogKind) -> None:
    listed = re.findall(r"`([^`\n]+)`", PAGE.read_text().partition("\nTopologies: ")[2])
    assert {one.name for one in list_entries(kind)} <= set(listed)
