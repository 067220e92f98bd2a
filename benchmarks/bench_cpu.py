"""Attention on the CPU: cupyflash.cpu beside torch (if installed) and naive NumPy, in one run.

    python benchmarks/bench_cpu.py [--threads N] [--repeats N] [--backward] [--only TEXT]

All take turns, several times; the table shows the shortest time of each, and the most memory that cupyflash and NumPy
allocated at one time beyond inputs and outputs (torch's allocations are not seen from Python).
"""

import argparse
import functools
import platform
import time
import tracemalloc
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from cupyflash import cpu
from cupyflash.problem import Problem

try:
    import torch
except ImportError:
    torch = None

MiB = 2**20
NAIVE_MEMORY_LIMIT = 4096 * MiB  # of scores; beyond it naive NumPy is left out


@dataclass(frozen=True)
class Case:
    name: str
    shape: tuple[int, int, int, int, int, int]  # B, Sq, Sk, H, Hk, D
    dtype: str = "float32"
    causal: bool = False


CASES = [
    Case("S 4096", (1, 4096, 4096, 8, 8, 64)),
    Case("S 4096 causal", (1, 4096, 4096, 8, 8, 64), causal=True),
    Case("S 4096 float16", (1, 4096, 4096, 8, 8, 64), "float16"),
    Case("S 4096 bfloat16", (1, 4096, 4096, 8, 8, 64), "bfloat16"),
    Case("S 2048 D 128", (1, 2048, 2048, 8, 8, 128)),
    Case("S 2048 D 128 GQA causal", (1, 2048, 2048, 16, 4, 128), causal=True),
    Case("S 1024 D 256", (1, 1024, 1024, 8, 8, 256)),
    Case("S 512 x 8", (8, 512, 512, 12, 12, 64)),
    Case("S 128 x 64", (64, 128, 128, 12, 12, 64)),
    Case("S 16 x 64", (64, 16, 16, 12, 12, 64)),
    Case("decode 16384 GQA", (1, 1, 16384, 32, 8, 128)),
]


class Cupyflash:
    """cupyflash.cpu, called without the checks of the public functions."""

    def __init__(self, case, q, k, v, dout):
        self.problem = Problem.of(q, k, v, causal=case.causal)
        self.inputs, self.dout = (q, k, v), dout
        self.out = np.empty_like(q)
        self.lse = np.empty((q.shape[0], q.shape[2], q.shape[1]), np.float32)
        self.gradients = [np.empty_like(x) for x in self.inputs]

    def forward(self):
        cpu.forward(self.problem, *self.inputs, self.out, self.lse)

    def backward(self):
        cpu.backward(self.problem, self.dout, *self.inputs, self.out, self.lse, *self.gradients)


class Naive:
    """Three lines of NumPy in float32, forward only; NumPy gets the threads for its products."""

    def __init__(self, case, q, k, v, dout):
        self.case, self.scale = case, q.shape[3] ** -0.5
        self.q, self.k, self.v = q, k, v

    def forward(self):
        q, k, v = (x.swapaxes(1, 2).astype(np.float32, copy=False) for x in (self.q, self.k, self.v))
        group = q.shape[1] // k.shape[1]
        k, v = (x if group == 1 else x.repeat(group, axis=1) for x in (k, v))
        S = q * np.float32(self.scale) @ k.swapaxes(2, 3)
        if self.case.causal:
            S[..., ~np.tri(*S.shape[2:], S.shape[3] - S.shape[2], dtype=bool)] = -np.inf
        P = np.exp(S - S.max(axis=-1, keepdims=True))
        return (P @ v / P.sum(axis=-1, keepdims=True)).astype(self.q.dtype)

    backward = None


class Torch:
    """torch's scaled_dot_product_attention on (B, H, S, D) copies."""

    def __init__(self, case, q, k, v, dout):
        def tensor(x):
            half = x.dtype == ml_dtypes.bfloat16
            x = torch.from_numpy(np.ascontiguousarray(x.swapaxes(1, 2)).view(np.int16 if half else x.dtype))
            return (x.view(torch.bfloat16) if half else x).requires_grad_(dout is not None)

        self.tensors = [tensor(x) for x in (q, k, v)]
        # torch's causal mask is aligned at the top left; a single query that sees all keys needs none.
        options = {"is_causal": case.causal and q.shape[1] > 1, "enable_gqa": q.shape[2] != k.shape[2]}
        self.call = functools.partial(torch.nn.functional.scaled_dot_product_attention, **options)
        self.dout = None if dout is None else tensor(dout).detach()

    def forward(self):
        with torch.no_grad():
            return self.call(*self.tensors)

    def backward(self):
        self.out.backward(self.dout)

    def prepare_backward(self):
        self.out = self.call(*self.tensors)


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def peak(call):
    tracemalloc.start()
    call()
    size = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return size


def measure(case, repeats, backward):
    """Rows (pass, {name: seconds}, {name: bytes})."""
    B, Sq, Sk, H, Hk, D = case.shape
    dtype = np.dtype(getattr(ml_dtypes, case.dtype) if case.dtype == "bfloat16" else case.dtype)
    random = np.random.default_rng(0)
    shapes = (B, Sq, H, D), (B, Sk, Hk, D), (B, Sk, Hk, D), (B, Sq, H, D)
    q, k, v, dout = (random.standard_normal(shape, np.float32).astype(dtype) for shape in shapes)
    rivals = {"cupyflash": Cupyflash}
    if torch is not None:
        rivals["torch"] = Torch
    if B * H * Sq * Sk * 4 <= NAIVE_MEMORY_LIMIT:
        rivals["numpy"] = Naive
    rivals = {name: rival(case, q, k, v, dout if backward else None) for name, rival in rivals.items()}

    for direction in ("forward", "backward") if backward else ("forward",):
        able = {name: rival for name, rival in rivals.items() if getattr(rival, direction)}
        times = {name: [] for name in able}
        for _ in range(repeats + 1):  # the first is warm-up
            for name, rival in able.items():
                getattr(rival, f"prepare_{direction}", lambda: None)()
                times[name].append(seconds(getattr(rival, direction)))
        memory = {name: peak(getattr(rival, direction)) for name, rival in able.items() if name != "torch"}
        yield direction, {name: min(values[1:]) for name, values in times.items()}, memory


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=cpu.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    arguments = parser.parse_args()

    cpu.set_num_threads(arguments.threads)
    if torch is not None:
        torch.set_num_threads(arguments.threads)
    blas = ", ".join(f"{x['internal_api']} {x['version']} {x.get('architecture', '')}" for x in threadpool_info())
    print(f"{platform.processor() or platform.machine()}, {arguments.threads} threads, NumPy {np.__version__} ({blas})")
    print(f"torch {torch.__version__ if torch else 'is not installed'}\n")
    print(f"{'':32}{'cupyflash':>12}{'torch':>12}{'numpy':>12}   {'cupyflash':>12}{'numpy':>12}")
    with threadpool_limits(arguments.threads):
        for case in CASES:
            if arguments.only not in case.name:
                continue
            for direction, times, memory in measure(case, arguments.repeats, arguments.backward):
                cells = [f"{times[x] * 1e3:9.2f} ms" if x in times else "-" for x in ("cupyflash", "torch", "numpy")]
                sizes = [f"{memory[x] / MiB:8.1f} MiB" if x in memory else "-" for x in ("cupyflash", "numpy")]
                row = "".join(f"{x:>12}" for x in cells) + "   " + "".join(f"{x:>12}" for x in sizes)
                print(f"{case.name:24}{direction:8}{row}", flush=True)


if __name__ == "__main__":
    main()
