"""What `phalanx calibrate` prints: measurements next to the data sheet, with units."""

from collections.abc import Iterable

from phalanx.cluster import Cluster, Machine
from phalanx.cluster.calibration.anomalies import best_gemm_tflops, measured_memory_bandwidth
from phalanx.cluster.calibration.to_cluster import data_sheet_of
from phalanx.cluster.spec import Measurements, OpTiming
from phalanx.formatting import format_bytes, format_duration, format_plural, format_significant
from phalanx.text_table import Column, format_table

ROW_COLUMNS = (Column(min_width=32), Column(min_width=16), Column(min_width=16), Column(is_number=True, min_width=5))
"""Each row is a table of its own: some values are longer than the columns after them."""
SHOWN_OPERATIONS = ("add", "gelu", "native_layer_norm", "_softmax", "_to_copy", "_fused_adamw_")


def format_lines(cluster: Cluster, machine: Machine) -> list[str]:
    """Format all measurements and warnings."""
    measured = cluster.measured
    assert measured is not None, "this page shows what was measured"
    return [
        *_format_header(cluster, machine, measured),
        "",
        *format_table(ROW_COLUMNS, [("", "measured", "data sheet", "share")]),
        *_format_gemms(machine, measured),
        *_format_memory(cluster, machine, measured),
        *_format_operations(measured),
        *_format_collectives(cluster, measured),
        *_format_storage(cluster, measured),
        "",
        *_format_hardware(cluster),
        *_format_warnings(measured),
    ]


def format_row(label: str, value: str, data_sheet_value: str = "", fraction: float | None = None) -> str:
    """One line of the table."""
    share = "" if fraction is None else f"{fraction:.0%}"
    return "\n".join(format_table(ROW_COLUMNS, [(label, value, data_sheet_value, share)]))


def _format_header(cluster: Cluster, machine: Machine, measured: Measurements) -> list[str]:
    memory = f"{cluster.node.accelerator.memory_gib:.3g} GiB"
    what = (
        format_plural(machine.physical_cores, "core")
        if machine.device == "cpu"
        else format_plural(machine.device_count, "GPU")
    )
    threads = f", {format_plural(measured.threads, 'thread')}" if measured.threads else ""
    versions = ", ".join(f"{name} {measured.key[name]}" for name in ("driver", "torch", "nccl") if name in measured.key)
    return [f"{machine.device_name}, {what}, {memory}{threads}; {versions}"]


def _format_gemms(machine: Machine, measured: Measurements) -> list[str]:
    sheet = data_sheet_of(machine)
    found = []
    for precision, rate in best_gemm_tflops(measured.products).items():
        sheet_tflops = sheet.tflops.get(precision) if sheet else None  # type: ignore[call-overload]
        sheet_text = "" if sheet_tflops is None else f"{format_significant(sheet_tflops)} TFLOP/s"
        label = f"matrix products, best, {precision}"
        found.append(
            format_row(
                label,
                f"{format_significant(rate)} TFLOP/s",
                sheet_text,
                rate / sheet_tflops if sheet_tflops else None,
            )
        )
    for count in sorted({each.processes for each in measured.products} - {1}):
        together = [each.model_copy(update={"processes": 1}) for each in measured.products if each.processes == count]
        rates = ", ".join(
            f"{name} {format_significant(count * rate)}" for name, rate in best_gemm_tflops(together).items()
        )
        found.append(format_row(f"  {count} processes at once, sum", f"{rates} TFLOP/s"))
    return found


def _format_memory(cluster: Cluster, machine: Machine, measured: Measurements) -> list[str]:
    rate = measured_memory_bandwidth(measured.operations)
    if rate is None:
        return []
    sheet = data_sheet_of(machine)
    sheet_gbps = sheet.memory_gbps if sheet else None
    fraction = rate / sheet_gbps if sheet_gbps else None
    return [
        format_row(
            "memory",
            f"{format_bytes(1e9 * rate)}/s",
            f"{format_bytes(1e9 * sheet_gbps)}/s" if sheet_gbps else "",
            fraction,
        )
    ]


