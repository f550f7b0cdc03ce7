"""Check `kernel`: what the kernel has told of broken hardware. NVIDIA's XIDs, disks that fail, machine checks.

Only XIDs that a board or link causes count: others (13, 31, 43, 45) come of a program that failed, and a node must not
be given up for these.
"""

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from phalanx.cluster.health.finding import Finding, Verdict, worst
from phalanx.cluster.health.site import Site, read
from phalanx.cluster.health.thresholds import judge

FATAL = {
    48: "memory error that could not be corrected",
    62: "the GPU's own controller halted",
    64: "bad memory could not be replaced",
    74: "NVLink error",
    79: "GPU fell off the bus",
    95: "memory error that was not contained",
    119: "the GPU's own processor does not answer",
    120: "the GPU's own processor failed",
    140: "memory error that could not be corrected",
    143: "the GPU could not be set up",
}
"""XIDs after which a GPU must be reset or replaced (NVIDIA's XID catalogue)."""
NOTED = {63: "bad memory was replaced", 92: "many corrected memory errors", 94: "memory error that was contained"}
XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
FAILING = {
    "a disk failed to read or write": re.compile(r"I/O error, dev (?!fd|sr|loop)|critical medium error"),
    "a file system was damaged or made read-only": re.compile(
        r"EXT4-fs error|XFS .*[Cc]orruption|Remounting filesystem"
    ),
    "a machine check": re.compile(
        r"\[Hardware Error\]: .*(Uncorrected|Fatal|PANIC)|mce: .*Machine [Cc]heck events logged"
    ),
}
RECORD = 8192
"""Bytes that hold any record of /dev/kmsg."""


@dataclass(frozen=True)
class Line:
    """One message, and how many seconds ago it was told."""

    age: float
    text: str


def lines(site: Site) -> list[Line]:
    """What the kernel still remembers. OSError where this user may not read it."""
    uptime = float((read(site.root / "proc/uptime") or "0").split()[0])
    found = []
    for record in _records(site.root / "dev/kmsg"):
        head, _, text = record.partition(";")
        fields = head.split(",")
        if len(fields) > 2 and fields[2].isdigit():
            found.append(Line(uptime - int(fields[2]) / 1e6, text.split("\n")[0]))
    return found


def _records(path: Path) -> Iterator[str]:
    """The records so far: the device gives one for each read, and would then wait."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                record = os.read(fd, RECORD)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.EPIPE:  # overwritten while it was read: the next one is there
                    raise
                continue
            if not record:
                return
            yield record.decode(errors="replace")
    finally:
        os.close(fd)


def evaluate(found: list[Line]) -> list[Finding]:
    """One finding: the worst that was told, with how long ago."""
    said: dict[str, tuple[Verdict, float]] = {}
    for line in found:
        for words, verdict in _meaning(line):
            said[words] = (verdict, line.age)  # the last time counts
    if not said:
        return [Finding("kernel-log", Verdict.OK, "the kernel tells of no broken hardware")]
    verdict = worst(each for each, _ in said.values())
    told = "; ".join(f"{words} ({_ago(age)} ago)" for words, (_, age) in said.items())
    return [Finding("kernel-log", verdict, told, {"messages": len(said), "age": min(age for _, age in said.values())})]


def _meaning(line: Line) -> Iterator[tuple[str, Verdict]]:
    if match := XID.search(line.text):
        number, bus = int(match[2]), match[1].lower()
        if number in FATAL:
            recent = judge("XID age", line.age) is Verdict.BAD
            yield f"XID {number} of GPU {bus}: {FATAL[number]}", Verdict.BAD if recent else Verdict.WARN
        elif number in NOTED:
            yield f"XID {number} of GPU {bus}: {NOTED[number]}", Verdict.WARN
    for words, pattern in FAILING.items():
        if pattern.search(line.text):
            yield f"{words}: {line.text[:100]}", Verdict.WARN


def _ago(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"


def check(site: Site) -> list[Finding]:
    try:
        return evaluate(lines(site))
    except OSError as error:
        text = f"not known: the kernel's messages may not be read here ({error.strerror}); root may, as in a prolog"
        return [Finding("kernel-log", Verdict.UNKNOWN, text)]
