"""The one writer of caps on a node. It needs no network to become safe: what was raised is a lease, and when it ends
the caps are lowered to the fallback.

Rules, each of which the histories of `benchmarks/fleet_power.py` need:

- The record on disk is written before a device is, and a report counts the higher of both.
- Lowering comes first and is read back; where one device does not follow, nothing on the node is raised.
- When a lease ends, and after any restart, caps are only ever lowered, to the lowest of device, record and fallback. A
  node that has lost its record has the lowest caps.
- Requests of an older epoch or session, or that arrive after a newer one, have no effect.
"""

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from phalanx.errors import DataError
from phalanx.fleet.power.devices import CapDevice, CapError, CapLimits
from phalanx.fleet.power.messages import DeviceCap, NodeReport, NodeRequest
from phalanx.fleet.power_settings import MAX_LEASE_S
from phalanx.run.boot_clock import seconds_since_boot
from phalanx.run.directory import write_json
from phalanx.run.fields import TypedMessage, read_as, to_fields
from phalanx.safe_files import read_json

logger = logging.getLogger(__name__)

READ_BACK_TOLERANCE_W = 1.0
"""Devices round caps to a watt or less."""


@dataclass(frozen=True)
class CapRecord(TypedMessage):
    """What a node keeps over restarts. `original_w`: caps before the first write, for `phalanx power release`."""

    epoch: int = 0
    writer: str = ""
    device_ids: tuple[str, ...] = ()
    caps_w: tuple[float, ...] = ()
    fallback_w: tuple[float, ...] = ()
    original_w: tuple[float, ...] = ()


class CapRecordStore(Protocol):
    """Keeps the record of a node."""

    def load(self) -> CapRecord | None:
        """Return the record; None without one."""

    def save(self, record: CapRecord) -> None:
        """Write the record. Raises OSError."""


