"""Clocks, power and throttling of a GPU, by NVML where the package nvidia-ml-py is installed."""

from __future__ import annotations

import time
from typing import Any

_SECONDS_BETWEEN = 0.2  # a reading costs up to a millisecond
_REASONS = {  # nvmlClocksEventReason*
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
}


class Sensors:
    """Readings of one GPU; empty where there is no NVML."""

    def __init__(self, pci_bus_id: str) -> None:
        self._last: dict[str, Any] = {}
        self._time = -_SECONDS_BETWEEN
        self._nvml: Any = None
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id)
            self._nvml = pynvml
        except pynvml.NVMLError:  # no driver library, or a container that hides it
            return

    def read(self) -> dict[str, Any]:
        """``sm_mhz``, ``watts``, ``celsius`` and ``throttled`` (a list of reasons), at most 0.2 s old."""
        now = time.monotonic()
        if self._nvml is None or now - self._time < _SECONDS_BETWEEN:
            return self._last
        nvml, handle = self._nvml, self._handle
        readings: dict[str, Any] = {
            "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "celsius": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "throttled": lambda: _reasons(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
        }
        self._last = {}
        for name, reading in readings.items():
            try:
                self._last[name] = reading()
            except nvml.NVMLError:  # not every GPU has every sensor
                continue
        self._time = now
        return self._last


def _reasons(bits: int) -> list[str]:
    return [reason for bit, reason in _REASONS.items() if bits & bit]
