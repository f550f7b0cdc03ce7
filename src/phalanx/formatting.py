"""Numbers as people read them: short, with units. Every function takes None or NaN and then says "not measured"."""

import math
import os
import signal
from collections import Counter
from collections.abc import Sequence
from datetime import datetime

NOT_MEASURED_TEXT = "not measured"
BYTES_PER_KIB, BYTES_PER_MIB, BYTES_PER_GIB = 2**10, 2**20, 2**30
"""Units of memory, which is counted in powers of two; files and links are in powers of 1000 (`format_bytes`)."""


def format_significant(value: float, digits: int = 3) -> str:
    """Format `value` with `digits` significant digits, in scientific notation only below 1e-3 and from 1e6 on."""
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "infinite"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    size = int(exponent)
    return f"{value:.{max(0, digits - 1 - size)}f}" if -4 < size < 6 else f"{mantissa}e{size}"


def format_count(value: float | None) -> str:
    """1234567 -> `1.23 M`; below a thousand as it is."""
    if value is None or not math.isfinite(value):
        return NOT_MEASURED_TEXT
    for size, suffix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.9995:
            return f"{format_significant(value / size)} {suffix}"
    return f"{value:.0f}" if float(value).is_integer() else format_significant(value)


def format_rate(value: float | None, unit: str) -> str:
    """41234, "tokens" -> `41.2 k tokens/s`."""
    return NOT_MEASURED_TEXT if value is None or not math.isfinite(value) else f"{format_count(value)} {unit}/s"


def format_bytes(value: float | None) -> str:
    """Bytes in powers of 1000: `12.3 MB`."""
    if value is None or not math.isfinite(value):
        return NOT_MEASURED_TEXT
    for power, suffix in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= power:
            return f"{format_significant(value / power)} {suffix}"
    return f"{value:.0f} B"


def format_duration(value: float | None) -> str:
    """Seconds in the two units that matter: `83 us`, `41.2 ms`, `7.3 s`, `2 min 41 s`, `3 h 05 min`, `2 d 4 h`."""
    if value is None or not math.isfinite(value):
        return NOT_MEASURED_TEXT
    if value <= 0:
        return "0 s"
    if value < 0.9995e-3:
        return f"{format_significant(value * 1e6, 2 if value < 1e-4 else 3)} us"
    if value < 0.9995:
        return f"{format_significant(value * 1e3)} ms"
    if value < 9.95:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def format_percent(value: float | None) -> str:
    """A share: `0.4%`, `31%`."""
    if value is None or not math.isfinite(value):
        return NOT_MEASURED_TEXT
    shown = value * 100
    return f"{shown:.1f}%" if 0 < abs(shown) < 9.95 else f"{shown:.0f}%"


def format_loss(value: float | None) -> str:
    """A loss with four digits; a NaN or an infinity is said, since that is what happened."""
    return NOT_MEASURED_TEXT if value is None else format_significant(value, 4)


def format_flops(value: float | None) -> str:
    """FLOP/s: `1.24 TFLOP/s`."""
    if value is None or not math.isfinite(value):
        return NOT_MEASURED_TEXT
    return f"{format_count(value)}FLOP/s" if abs(value) >= 1e3 else f"{value:.0f} FLOP/s"


def format_plural(number: int, noun: str) -> str:
    """1, "restart" -> `1 restart`; 2 -> `2 restarts`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_signal(number: int) -> str:
    """SIGKILL, say; real-time signals have no names, so they are `signal 40`."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def format_exit_status(status: int) -> str:
    """An exit code, or the number of the signal that ended a process, negative: `exit code 3`, `SIGKILL`."""
    return format_signal(-status) if status < 0 else f"exit code {status}"


def format_timestamp(t: float | None) -> str:
    """Unix seconds as local date and time."""
    if t is None:
        return NOT_MEASURED_TEXT
    return datetime.fromtimestamp(t).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z").strip()


def shorten_paths(paths: Sequence[str]) -> list[str]:
    """Return of each path the shortest tail that no other path has: [x/a, y/a, y/b] -> [x/a, y/a, b]. Equal paths stay
    equal."""
    parts = {path: tuple(os.path.normpath(path).split(os.sep)) for path in paths}
    names: dict[str, str] = {}
    length = 0
    while len(names) < len(parts):
        length += 1
        counts = Counter(each[-length:] for each in set(parts.values()))
        for path, each in parts.items():
            if path not in names and (counts[each[-length:]] == 1 or length >= len(each)):
                names[path] = os.sep.join(each[-length:])
    return [names[path] for path in paths]
