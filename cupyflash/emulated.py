"""Attention on NumPy arrays by the CUDA kernels, run on the CPU: the engine on the emulated device.

For learning and debugging, not for use: see docs/testing.md. Same signatures as cpu.py.
"""

from __future__ import annotations

from .engine import Engine
from .runtime.host import HostRuntime

_engine = Engine(HostRuntime())

check = _engine.check
forward = _engine.forward
backward = _engine.backward
