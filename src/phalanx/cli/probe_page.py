"""The page that `phalanx calibrate` prints: a cluster's measurements beside the data sheet, with units. Pure."""

from collections.abc import Iterable

from phalanx.cluster import Cluster, Machine
from phalanx.cluster.description import Measured, Timed
from phalanx.cluster.probe.describe import data_sheet
from phalanx.cluster.probe.odd import best_rates, memory_rate
from phalanx.observe.units import duration, significant, size, times

LABEL, VALUE = 34, 18
SHOWN_OPERATIONS = ("add", "gelu", "native_layer_norm", "_softmax", "_to_copy", "_fused_adamw_")


def lines(cluster: Cluster, machine: Machine) -> list[str]:
    """All of it."""
    measured = cluster.measured
    assert measured is not None, "this page shows what was measured"
    return [
        *_head(cluster, machine, measured),
        "",
        row("", "measured", f"{'data sheet':<{VALUE}}share"),
        *_products(machine, measured),
        *_memory(cluster, machine, measured),
        *_operations(measured),
        *_collectives(cluster, measured),
        *_storage(cluster, measured),
        "",
        *_parts(cluster),
        *_odd(measured),
    ]


def row(label: str, value: str, sheet: str = "", share: float | None = None) -> str:
    """One line of the table."""
    told = f"{sheet:<{VALUE}}" + ("" if share is None else f"{share:5.0%}")
    return f"{label:<{LABEL}}{value:<{VALUE}}{told}".rstrip()


def _head(cluster: Cluster, machine: Machine, measured: Measured) -> list[str]:
    memory = f"{cluster.node.accelerator.memory_gib:.3g} GiB"
    what = times(machine.cores, "core") if machine.device == "cpu" else times(machine.count, "GPU")
    threads = f", {times(measured.threads, 'thread')}" if measured.threads else ""
    versions = ", ".join(f"{name} {measured.key[name]}" for name in ("driver", "torch", "nccl") if name in measured.key)
    return [f"{machine.name}, {what}, {memory}{threads}; {versions}"]


def _products(machine: Machine, measured: Measured) -> list[str]:
    sheet = data_sheet(machine)
    found = []
    for precision, rate in best_rates(measured.products).items():
        paper = sheet.tflops.get(precision) if sheet else None  # type: ignore[call-overload]
        beside = "" if paper is None else f"{significant(paper)} TFLOP/s"
        label = f"matrix products, best, {precision}"
        found.append(row(label, f"{significant(rate)} TFLOP/s", beside, rate / paper if paper else None))
    for count in sorted({each.processes for each in measured.products} - {1}):
        together = [each.model_copy(update={"processes": 1}) for each in measured.products if each.processes == count]
        rates = ", ".join(f"{name} {significant(count * rate)}" for name, rate in best_rates(together).items())
        found.append(row(f"  {count} processes at once, sum", f"{rates} TFLOP/s"))
    return found


def _memory(cluster: Cluster, machine: Machine, measured: Measured) -> list[str]:
    rate = memory_rate(measured.operations)
    if rate is None:
        return []
    sheet = data_sheet(machine)
    paper = sheet.memory_gbps if sheet else None
    share = rate / paper if paper else None
    return [row("memory", f"{significant(rate)} GB/s", f"{significant(paper)} GB/s" if paper else "", share)]


def _operations(measured: Measured) -> list[str]:
    found = []
    if measured.launch_us is not None:
        found.append(row("launch of an operation", duration(measured.launch_us / 1e6)))
    for kind, label in (("autograd_op", "  with autograd, both ways"), ("eager_op", "  in a model, on average")):
        found += [row(label, duration(each.seconds)) for each in _of(measured, kind)]
    attention = _of(measured, "attention", "attention_backward")
    for precision in dict.fromkeys(each.precision for each in attention):
        best = {each.kind: max(_rates(attention, each.kind, precision)) for each in attention}
        forward, backward = (significant(best.get(kind, 0.0)) for kind in ("attention", "attention_backward"))
        found.append(row(f"attention, best, {precision}", f"{forward} TFLOP/s forward, {backward} backward"))
    for kind in SHOWN_OPERATIONS:
        largest = max(_of(measured, kind), key=lambda each: (each.precision == "fp32", each.bytes), default=None)
        if largest is not None:
            rate = largest.bytes / largest.seconds / 1e9
            label = f"{kind.strip('_')}, {largest.precision}, {size(largest.bytes)}"
            found.append(row(label, f"{significant(rate)} GB/s"))
    for each in _of(measured, "fresh_memory"):
        found.append(row("memory used for the first time", f"{significant(each.bytes / each.seconds / 1e9)} GB/s"))
    for each in _of(measured, "to_device", "from_device"):
        found.append(row(each.kind.replace("_", " "), f"{significant(each.bytes / each.seconds / 1e9)} GB/s"))
    return found