def _format_operations(measured: Measurements) -> list[str]:
    found = []
    if measured.launch_us is not None:
        found.append(format_row("launch of an operation", format_duration(measured.launch_us / 1e6)))
    for kind, label in (("autograd_op", "  with autograd, both ways"), ("eager_op", "  in a model, on average")):
        found += [format_row(label, format_duration(each.seconds)) for each in _select_operations(measured, kind)]
    attention = _select_operations(measured, "attention", "attention_backward")
    for precision in dict.fromkeys(each.precision for each in attention):
        best = {each.kind: max(_compute_tflops(attention, each.kind, precision)) for each in attention}
        forward, backward = (format_significant(best.get(kind, 0.0)) for kind in ("attention", "attention_backward"))
        found.append(format_row(f"attention, best, {precision}", f"{forward} TFLOP/s forward, {backward} backward"))
    for kind in SHOWN_OPERATIONS:
        largest = max(
            _select_operations(measured, kind), key=lambda each: (each.precision == "fp32", each.bytes), default=None
        )
        if largest is not None:
            label = f"{kind.strip('_')}, {largest.precision}, {format_bytes(largest.bytes)}"
            found.append(format_row(label, f"{format_bytes(largest.bytes / largest.seconds)}/s"))
    for each in _select_operations(measured, "fresh_memory"):
        found.append(format_row("memory used for the first time", f"{format_bytes(each.bytes / each.seconds)}/s"))
    for each in _select_operations(measured, "to_device", "from_device"):
        found.append(format_row(each.kind.replace("_", " "), f"{format_bytes(each.bytes / each.seconds)}/s"))
    return found


def _format_collectives(cluster: Cluster, measured: Measurements) -> list[str]:
    if not measured.collectives:
        return []
    link = cluster.node.scale_up
    found = []
    for ranks in sorted({each.ranks for each in measured.collectives}):
        same_size = [each for each in measured.collectives if each.ranks == ranks]
        found.append(f"collectives of {ranks} processes, {same_size[0].backend}")
        for kind in dict.fromkeys(each.kind for each in same_size):
            ordered = sorted((each for each in same_size if each.kind == kind), key=lambda each: each.bytes)
            small, large = ordered[0], ordered[-1]
            value = (
                f"{format_duration(small.seconds)} for {format_bytes(small.bytes)}, bus "
                f"{format_bytes(1e9 * large.busbw_gbps)}/s"
            )
            link_text = f" of {link.gbps:g} ({link.link})" if link else ""
            found.append(format_row(f"  {kind}", f"{value}{link_text} at {format_bytes(large.bytes)}"))
    if measured.overlap is not None:
        text = f"computing {measured.overlap.compute:.2f} x, communicating {measured.overlap.communication:.2f} x"
        found.append(format_row("  both at once, against alone", text))
    return found


def _format_storage(cluster: Cluster, measured: Measurements) -> list[str]:
    found, folder = [], cluster.notes.get("folder", {})
    how = cluster.notes.get("measured_how", {})
    if measured.storage is not None:
        where = f"disk ({folder['file_system']})" if folder else "disk"
        write, read = measured.storage.node_write_gbps, measured.storage.node_read_gbps
        if write:
            found.append(format_row(f"{where}, write and fsync", f"{format_bytes(1e9 * write)}/s"))
        if read:
            found.append(format_row(f"{where}, read", f"{format_bytes(1e9 * read)}/s", str(how.get("read", ""))))
    if measured.checkpoint_gbps:
        found.append(format_row("checkpoint", f"{format_bytes(1e9 * measured.checkpoint_gbps)}/s"))
    return found


def _format_hardware(cluster: Cluster) -> list[str]:
    found = []
    for nic in cluster.notes.get("cards", []):
        if nic["is_up"] and nic["is_physical"]:
            speed = f"{format_bytes(1e9 * nic['gbps'])}/s on paper" if "gbps" in nic else "speed unknown to its driver"
            found.append(f"network   {nic['name']}, {nic['link_kind']}, {speed}")
    for disk in cluster.notes.get("disks", []):
        model = f", {disk['model']}" if "model" in disk else ""
        found.append(f"disk      {disk['name']}, {format_bytes(disk['size_bytes'])}{model}")
    for gpu in cluster.notes.get("gpu_links", []):
        links = f", {gpu['nvlinks']} NVLinks" if gpu.get("nvlinks") else ""
        found.append(f"GPU       {gpu['pci_address']}, PCIe x{gpu.get('lanes', '?')}{links}")
    return found


def _format_warnings(measured: Measurements) -> list[str]:
    drift = f"drift     {measured.drift:.1%}: slowest against fastest of the repeated reference products"
    if not measured.odd:
        return [drift, "no warnings"]
    return [drift, "", "warnings:", *(f"  - {text}" for text in measured.odd)]


def _select_operations(measured: Measurements, *kinds: str) -> list[OpTiming]:
    return [each for each in measured.operations if each.kind in kinds and each.processes == 1]


def _compute_tflops(operations: Iterable[OpTiming], kind: str, precision: str) -> list[float]:
    """TFLOP/s of those of a kind and precision."""
    return [each.flops / each.seconds / 1e12 for each in operations if (each.kind, each.precision) == (kind, precision)]
