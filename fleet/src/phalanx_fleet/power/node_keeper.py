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
from dataclasses import replace
from pathlib import Path

from phalanx.errors import DataError
from phalanx.run.boot_clock import seconds_since_boot
from phalanx.run.directory import write_json
from phalanx.run.fields import TypedMessage, read_as, to_fields
from phalanx.safe_files import read_json
from phalanx_fleet.power.devices import CapDevice, CapError, CapLimits
from phalanx_fleet.power.messages import DeviceCap, NodeReport, NodeRequest
from phalanx_fleet.power_settings import MAX_LEASE_S

logger = logging.getLogger(__name__)

READ_BACK_TOLERANCE_W = 1.0
"""Devices round caps to a watt or less."""


class CapRecord(TypedMessage, kw_only=False):
    """What a node keeps over restarts.

    `original_w`: caps before the first write, for `phalanx power release`. `enforced_w`: what devices enforced when
    this was written; a crash leaves each device there or at its new cap, so any other one is someone else's.
    `revert_w`: caps that come back when the lease ends, of a sweep.
    """

    epoch: int = 0
    writer: str = ""
    device_ids: tuple[str, ...] = ()
    caps_w: tuple[float, ...] = ()
    fallback_w: tuple[float, ...] = ()
    original_w: tuple[float, ...] = ()
    enforced_w: tuple[float, ...] = ()
    revert_w: tuple[float, ...] = ()


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
        store: RecordStore,
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
        self._record = self._adopt_record(found)
        self._written = [float("nan")] * len(devices)
        """What each device enforced after it was last set here."""
        self.start_writes: list[tuple[str, float | None, float]] = []
        """Device, cap and new cap of what the start lowers, or would lower if it did not only read."""
        self._foreign = {index for index in range(len(devices)) if self._is_foreign(index)}
        """Devices that someone else has set while no keeper ran."""
        is_damaged = found is not None and not found.device_ids
        if starts_lowest or is_damaged or self._record.caps_w:
            self._list_start_writes()
            if not is_read_only:
                self._recover()

    @property
    def record(self) -> CapRecord:
        """What is stored now."""
        return self._record

    def describe_devices(self) -> tuple[DeviceCap, ...]:
        """Return what each device may be enforcing, now and after a restart or the end of a lease."""
        caps = self._record.caps_w or (0.0,) * len(self._devices)
        caps = tuple(map(max, caps, self._record.revert_w or caps))
        return tuple(
            self._describe_device(device, limits, recorded)
            for device, limits, recorded in zip(self._devices, self._limits, caps, strict=True)
        )

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
        elif not refusal and request.is_order:
            refusal = f"request {request.seq} came after request {self._newest_seq}"
        if is_new and request.is_order:
            refusal = self._release() if request.caps_w is None else self._carry_out(request)
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
        if self._now() >= self._lease_until and self._record.revert_w:
            self._revert()
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
        self._lower_to(self._find_start_caps())
        for index, device in enumerate(self._devices):
            cap_w = self._read_cap(device)
            self._written[index] = float("nan") if cap_w is None else cap_w

    def _list_start_writes(self) -> None:
        for device, cap_w in zip(self._devices, self._find_start_caps(), strict=True):
            current_w = self._read_cap(device)
            if current_w is None or current_w > cap_w + READ_BACK_TOLERANCE_W:
                self.start_writes.append((device.id, current_w, cap_w))

    def _find_start_caps(self) -> tuple[float, ...]:
        if self._record.caps_w:
            return self._lowest(self._record.caps_w, self._record.fallback_w)
        return tuple(limits.min_w for limits in self._limits)

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
        if self._is_read_only and (request.takes_over or request.is_order):
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
        if not request.is_order:
            return ""
        if not is_writer:
            return f"{record.writer or 'no guard'} with epoch {record.epoch} has this node"
        if request.session != self._session:
            return "the order is of before this node's restart"
        return "" if request.releases else self._foreign_change

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
        original = self._record.original_w or tuple(
            found if (found := self._read_cap(device)) is not None else limits.default_w
            for device, limits in zip(self._devices, self._limits, strict=True)
        )
        revert = (self._record.revert_w or self._read_enforced(original)) if request.reverts else ()
        if request.reverts:
            fallback = self._record.fallback_w or revert
        lowered = self._lowest(self._record.caps_w or original, caps)
        new = replace(self._record, caps_w=lowered, fallback_w=fallback, original_w=original, revert_w=revert)
        if not self._save(replace(new, enforced_w=self._read_enforced(original))):
            self._lower_devices(lowered)
            return "the record cannot be written, so nothing is raised"
        if not self._lower_devices(lowered):
            return "a device was not lowered, so nothing is raised"
        if lowered == caps:
            self._lease_until = self._now() + request.lease_s
            return ""
        if not self._save(replace(self._record, caps_w=caps, enforced_w=self._read_enforced(lowered))):
            return "the record cannot be written, so nothing is raised"
        self._lease_until = self._now() + request.lease_s
        is_done = [self._set_cap(index, cap) for index, cap in enumerate(caps) if cap > lowered[index]]
        return "" if all(is_done) else "a device was not raised"

    def _release(self) -> str:
        """Give each device its recorded cap of before the first order, and end the control of this node. What someone
        else has set stays. Return which devices could not be restored; empty if all were."""
        original = self._record.original_w
        if not original:
            return ""
        held, kept = list(self._record.caps_w), list(self._record.fallback_w)
        ours = [index for index in range(len(self._devices)) if not self._is_set_by_others(index)]
        for index in ours:
            limits = self._limits[index]
            held[index] = kept[index] = min(max(original[index], limits.min_w), max(limits.max_w, limits.default_w))
        new = replace(self._record, caps_w=tuple(held), fallback_w=tuple(kept), revert_w=())
        if not self._save(replace(new, enforced_w=self._read_enforced(held))):
            return "the record cannot be written, so nothing is restored"
        failed = [self._devices[index].id for index in ours if not self._restore_cap(index, held[index])]
        if failed:
            return f"not restored: {', '.join(failed)}; release this node again when they answer"
        return self._forget()

    def _is_set_by_others(self, index: int) -> bool:
        device, cap_w, written_w = self._devices[index], self._read_cap(self._devices[index]), self._written[index]
        is_known = cap_w is None or _is_near(cap_w, self._record.caps_w[index], written_w)
        if is_known and index not in self._foreign:
            return False
        self._note(f"{device.id}: {cap_w or 0:.0f} W were set by another program, and are left as they are")
        return True

    def _restore_cap(self, index: int, cap_w: float) -> bool:
        """Set a cap; return whether it reads back, neither higher nor lower."""
        if not self._set_cap(index, cap_w):
            return False
        if _is_near(self._written[index], cap_w):
            return True
        self._note(f"{self._devices[index].id}: set to {cap_w:.0f} W, enforces {self._written[index]:.0f} W")
        return False

    def _revert(self) -> None:
        """Give each device its cap of before the sweep; control ends where none was held before it. What fails is tried
        again at the next check."""
        caps = self._record.revert_w
        if not self._save(replace(self._record, caps_w=caps, enforced_w=self._read_enforced(caps))):
            return
        is_done = [self._set_cap(index, cap_w) for index, cap_w in enumerate(caps)]
        if all(is_done):
            is_first = all(_is_near(*each) for each in zip(caps, self._record.original_w, strict=True))
            _ = self._forget() if is_first else self._save(replace(self._record, revert_w=()))

    def _forget(self) -> str:
        """End the control of this node; its caps stay as they are."""
        record = self._record
        return "" if self._save(CapRecord(record.epoch, record.writer, record.device_ids)) else "the record stays"

    def _adopt_record(self, found: CapRecord | None) -> CapRecord:
        """The stored record for the devices that are there now; after an exchange of devices only its authority and the
        original caps of those that stayed."""
        ids = tuple(device.id for device in self._devices)
        if found is None or found.device_ids == ids:
            return found or CapRecord(device_ids=ids)
        known = dict(zip(found.device_ids, found.original_w, strict=False))
        original = tuple(
            known.get(device.id, limits.default_w) for device, limits in zip(self._devices, self._limits, strict=True)
        )
        lowest = tuple(limits.min_w for limits in self._limits)
        caps = lowest if found.caps_w else ()
        return CapRecord(found.epoch, found.writer, ids, caps, caps, original if found.caps_w else ())

    def _is_foreign(self, index: int) -> bool:
        """Whether a device has a cap that no crash of a keeper explains, nor a restart of the device."""
        record, cap_w = self._record, None
        if not record.caps_w or (cap_w := self._read_cap(self._devices[index])) is None:
            return False
        stored = (record.caps_w, record.fallback_w, record.enforced_w, record.revert_w)
        known = [caps[index] for caps in stored if caps]
        if _is_near(cap_w, *known, self._limits[index].default_w):
            return False
        self._note(f"{self._devices[index].id}: {cap_w:.0f} W were set by another program while no keeper ran")
        return True

    def _read_enforced(self, otherwise_w: Sequence[float]) -> tuple[float, ...]:
        """What each device enforces; of one that does not answer what it had."""
        found = [self._read_cap(device) for device in self._devices]
        return tuple(known if cap is None else cap for cap, known in zip(found, otherwise_w, strict=True))

    def _lower_devices(self, caps_w: Sequence[float]) -> bool:
        """Return whether every device reads back no more than its cap."""
        is_done = True
        for index, cap_w in enumerate(caps_w):
            current_w = self._read_cap(self._devices[index])
            if current_w is None or current_w > cap_w:
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
        self._foreign.discard(index)
        if found_w > cap_w + READ_BACK_TOLERANCE_W:
            self._note(f"{device.id}: set to {cap_w:.0f} W, enforces {found_w:.0f} W")
            return False
        return True

    def _read_cap(self, device: CapDevice) -> float | None:
        return self._read_sensor(device.read_cap_w)

    def _save(self, record: CapRecord) -> bool:
        if record == self._record and record.caps_w:
            return True
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
        devices = self.describe_devices()
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

    def _read_sensor(self, read: Callable[[], float | None]) -> float | None:
        try:
            return read()
        except CapError as error:
            self._note(str(error))
            return None

    def _describe_device(self, device: CapDevice, limits: CapLimits, recorded_w: float) -> DeviceCap:
        cap_w = self._read_cap(device)
        draw_w, temperature_c = self._read_sensor(device.read_draw_w), self._read_sensor(device.read_temperature_c)
        most_w = None if cap_w is None else min(max(cap_w, recorded_w), max(limits.max_w, cap_w))
        return DeviceCap(device.id, most_w, limits.min_w, limits.max_w, draw_w, temperature_c)


def _is_near(cap_w: float, *others_w: float) -> bool:
    return any(abs(cap_w - other_w) <= READ_BACK_TOLERANCE_W for other_w in others_w)
