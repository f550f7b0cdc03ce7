"""From a machine and what was measured there to the cluster that it makes: one node, figures of the catalogue where it
knows the device, measured ones beside them."""

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
    """What was found in the machine beside its processors: nothing of it measured."""

    nics: tuple[Nic, ...]
    disks: tuple[Disk, ...]
    gpu_links: tuple[GpuLinks, ...]
    mount: Mount | None
    """What the folder for measuring lies on."""

    def notes(self) -> dict[str, Any]:
        """As plain values; what is not known left out."""
        links = [_drop_unknown({**asdict(each), "host_gbps": each.host_gbps}) for each in self.gpu_links]
        found = {
            "cards": [_drop_unknown(asdict(each)) for each in self.nics],
            "disks": [_drop_unknown(asdict(each)) for each in self.disks],
            "gpu_links": links,
            "folder": _drop_unknown({**asdict(self.mount), "disk": None}) if self.mount else None,
        }
        return {name: value for name, value in found.items() if value}


def discover_hardware(machine: Machine, scratch_dir: Path, root: Path = Path("/")) -> DiscoveredHardware:
    """Discover the parts; a machine that trains on its CPU has no GPU links worth telling."""
    links = discover_gpu_links(root) if machine.num_gpus else ()
    return DiscoveredHardware(discover_nics(root), discover_disks(root), links, find_mount(scratch_dir, root))


def data_sheet_of(machine: Machine) -> AcceleratorSpec | None:
    """The device on paper: of the catalogue, or a CPU's peak rates by cores, clock and instruction set; None where
    neither knows it."""
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
    """The device with measured rates. Of a CPU the peak is raised to what it does: clocks above the nominal one."""
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
    """The machine as a cluster of one node."""
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
