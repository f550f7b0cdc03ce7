"""What NVIDIA's Xid errors mean, and what to do: the table is data/xids.yaml."""

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files

from ruamel.yaml import YAML


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
