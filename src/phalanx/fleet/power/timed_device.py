"""Bound the time of each call of a device: a driver that hangs on one device must not keep the others from the ends of
their leases."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from phalanx.fleet.power.devices import CapDevice, CapError, CapLimits

CALL_TIMEOUT_S = 2.0
"""Drivers answer within tens of milliseconds; the keeper looks at leases once a second."""

T = TypeVar("T")


class TimedDevice:
    """A device with calls that raise CapError after `timeout_s`. While one hangs, further ones raise at once. One that
    returns late has had its effect: the keeper reads the cap back at its next check."""

    def __init__(self, device: CapDevice, timeout_s: float = CALL_TIMEOUT_S):
        self._device, self._timeout_s = device, timeout_s
        self._last: Future[object] | None = None

    @property
    def id(self) -> str:
        return self._device.id

    def is_hanging(self) -> bool:
        return self._last is not None and not self._last.done()

    def read_limits(self) -> CapLimits:
        return self._call(self._device.read_limits)

    def read_cap_w(self) -> float:
        return self._call(self._device.read_cap_w)

    def read_draw_w(self) -> float | None:
        return self._call(self._device.read_draw_w)

    def read_temperature_c(self) -> float | None:
        return self._call(self._device.read_temperature_c)

    def set_cap_w(self, cap_w: float) -> None:
        self._call(lambda: self._device.set_cap_w(cap_w))

    def _call(self, function: Callable[[], T]) -> T:
        if self.is_hanging():
            raise CapError(f"{self.id}: its driver hangs in an earlier call")
        future: Future[T] = Future()
        self._last = future  # type: ignore[assignment]
        threading.Thread(target=_run, args=(function, future), name=f"device {self.id}", daemon=True).start()
        try:
            return future.result(self._timeout_s)
        except TimeoutError:
            raise CapError(f"{self.id}: its driver has not answered for {self._timeout_s:g} s") from None


def _run(function: Callable[[], T], future: "Future[T]") -> None:
    try:
        future.set_result(function())
    except Exception as error:  # noqa: BLE001 - the caller raises it
        future.set_exception(error)
