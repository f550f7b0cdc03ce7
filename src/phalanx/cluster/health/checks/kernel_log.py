"""Check `kernel-log`: hardware faults in the kernel log, such as NVIDIA XIDs, failing disks and machine checks.

Only XIDs with a board or link as the cause count (data/xids.yaml, which says what each means, and what to do). Others
(13, 31, 43, 45) come from a failed program and do not make a node unfit.
"""

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from pathlib import Path

from ruamel.yaml import YAML

from phalanx.cluster.health.finding import CheckContext, HealthFinding, HealthVerdict, evaluate_threshold, worst_verdict
from phalanx.cluster.system_files import read_small_file
from phalanx.formatting import format_duration

XID_PATTERN = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
FAILURE_PATTERNS = {
    "a disk failed to read or write": re.compile(r"I/O error, dev (?!fd|sr|loop)|critical medium error"),
    "a file system was damaged or made read-only": re.compile(
        r"EXT4-fs error|XFS .*[Cc]orruption|Remounting filesystem"
    ),
    "a machine check": re.compile(
        r"\[Hardware Error\]: .*(Uncorrected|Fatal|PANIC)|mce: .*Machine [Cc]heck events logged"
    ),
}
MAX_RECORD_BYTES = 8192
"""Buffer size that fits any record of /dev/kmsg."""


@dataclass(frozen=True)
class KernelMessage:
    """One message and its age in seconds."""

    age_s: float
    text: str


def read_kernel_messages(context: CheckContext) -> list[KernelMessage]:
    """Read the kernel log. Raises OSError when this user may not."""
    uptime = float((read_small_file(context.root / "proc/uptime") or "0").split()[0])
    found = []
    for record in _read_records(context.root / "dev/kmsg"):
        head, _, text = record.partition(";")
        fields = head.split(",")
        if len(fields) > 2 and fields[2].isdigit():
            found.append(KernelMessage(uptime - int(fields[2]) / 1e6, text.split("\n")[0]))
    return found


def _read_records(path: Path) -> Iterator[str]:
    """Yield all records so far. The device returns one per read, and would block after the last."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                record = os.read(fd, MAX_RECORD_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.EPIPE:  # EPIPE: overwritten while being read; read the next one
                    raise
                continue
            if not record:
                return
            yield record.decode(errors="replace")
    finally:
        os.close(fd)


def evaluate_kernel_log(found: list[KernelMessage]) -> list[HealthFinding]:
    """Return one finding with the worst verdict, and each message with its age."""
    last_by_text: dict[str, tuple[HealthVerdict, float]] = {}
    for line in found:
        for words, verdict in _classify(line):
            last_by_text[words] = (verdict, line.age_s)  # the last time counts
    if not last_by_text:
        return [HealthFinding("kernel-log", HealthVerdict.PASS, "no hardware faults in the kernel log")]
    verdict = worst_verdict(each for each, _ in last_by_text.values())
    summary = "; ".join(f"{words} ({format_duration(age)} ago)" for words, (_, age) in last_by_text.items())
    newest_age_s = min(age for _, age in last_by_text.values())
    figures = {"num_messages": len(last_by_text), "age_s": newest_age_s}
    return [HealthFinding("kernel-log", verdict, summary, figures)]


def _classify(line: KernelMessage) -> Iterator[tuple[str, HealthVerdict]]:
    if match := XID_PATTERN.search(line.text):
        entry, bus = find_xid(int(match[2])), match[1].lower()
        if entry is not None and (entry.makes_unfit or entry.is_watched):
            recent = evaluate_threshold("XID age", line.age_s) is HealthVerdict.FAIL
            yield (
                f"XID {entry.number} of GPU {bus}: {entry.meaning}",
                HealthVerdict.FAIL if entry.makes_unfit and recent else HealthVerdict.WARN,
            )
    for words, pattern in FAILURE_PATTERNS.items():
        if pattern.search(line.text):
            yield f"{words}: {line.text[:100]}", HealthVerdict.WARN


def check_kernel_log(context: CheckContext) -> list[HealthFinding]:
    try:
        return evaluate_kernel_log(read_kernel_messages(context))
    except OSError as error:
        text = f"not known: the kernel's messages may not be read here ({error.strerror}); root may, as in a prolog"
        return [HealthFinding("kernel-log", HealthVerdict.UNKNOWN, text)]


class XidAction(StrEnum):
    """What an Xid error asks for, from least to most."""

    NONE = "none"
    APPLICATION = "application"
    RESET = "reset"
    DRAIN = "drain"
    REPLACE = "replace"


@dataclass(frozen=True)
class XidEntry:
    """One number. `repeated`: what to do where it comes back after `action`. `is_watched`: memory or a link gets worse,
    although nothing has to be done at once."""

    number: int
    meaning: str
    action: XidAction
    repeated: XidAction
    is_watched: bool = False

    @property
    def makes_unfit(self) -> bool:
        """Whether nothing should run on the GPU before something was done."""
        return self.action in (XidAction.RESET, XidAction.DRAIN)


def find_xid(number: int) -> XidEntry | None:
    """The entry of a number; None for one that the table does not have."""
    return _read_table().get(number)


@cache
def _read_table() -> dict[int, XidEntry]:
    rows = YAML(typ="safe", pure=True).load((files("phalanx.cluster") / "data/xids.yaml").read_text())
    return {
        number: XidEntry(
            number, row["meaning"], XidAction(row["action"]), XidAction(row["repeated"]), row.get("watch", False)
        )
        for number, row in rows.items()
    }
