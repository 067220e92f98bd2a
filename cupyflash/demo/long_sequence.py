"""One long causal forward and backward, and what it costs beside standard attention, which stores all scores."""

from __future__ import annotations

import math
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import cupyflash


@dataclass(frozen=True)
class Cost:
    """What a call took: seconds, and the peak of the memory it held beyond its inputs, results included."""

    seconds: float
    peak_bytes: int

    def __str__(self) -> str:
        return f"{_seconds(self.seconds)}  {size(self.peak_bytes):>9} beyond the inputs"


def flash(q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, Any, Any, Any]:
    """Out, dq, dk and dv of causal attention, tile by tile: no array here grows with the square of the length."""
    out, lse = cupyflash.attention(q, k, v, causal=True, return_lse=True)
    return out, *cupyflash.attention_backward(dout, q, k, v, out, lse, causal=True)


def standard(q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, Any, Any, Any]:
    """The same in the textbook's steps, with S and P stored, in place where it can be.

    References: Dao et al., FlashAttention, arXiv:2205.14135, Algorithm 0, and Algorithm 3 for the gradients.
    """
    xp = np if isinstance(q, np.ndarray) else _cupy()
    q, k, v, dout = (x.transpose(0, 2, 1, 3) for x in (q, k, v, dout))
    scale = 1 / math.sqrt(q.shape[-1])

    S = q @ k.swapaxes(2, 3)
    S *= S.dtype.type(scale)
    xp.copyto(S, -math.inf, where=xp.arange(k.shape[2]) > xp.arange(q.shape[2])[:, None])
    S -= S.max(axis=-1, keepdims=True)
    P = xp.exp(S, out=S)
    P /= P.sum(axis=-1, keepdims=True)
    out = P @ v

    dv = P.swapaxes(2, 3) @ dout
    dS = dout @ v.swapaxes(2, 3)
    dS -= (dout * out).sum(axis=-1, keepdims=True)
    dS *= P
    dS *= dS.dtype.type(scale)
    dq = dS @ k
    dk = dS.swapaxes(2, 3) @ q
    out, dq, dk, dv = (x.transpose(0, 2, 1, 3) for x in (out, dq, dk, dv))
    return out, dq, dk, dv


def run(tokens: int, on_gpu: bool, say: Callable[[str], None] = print) -> None:
    """Runs both and says what they cost."""
    heads, head_dim, dtype = (16, 128, "float16") if on_gpu else (1, 64, "float32")
    say(f"   B=1, S={tokens:,}, H={heads}, D={head_dim}, {dtype}")
    measure = _measure_on_gpu if on_gpu else _measure_on_cpu
    xp = _cupy() if on_gpu else np
    random = np.random.default_rng(0)
    inputs = [
        xp.asarray(random.standard_normal((1, tokens, heads, head_dim), dtype=np.float32).astype(dtype))
        for _ in range(4)
    ]

    ours, cost = measure(lambda: flash(*inputs))
    say(f"   cupyflash           {cost}")

    # S and P share one array, dS is a second; the mask has a byte per entry.
    needed = tokens * tokens * (2 * heads * np.dtype(dtype).itemsize + 1)
    available = _free_memory(on_gpu)
    if needed > available:
        say(f"   standard attention  not run: it needs {size(needed)}, and {size(available)} are free")
        return
    try:
        theirs, cost = measure(lambda: standard(*inputs))
    except MemoryError:
        say(f"   standard attention  did not fit: it needs more than the {size(available)} that were free")
        return
    say(f"   standard attention  {cost}")
    differences = (
        f"{name} {float(abs(a.astype(np.float32) - b.astype(np.float32)).max()):.1e}"
        for name, a, b in zip(("out", "dq", "dk", "dv"), ours, theirs, strict=True)
    )
    say(f"   largest differences: {', '.join(differences)}")


def size(count: float) -> str:
    """A number of bytes for people: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def _seconds(seconds: float) -> str:
    return f"{seconds:7.2f} s " if seconds >= 1 else f"{seconds * 1e3:7.2f} ms"


def _measure_on_cpu(call: Callable[[], Any]) -> tuple[Any, Cost]:
    tracemalloc.start()  # NumPy reports its arrays to it
    try:
        start = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - start
        return result, Cost(seconds, tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


def _measure_on_gpu(call: Callable[[], Any]) -> tuple[Any, Cost]:
    cupy = _cupy()
    pool = cupy.cuda.MemoryPool()  # of its own, so that all it ever took from the device was for this call
    with cupy.cuda.using_allocator(pool.malloc):
        call()  # compiles
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        result = call()
        stop.record()
        stop.synchronize()
    return result, Cost(cupy.cuda.get_elapsed_time(start, stop) / 1e3, pool.total_bytes())


def _free_memory(on_gpu: bool) -> int:
    if on_gpu:
        free: int = _cupy().cuda.Device().mem_info[0]
        return free
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) * 1024
    raise RuntimeError("/proc/meminfo does not say how much memory is available")


def _cupy() -> Any:
    import cupy

    return cupy
