"""The page of the cluster: device-hours, goodput, energy and cost over all runs, by user and by group."""

import grp
import pwd
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape

from phalanx import formatting
from phalanx.cluster.spec import Prices
from phalanx.observe.run_cost import compute_cost
from phalanx.serve.run_accounts import RunAccount
from phalanx.serve.run_row import RunRow
from phalanx.serve.tables import render_rows

USAGE_PERIODS = {"day": 86_400.0, "week": 7 * 86_400.0, "month": 30 * 86_400.0, "all": float("inf")}
"""Names of periods, and the seconds before now in which a run was last written."""
USAGE_COLUMNS = ("", "runs", "running", "device-hours", "goodput", "energy", "cost")


@dataclass
class Usage:
    """What some runs have used."""

    num_runs: int = 0
    num_running: int = 0
    device_s: float = 0.0
    productive_s: float = 0.0
    energy_j: float = 0.0
    has_energy: bool = False

    def add(self, account: RunAccount, is_running: bool) -> None:
        """Count a run in."""
        self.num_runs += 1
        self.num_running += is_running
        self.device_s += account.device_s
        self.productive_s += account.productive_s
        if account.energy_j is not None:
            self.energy_j, self.has_energy = self.energy_j + account.energy_j, True

    @property
    def goodput(self) -> float | None:
        """Productive share of the device time."""
        return self.productive_s / self.device_s if self.device_s > 0 else None

    def cost(self, prices: Prices) -> float | None:
        """What these runs cost (`compute_cost`)."""
        return compute_cost(self.device_s, self.energy_j if self.has_energy else None, prices)


def sum_usage(
    rows: Mapping[str, RunRow],
    accounts: Mapping[str, RunAccount],
    name_of: Callable[[RunRow], str],
    period_s: float,
    now: float,
) -> dict[str, Usage]:
    """The usage of the runs that were written within a period, by name."""
    found: dict[str, Usage] = {}
    for id, row in rows.items():
        account = accounts.get(id)
        if account is not None and now - row.last_written_at <= period_s:
            found.setdefault(name_of(row), Usage()).add(account, row.status(now) == "running")
    return found


def find_user(row: RunRow) -> str:
    """The name of a run's owner, or the number where it has none here."""
    return _find_user_name(row.owner)


def find_group(row: RunRow) -> str:
    """The name of the group of a run's directory, or the number where it has none here."""
    return _find_group_name(row.group)


@cache  # a directory service may take long to answer
def _find_user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except (KeyError, OverflowError):
        return f"user {number}"


@cache
def _find_group_name(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except (KeyError, OverflowError):
        return f"group {number}"


def render_cluster(
    rows: Mapping[str, RunRow], accounts: Mapping[str, RunAccount], prices: Prices, period: str, now: float
) -> str:
    """The tables."""
    missing = sum(row.state is not None and id not in accounts for id, row in rows.items())
    note = f'<p class="note">{formatting.format_plural(missing, "run")} not read yet</p>' if missing else ""
    parts = [note]
    for title, name_of in (("All runs", lambda row: "all"), ("By user", find_user), ("By group", find_group)):
        usages = sum_usage(rows, accounts, name_of, USAGE_PERIODS[period], now)
        parts.append(f"<h2>{title}</h2>" + _render_usages(usages, prices))
    return "".join(parts)


def render_cluster_page(content: str, period: str) -> str:
    """The page of the cluster."""
    options = "".join(f"<option{' selected' if name == period else ''}>{name}</option>" for name in USAGE_PERIODS)
    return f"""<header><h1>Cluster</h1></header>
<form class="bar-form" method="get" action="cluster">
<label>Runs written in the last <select name="period">{options}</select></label> <button>Show</button></form>
<div id="cluster">{content}</div>
<p class="note">Device-hours are those that runs held, from start to end of each attempt and until the restart after a
failure. Goodput is the productive part: steps that counted, without waiting, and evaluations. Energy is that of CPUs,
and of accelerators where the run had a node's all.</p>"""


def _render_usages(usages: Mapping[str, Usage], prices: Prices) -> str:
    if not usages:
        return '<p class="note">No runs in this time.</p>'
    ordered = sorted(usages.items(), key=lambda each: -each[1].device_s)
    return render_rows(USAGE_COLUMNS, (_render_usage(name, usage, prices) for name, usage in ordered))


def _render_usage(name: str, usage: Usage, prices: Prices) -> Sequence[str]:
    cost = usage.cost(prices)
    return (
        escape(name),
        str(usage.num_runs),
        str(usage.num_running),
        formatting.format_significant(usage.device_s / 3600, 4),
        "" if usage.goodput is None else formatting.format_percent(usage.goodput),
        f"{formatting.format_significant(usage.energy_j / 3.6e6)} kWh" if usage.has_energy else "",
        "" if cost is None else f"{formatting.format_significant(cost, 4)} {escape(prices.currency)}",
    )


def find_period(names: Iterable[str]) -> str:
    """The first of these that is a period, else a week."""
    return next((name for name in names if name in USAGE_PERIODS), "week")
