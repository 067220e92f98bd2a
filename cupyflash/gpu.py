"""Attention on CuPy arrays: the engine on CUDA. Same signatures as cpu.py; and calls are bound, see Engine."""

from __future__ import annotations

from .engine import Engine
from .runtime.cuda import CudaRuntime

_engine = Engine(CudaRuntime())

check = _engine.check
forward = _engine.forward
backward = _engine.backward
bind_forward = _engine.bind_forward
bind_backward = _engine.bind_backward
