"""From a machine and what was measured there to the cluster that it makes: one node, figures of the catalogue where it
knows the device, measured ones beside them."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.cluster.cards import Card, cards, scale_out
from phalanx.cluster.catalogue import accelerator
from phalanx.cluster.datasheet import peak
from phalanx.cluster.description import Accelerator, Cluster, Measured, Node, Storage
from phalanx.cluster.discover import Machine
from phalanx.cluster.disks import Disk, Mount, disks, mount_of
from phalanx.cluster.entries import find
from phalanx.cluster.gpu_links import GpuLinks, gpu_links, scale_up
from phalanx.cluster.probe.odd import best_rates, memory_rate


@dataclass(frozen=True)
class Parts:
    """What was found in the machine beside its processors: nothing of it measured."""

    cards: tuple[Card, ...]
    disks: tuple[Disk, ...]
    gpu_links: tuple[GpuLinks, ...]
    mount: Mount | None
    """What the folder for measuring lies on."""

    def notes(self) -> dict[str, Any]:
        """As plain values; what is not known left out."""
        links = [_known({**asdict(each), "host_gbps": each.host_gbps}) for each in self.gpu_links]
        found = {
            "cards": [_known(asdict(each)) for each in self.cards],
            "disks": [_known(asdict(each)) for each in self.disks],
            "gpu_links": links,
            "folder": _known({**asdict(self.mount), "disk": None}) if self.mount else None,
        }
        return {name: value for name, value in found.items() if value}


def look(machine: Machine, folder: Path, root: Path = Path("/")) -> Parts:
    """Discover the parts; a machine that trains on its CPU has no GPU links worth telling."""
    links = gpu_links(root) if machine.gpus else ()
    return Parts(cards(root), disks(root), links, mount_of(folder, root))


def data_sheet(machine: Machine) -> Accelerator | None:
    """The device on paper: of the catalogue, or a CPU's peak rates by cores, clock and instruction set; None where
    neither knows it."""
    if machine.gpus:
        return accelerator(machine.name) if find("accelerators", machine.name) else None
    sheet = peak(machine)
    if sheet is None:
        return None
    rates: Any = sheet.tflops
    return Accelerator(name=machine.name, vendor=machine.cpu.vendor, tflops=rates, memory_gib=_gib(machine))


def device_of(machine: Machine, measured: Measured) -> Accelerator:
    """The device with measured rates. Of a CPU the peak is raised to what it does: clocks above the nominal one."""
    best: Any = {name: round(rate, 4) for name, rate in best_rates(measured.products).items() if rate >= 1e-4}
    sheet = data_sheet(machine)
    if sheet is None:
        sheet = Accelerator(name=machine.name, tflops=best, memory_gib=_gib(machine))
    rates = dict(sheet.tflops)
    if machine.device == "cpu":
        sheet = sheet.model_copy(update={"generation": "cpu"})
        rates = {name: max(rate, best.get(name, 0.0)) for name, rate in {**best, **rates}.items()}
    update: dict[str, Any] = {"tflops": rates, "memory_gib": _gib(machine), "achieved_tflops": best}
    if machine.device == "cpu" and measured.launch_us is not None:  # a GPU's kernels do not wait for each launch
        update["kernel_us"] = measured.launch_us
    if sheet.memory_gbps is None and (rate := memory_rate(measured.operations)) is not None:
        update["memory_gbps"] = round(rate, 2)
    return Accelerator.model_validate({**sheet.model_dump(), **update})


def describe(machine: Machine, parts: Parts, measured: Measured) -> Cluster:
    """The machine as a cluster of one node."""
    node = Node(
        name=_short(machine.name),
        accelerator=device_of(machine, measured),
        count=machine.count,
        scale_up=scale_up(parts.gpu_links),
        scale_out=scale_out(parts.cards),
        host_memory_gib=round(machine.memory_bytes / 2**30, 2),
        cores=machine.cores,
    )
    storage = measured.storage or Storage()
    many = f"{machine.count} x " if machine.count > 1 else ""
    name = f"{many}{_short(machine.name)}"
    return Cluster(name=name, nodes=1, node=node, storage=storage, measured=measured, notes=parts.notes())


def _gib(machine: Machine) -> float:
    return round(machine.device_memory_bytes / 2**30, 2)


def _short(name: str) -> str:
    return " ".join(name.split())


def _known(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None and value != ""}
