"""Convert a machine and its measurements to a cluster of one node, with data-sheet values from the catalogue where it
has the device."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.cluster.calibration.anomalies import best_gemm_tflops, measured_memory_bandwidth
from phalanx.cluster.catalog import find_accelerator
from phalanx.cluster.catalog_entries import find_entry
from phalanx.cluster.data_sheet import find_data_sheet
from phalanx.cluster.discovery import Machine
from phalanx.cluster.disks import Disk, Mount, discover_disks, find_mount
from phalanx.cluster.gpu_topology import GpuLinks, choose_scale_up, discover_gpu_links
from phalanx.cluster.nics import Nic, choose_scale_out, discover_nics
from phalanx.cluster.spec import AcceleratorSpec, Cluster, Measurements, NodeSpec, StorageSpec


@dataclass(frozen=True)
class DiscoveredHardware:
    """Network cards, disks and GPU links that were discovered, not measured."""

    nics: tuple[Nic, ...]
    disks: tuple[Disk, ...]
    gpu_links: tuple[GpuLinks, ...]
    mount: Mount | None
    """Mount of the scratch directory."""

    def notes(self) -> dict[str, Any]:
        """Return plain values, without unknown ones."""
        links = [_drop_unknown({**asdict(each), "host_gbps": each.host_gbps}) for each in self.gpu_links]
        found = {
            "cards": [_drop_unknown(asdict(each)) for each in self.nics],
            "disks": [_drop_unknown(asdict(each)) for each in self.disks],
            "gpu_links": links,
            "folder": _drop_unknown({**asdict(self.mount), "disk": None}) if self.mount else None,
        }
        return {name: value for name, value in found.items() if value}


def discover_hardware(machine: Machine, scratch_dir: Path, root: Path = Path("/")) -> DiscoveredHardware:
    """Discover network cards, disks and, on a machine with GPUs, their links."""
    links = discover_gpu_links(root) if machine.num_gpus else ()
    return DiscoveredHardware(discover_nics(root), discover_disks(root), links, find_mount(scratch_dir, root))


def data_sheet_of(machine: Machine) -> AcceleratorSpec | None:
    """Return the data sheet of the device: from the catalogue, or for a CPU from cores, clock and instruction set. None
    if unknown."""
    if machine.num_gpus:
        return find_accelerator(machine.device_name) if find_entry("accelerators", machine.device_name) else None
    sheet = find_data_sheet(machine)
    if sheet is None:
        return None
    rates: Any = sheet.tflops
    return AcceleratorSpec(
        name=machine.device_name, vendor=machine.cpu.vendor, tflops=rates, memory_gib=_memory_gib(machine)
    )


def describe_accelerator(machine: Machine, measurements: Measurements) -> AcceleratorSpec:
    """Add measured rates to the data sheet. The peak of a CPU is raised to its measured rate: boost clocks exceed the
    nominal clock."""
    best: Any = {name: round(rate, 4) for name, rate in best_gemm_tflops(measurements.products).items() if rate >= 1e-4}
    accelerator = data_sheet_of(machine)
    if accelerator is None:
        accelerator = AcceleratorSpec(name=machine.device_name, tflops=best, memory_gib=_memory_gib(machine))
    rates = dict(accelerator.tflops)
    if machine.device == "cpu":
        accelerator = accelerator.model_copy(update={"generation": "cpu"})
        rates = {name: max(rate, best.get(name, 0.0)) for name, rate in {**best, **rates}.items()}
    update: dict[str, Any] = {"tflops": rates, "memory_gib": _memory_gib(machine), "achieved_tflops": best}
    if machine.device == "cpu" and measurements.launch_us is not None:  # a GPU's kernels do not wait for each launch
        update["kernel_us"] = measurements.launch_us
    if accelerator.memory_gbps is None and (rate := measured_memory_bandwidth(measurements.operations)) is not None:
        update["memory_gbps"] = round(rate, 2)
    return AcceleratorSpec.model_validate({**accelerator.model_dump(), **update})


def describe_cluster(machine: Machine, hardware: DiscoveredHardware, measurements: Measurements) -> Cluster:
    """Return a cluster of one node."""
    node = NodeSpec(
        name=_squeeze(machine.device_name),
        accelerator=describe_accelerator(machine, measurements),
        count=machine.device_count,
        scale_up=choose_scale_up(hardware.gpu_links),
        scale_out=choose_scale_out(hardware.nics),
        host_memory_gib=round(machine.memory_bytes / 2**30, 2),
        cores=machine.physical_cores,
    )
    storage = measurements.storage or StorageSpec()
    count_text = f"{machine.device_count} x " if machine.device_count > 1 else ""
    name = f"{count_text}{_squeeze(machine.device_name)}"
    return Cluster(name=name, nodes=1, node=node, storage=storage, measured=measurements, notes=hardware.notes())


def _memory_gib(machine: Machine) -> float:
    return round(machine.device_memory_bytes / 2**30, 2)


def _squeeze(name: str) -> str:
    return " ".join(name.split())


def _drop_unknown(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None and value != ""}