def _collectives(cluster: Cluster, measured: Measured) -> list[str]:
    if not measured.collectives:
        return []
    link = cluster.node.scale_up
    found = []
    for ranks in sorted({each.ranks for each in measured.collectives}):
        here = [each for each in measured.collectives if each.ranks == ranks]
        found.append(f"collectives of {ranks} processes, {here[0].backend}")
        for kind in dict.fromkeys(each.kind for each in here):
            ordered = sorted((each for each in here if each.kind == kind), key=lambda each: each.bytes)
            small, large = ordered[0], ordered[-1]
            value = f"{duration(small.seconds)} for {size(small.bytes)}, bus {significant(large.busbw_gbps)} GB/s"
            beside = f" of {link.gbps:g} ({link.link})" if link else ""
            found.append(f"{f'  {kind}':<{LABEL}}{value}{beside} at {size(large.bytes)}")
    if measured.overlap is not None:
        text = f"computing {measured.overlap.compute:.2f} x, communicating {measured.overlap.communication:.2f} x"
        found.append(f"{'  both at once, against alone':<{LABEL}}{text}")
    return found


def _storage(cluster: Cluster, measured: Measured) -> list[str]:
    found, folder = [], cluster.notes.get("folder", {})
    how = cluster.notes.get("measured_how", {})
    if measured.storage is not None:
        where = f"disk ({folder['kind']})" if folder else "disk"
        write, read = measured.storage.node_write_gbps, measured.storage.node_read_gbps
        if write:
            found.append(row(f"{where}, write and fsync", f"{significant(write)} GB/s"))
        if read:
            found.append(row(f"{where}, read", f"{significant(read)} GB/s", str(how.get("read", ""))))
    if measured.checkpoint_gbps:
        found.append(row("checkpoint", f"{significant(measured.checkpoint_gbps)} GB/s"))
    return found


def _parts(cluster: Cluster) -> list[str]:
    found = []
    for card in cluster.notes.get("cards", []):
        if card["up"] and card["physical"]:
            speed = f"{significant(card['gbps'])} GB/s on paper" if "gbps" in card else "speed not told by its driver"
            found.append(f"network   {card['name']}, {card['kind']}, {speed}")
    for disk in cluster.notes.get("disks", []):
        found.append(
            f"disk      {disk['name']}, {size(disk['bytes'])}{', ' + disk['model'] if 'model' in disk else ''}"
        )
    for gpu in cluster.notes.get("gpu_links", []):
        links = f", {gpu['nvlinks']} NVLinks" if gpu.get("nvlinks") else ""
        found.append(f"GPU       {gpu['bus']}, PCIe x{gpu.get('lanes', '?')}{links}")
    return found


def _odd(measured: Measured) -> list[str]:
    drift = f"drift     {measured.drift:.1%}: the slowest of some reference products against the fastest"
    if not measured.odd:
        return [drift, "nothing looks wrong"]
    return [drift, "", "looks wrong:", *(f"  - {text}" for text in measured.odd)]


def _of(measured: Measured, *kinds: str) -> list[Timed]:
    return [each for each in measured.operations if each.kind in kinds and each.processes == 1]


def _rates(operations: Iterable[Timed], kind: str, precision: str) -> list[float]:
    """TFLOP/s of those of a kind and precision."""
    return [each.flops / each.seconds / 1e12 for each in operations if (each.kind, each.precision) == (kind, precision)]