class RecordStore:
    """Keeps the record in the file at `path`."""

    def __init__(self, path: Path):
        self._path = path

    def load(self) -> CapRecord | None:
        """Return the record; None without one. A damaged one is empty: then the node starts with its lowest caps."""
        try:
            record: CapRecord = read_as(CapRecord, read_json(self._path))
            return record
        except FileNotFoundError:
            return None
        except (DataError, ValueError, OverflowError, OSError) as error:
            logger.warning("power: %s cannot be read (%s): the node starts with its lowest caps", self._path, error)
            return CapRecord()

    def save(self, record: CapRecord) -> None:
        """Write the record. Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, to_fields(record))


class NodeKeeper:
    """Answers requests for the devices of a node, and ends leases.

    Args:
        node: Its name.
        devices: Its devices.
        store: Keeps the record.
        now: Returns seconds that no clock change affects.
        session: Name of this start; a random one by default.
        starts_lowest: Whether a node without a record starts with its lowest caps. At boot it has to: the record may be
            lost, and devices have their factory limits.
        is_read_only: Whether nothing may be written, also no lowering: another keeper may be at work.
    """

    def __init__(
        self,
        node: str,
        devices: Sequence[CapDevice],
        store: CapRecordStore,
        now: Callable[[], float] = seconds_since_boot,
        session: str | None = None,
        starts_lowest: bool = False,
        is_read_only: bool = False,
    ):
        self._node, self._devices, self._store, self._now = node, devices, store, now
        self._session = session or secrets.token_hex(8)
        self._is_read_only = is_read_only
        self._limits = [device.read_limits() for device in devices]
        self._newest_seq, self._lease_until = 0, float("-inf")
        self._foreign_change = ""
        self._problems: list[str] = []
        found = store.load()
        ids = tuple(device.id for device in devices)
        self._record = found if found is not None and found.device_ids == ids else CapRecord(device_ids=ids)
        self._written = [float("nan")] * len(devices)
        """What each device enforced after it was last set here."""
        if not is_read_only and (
            starts_lowest or (found is not None and found != CapRecord(found.epoch, found.writer, found.device_ids))
        ):
            self._recover()

    @property
    def record(self) -> CapRecord:
        """What is stored now."""
        return self._record

    def is_capped(self) -> bool:
        """Return whether every device is held to its recorded cap: before, no job may start on this node."""
        return bool(self._record.caps_w) and all(
            (found_w := self._read_cap(device)) is not None and found_w <= cap_w + READ_BACK_TOLERANCE_W
            for device, cap_w in zip(self._devices, self._record.caps_w, strict=True)
        )

    def answer(self, request: NodeRequest) -> NodeReport:
        """Carry out a request, and report."""
        self.check_lease()
        refusal = self._check_authority(request)
        is_new = not refusal and request.seq > self._newest_seq
        if is_new:
            self._newest_seq = request.seq
        elif not refusal and request.caps_w is not None:
            refusal = f"request {request.seq} came after request {self._newest_seq}"
        if is_new and request.caps_w is not None:
            refusal = self._carry_out(request)
        return self._report(request.seq, refusal)

    def end_lease(self) -> None:
        """Lower what was raised, to the fallback."""
        self._lease_until = float("-inf")
        self.check_lease()

    def check_lease(self) -> None:
        """Lower what was raised when its lease has ended, and what a device's restart has put up. Call it once a
        second."""
        if not self._record.caps_w or self._is_read_only:
            return
        if self._now() >= self._lease_until and self._record.fallback_w:
            self._lower_to(self._lowest(self._record.caps_w, self._record.fallback_w))
        for index, device in enumerate(self._devices):
            self._check_device(index, device)

    def _check_device(self, index: int, device: CapDevice) -> None:
        """A device with its factory limit has restarted, and is capped again. Any other cap is someone else's."""
        cap_w, written_w = self._read_cap(device), self._record.caps_w[index]
        if cap_w is None or abs(cap_w - written_w) <= READ_BACK_TOLERANCE_W:
            return
        if abs(cap_w - self._limits[index].default_w) <= READ_BACK_TOLERANCE_W and cap_w > written_w:
            self._set_cap(index, written_w)
        elif abs(cap_w - self._written[index]) > READ_BACK_TOLERANCE_W:
            self._foreign_change = f"{device.id} has a cap of {cap_w:.0f} W; {written_w:.0f} W were written"

    def _recover(self) -> None:
        """After a restart of the node or of this process."""
        lowest = tuple(limits.min_w for limits in self._limits)
        known = self._lowest(self._record.caps_w, self._record.fallback_w) if self._record.caps_w else lowest
        self._lower_to(known)
        for index, device in enumerate(self._devices):
            cap_w = self._read_cap(device)
            self._written[index] = float("nan") if cap_w is None else cap_w

    def _lowest(self, *caps: Sequence[float]) -> tuple[float, ...]:
        return tuple(min(each) for each in zip(*(found for found in caps if found), strict=True))

    def _lower_to(self, caps_w: Sequence[float]) -> None:
        """Lower devices that are above these caps. What is below stays."""
        if not self._record.caps_w or any(new < old for new, old in zip(caps_w, self._record.caps_w, strict=True)):
            self._save(replace(self._record, caps_w=tuple(caps_w)))
        for index, cap_w in enumerate(caps_w):
            current_w = self._read_cap(self._devices[index])
            if current_w is None or current_w > cap_w + READ_BACK_TOLERANCE_W:
                self._set_cap(index, cap_w)

    def _check_authority(self, request: NodeRequest) -> str:
        """Return why a request has no authority; empty if it has."""
        if self._is_read_only and (request.takes_over or request.caps_w is not None):
            return "this keeper only reads"
        record = self._record
        is_writer = (request.epoch, request.writer) == (record.epoch, record.writer)
        if request.takes_over:
            if is_writer:
                return ""
            if request.epoch <= record.epoch:
                return f"epoch {request.epoch} is not above {record.epoch}, of {record.writer}"
            if not self._save(replace(record, epoch=request.epoch, writer=request.writer)):
                return "the record cannot be written, so the node takes no new writer"
            self._newest_seq, self._foreign_change = 0, ""
            return ""
        if request.caps_w is None:
            return ""
        if not is_writer:
            return f"{record.writer or 'no guard'} with epoch {record.epoch} has this node"
        if request.session != self._session:
            return "the order is of before this node's restart"
        return self._foreign_change

    def _carry_out(self, request: NodeRequest) -> str:
        """Lower, read back, then raise. Return why not all was done; empty if it was."""
        caps, fallback = request.caps_w or (), request.fallback_w or ()
        if len(caps) != len(self._devices) or len(fallback) != len(caps):
            return f"{len(caps)} caps and {len(fallback)} fallbacks for {len(self._devices)} devices"
        if not 0 < request.lease_s <= MAX_LEASE_S:
            return f"a lease of {request.lease_s:g} s; expected up to {MAX_LEASE_S:g} s"
        for device, limits, *watts in zip(self._devices, self._limits, caps, fallback, strict=True):
            for each in watts:
                if not limits.min_w <= each <= limits.max_w:
                    return f"{device.id} takes caps from {limits.min_w:g} to {limits.max_w:g} W, not {each:g} W"
        before = self._record.caps_w or tuple(limits.max_w for limits in self._limits)
        original = self._record.original_w or tuple(
            found if (found := self._read_cap(device)) is not None else limits.default_w
            for device, limits in zip(self._devices, self._limits, strict=True)
        )
        lowered = self._lowest(before, caps)
        if not self._save(replace(self._record, caps_w=lowered, fallback_w=fallback, original_w=original)):
            self._lower_devices(lowered)
            return "the record cannot be written, so nothing is raised"
        if not self._lower_devices(lowered):
            return "a device was not lowered, so nothing is raised"
        if request.releases and lowered == caps:
            return self._forget()
        if lowered == caps:
            self._lease_until = self._now() + request.lease_s
            return ""
        if not self._save(replace(self._record, caps_w=caps)):
            return "the record cannot be written, so nothing is raised"
        self._lease_until = self._now() + request.lease_s
        is_done = [self._set_cap(index, cap) for index, cap in enumerate(caps) if cap > lowered[index]]
        if not all(is_done):
            return "a device was not raised"
        return self._forget() if request.releases else ""

    def _forget(self) -> str:
        """End the control of this node; its caps stay as they are."""
        record = self._record
        return "" if self._save(CapRecord(record.epoch, record.writer, record.device_ids)) else "the record stays"

    def _lower_devices(self, caps_w: Sequence[float]) -> bool:
        """Return whether every device reads back no more than its cap."""
        is_done = True
        for index, cap_w in enumerate(caps_w):
            current_w = self._read_cap(self._devices[index])
            if current_w is None or current_w > cap_w + READ_BACK_TOLERANCE_W:
                is_done &= self._set_cap(index, cap_w)
        return is_done

    def _set_cap(self, index: int, cap_w: float) -> bool:
        """Set a cap; return whether it reads back."""
        device = self._devices[index]
        try:
            device.set_cap_w(cap_w)
            found_w = device.read_cap_w()
        except CapError as error:
            self._note(str(error))
            return False
        self._written[index] = found_w
        if found_w > cap_w + READ_BACK_TOLERANCE_W:
            self._note(f"{device.id}: set to {cap_w:.0f} W, enforces {found_w:.0f} W")
            return False
        return True

    def _read_cap(self, device: CapDevice) -> float | None:
        try:
            return device.read_cap_w()
        except CapError as error:
            self._note(str(error))
            return None

    def _save(self, record: CapRecord) -> bool:
        try:
            self._store.save(record)
        except OSError as error:
            self._note(f"the record: {error}")
            return False
        self._record = record
        return True

    def _note(self, problem: str) -> None:
        if problem not in self._problems:
            self._problems.append(problem)

    def _report(self, seq: int, refusal: str) -> NodeReport:
        caps = self._record.caps_w or (0.0,) * len(self._devices)
        devices = tuple(
            self._describe_device(device, limits, recorded)
            for device, limits, recorded in zip(self._devices, self._limits, caps, strict=True)
        )
        problems, self._problems = tuple(self._problems), []
        return NodeReport(
            self._node,
            self._session,
            seq,
            self._newest_seq,
            self._record.epoch,
            self._record.writer,
            devices,
            self._record.original_w,
            max(0.0, min(MAX_LEASE_S, self._lease_until - self._now())),
            refusal,
            self._foreign_change,
            problems,
        )

    def _describe_device(self, device: CapDevice, limits: CapLimits, recorded_w: float) -> DeviceCap:
        cap_w = self._read_cap(device)
        try:
            draw_w = device.read_draw_w()
        except CapError as error:
            self._note(str(error))
            draw_w = None
        most_w = None if cap_w is None else min(max(cap_w, recorded_w), max(limits.max_w, cap_w))
        return DeviceCap(device.id, most_w, limits.min_w, limits.max_w, draw_w)
