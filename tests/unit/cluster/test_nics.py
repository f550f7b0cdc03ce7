"""Network cards, on machines that are made of text files."""

from pathlib import Path

import pytest

from phalanx.cluster.device_links import Nic, choose_scale_out, discover_nics


def tree(root: Path, files: dict[str, str]) -> Path:
    """A file system with these files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


ETHERNET = {
    "sys/class/net/eth0/operstate": "up",
    "sys/class/net/eth0/speed": "100000",
    "sys/class/net/eth0/device/numa_node": "1",
}
INFINIBAND = {
    "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
    "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
    "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand",
}


def test_an_ethernet_card_has_a_speed(tmp_path: Path) -> None:
    assert discover_nics(tree(tmp_path, ETHERNET)) == (Nic("eth0", "ethernet", True, 12.5),)


def test_loopback_is_no_card_and_a_bridge_no_physical_one(tmp_path: Path) -> None:
    root = tree(tmp_path, {"sys/class/net/lo/operstate": "unknown", "sys/class/net/br0/operstate": "up"})
    assert discover_nics(root) == (Nic("br0", "ethernet", True, is_physical=False),)


def test_infiniband_comes_first_with_its_rate(tmp_path: Path) -> None:
    root = tree(tmp_path, {**ETHERNET, **INFINIBAND})
    assert [card.name for card in discover_nics(root)] == ["mlx5_0:1", "eth0"]
    assert discover_nics(root)[0] == Nic("mlx5_0:1", "infiniband", True, 50.0, rate_text="4X NDR")


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("infiniband/mlx5_0/ports/1/state", "1: DOWN", "is_up", False),
        ("infiniband/mlx5_0/ports/1/link_layer", "Ethernet", "link_kind", "roce"),
        *(("net/eth0/speed", text, "gbps", None) for text in ("-1", "", "unknown")),
    ],
)
def test_what_a_file_says_of_a_port_is_read(tmp_path: Path, name: str, text: str, field: str, value: object) -> None:
    files = INFINIBAND if name.startswith("infiniband") else ETHERNET
    assert getattr(discover_nics(tree(tmp_path, {**files, f"sys/class/{name}": text}))[0], field) == value


def test_a_machine_without_network_has_no_cards(tmp_path: Path) -> None:
    assert discover_nics(tmp_path) == ()


def test_training_uses_all_active_ports_for_rdma(tmp_path: Path) -> None:
    found = (
        Nic("mlx5_0:1", "infiniband", True, 50.0, rate_text="4X NDR"),
        Nic("mlx5_1:1", "infiniband", True, 50.0, rate_text="4X NDR"),
        Nic("mlx5_2:1", "infiniband", False, 50.0),
        Nic("mlx5_3:1", "infiniband", True, 12.5),
        Nic("eth0", "ethernet", True, 100.0),
    )
    network = choose_scale_out(found)
    assert network is not None
    assert (network.link, network.gbps, network.ports) == ("InfiniBand 4X NDR", 50.0, 2)


def test_else_it_uses_the_fastest_ethernet_port() -> None:
    network = choose_scale_out((Nic("eth0", "ethernet", True, 1.25), Nic("eth1", "ethernet", True, 12.5)))
    assert network is not None
    assert (network.link, network.gbps, network.ports) == ("Ethernet 100 Gbit/s", 12.5, 1)


def test_a_speed_that_is_not_known_makes_no_network() -> None:
    assert choose_scale_out((Nic("eth0", "ethernet", True),)) is None
