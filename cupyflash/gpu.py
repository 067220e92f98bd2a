"""Attention on CuPy arrays: the engine on CUDA. Same signatures as cpu.py; and calls are bound, see Engine."""

from __future__ import annotations

from .engine import Engine
from .runtime.cuda import CudaRuntime
from .tuning.first_call import tune_if_asked

_engine = Engine(CudaRuntime(), before_planning=tune_if_asked)

check = _engine.check
forward = _engine.forward
backward = _engine.backward
bind_forward = _engine.bind_forward
bind_backward = _engine.bind_backward
