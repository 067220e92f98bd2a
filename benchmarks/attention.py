"""Times attention, forward and backward, beside whatever else is installed; writes CSV, and a plot with --plot.

    python benchmarks/attention.py --device gpu --dtype bfloat16 --out results.csv --plot results.png

All providers get the same arrays in the same run. Each round times every provider once in a random order, since a
kernel that follows a hot one runs at lower clocks; the median over the rounds counts. Ratios within a run are the
result: absolute figures move with temperature and power.
"""

import argparse
import csv
import itertools
import random
import statistics
import time
from dataclasses import dataclass

import numpy as np

import cupyflash

ROUNDS = 11
L2_FLUSH_BYTES = 256 << 20


@dataclass(frozen=True)
class Case:
    batch: int
    seqlen: int
    heads: int
    head_dim: int
    causal: bool

    def flops(self, backward):
        """Of the matrix products: two in the forward pass, five in the backward; a causal mask halves them."""
        products = 5 if backward else 2
        total = products * 2 * self.batch * self.heads * self.seqlen**2 * self.head_dim
        return total / 2 if self.causal else total


def cases(device):
    """16,384 tokens of width 2,048 on a GPU, in sequences of every length; less of it on a CPU."""
    tokens, width, lengths, head_dims = (
        (16_384, 2_048, (512, 1024, 2048, 4096, 8192, 16_384), (64, 128, 256))
        if device == "gpu"
        else (4096, 256, (512, 1024, 2048, 4096), (64, 128))
    )
    for head_dim, causal, seqlen in itertools.product(head_dims, (False, True), lengths):
        yield Case(tokens // seqlen, seqlen, width // head_dim, head_dim, causal)


# A provider takes q, k, v, dout and causal, and returns its forward and its backward (or None), which take nothing.


def with_cupyflash(q, k, v, dout, causal):
    out, lse = cupyflash.attention(q, k, v, causal=causal, return_lse=True)
    return (
        lambda: cupyflash.attention(q, k, v, causal=causal, return_lse=True),
        lambda: cupyflash.attention_backward(dout, q, k, v, out, lse, causal=causal),
    )


def with_standard_attention(q, k, v, dout, causal):
    return lambda: cupyflash.standard_attention(q, k, v, causal=causal), None


def with_torch(backend_name):
    def provider(q, k, v, dout, causal):
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v, dout = (_tensor(torch, x).transpose(1, 2).requires_grad_() for x in (q, k, v, dout))
        backend = getattr(SDPBackend, backend_name)

        def forward():
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

        out = forward()
        return forward, lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    return provider


def _tensor(torch, array):
    if array.dtype.name == "bfloat16":
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def providers(device):
    found = {"cupyflash": with_cupyflash, "standard": with_standard_attention}
    try:
        import torch
    except ImportError:
        return found
    if device == "cpu":
        return found | {"torch": with_torch("FLASH_ATTENTION")}
    if torch.cuda.is_available():
        found |= {"torch-cudnn": with_torch("CUDNN_ATTENTION"), "torch-flash": with_torch("FLASH_ATTENTION")}
    return found


def clock(device):
    """A function that times a call in seconds: on a GPU by events, with the L2 cache flushed before."""
    if device == "cpu":

        def seconds(call):
            start = time.perf_counter()
            call()
            return time.perf_counter() - start

        return seconds

    import cupy

    flush = cupy.empty(L2_FLUSH_BYTES, cupy.uint8)

    def seconds(call):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        flush.fill(0)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        return cupy.cuda.get_elapsed_time(start, stop) / 1e3

    return seconds


def inputs(case, device, dtype):
    if dtype == "bfloat16":
        import ml_dtypes

        dtype = ml_dtypes.bfloat16
    rng = np.random.default_rng(0)
    shape = (case.batch, case.seqlen, case.heads, case.head_dim)
    arrays = [rng.standard_normal(shape, dtype=np.float32).astype(dtype) for _ in range(4)]
    if device == "cpu":
        return arrays
    import cupy

    return [cupy.asarray(array) for array in arrays]


def measure(case, device, dtype, rounds):
    """Rows of (provider, pass, seconds) of all providers that can compute this case."""
    seconds = clock(device)
    arrays = inputs(case, device, dtype)
    calls = {}
    for name, provider in providers(device).items():
        try:
            for kind, call in zip(("forward", "backward"), provider(*arrays, case.causal), strict=True):
                if call is not None:
                    call()  # warm: compiled, tuned, allocated
                    calls[name, kind] = call
        except (MemoryError, RuntimeError, TypeError) as error:
            print(f"  {name}: {type(error).__name__}: {error}"[:160])
    times = {key: [] for key in calls}
    for _ in range(rounds):
        for key in random.sample(list(calls), len(calls)):
            times[key].append(seconds(calls[key]))
    return [(*key, statistics.median(values)) for key, values in times.items()]


def plot(rows, path):
    from matplotlib import pyplot

    panels = sorted({(row["head_dim"], row["causal"], row["pass"]) for row in rows})
    columns = 4
    figure, axes = pyplot.subplots(
        -(-len(panels) // columns), columns, figsize=(16, 3.2 * -(-len(panels) // columns)), squeeze=False
    )
    for axis, panel in zip(axes.flat, panels, strict=False):
        chosen = [row for row in rows if (row["head_dim"], row["causal"], row["pass"]) == panel]
        for name in dict.fromkeys(row["provider"] for row in chosen):
            mine = [row for row in chosen if row["provider"] == name]
            axis.plot([row["seqlen"] for row in mine], [row["tflops"] for row in mine], marker="o", label=name)
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_title(f"{panel[2]}, head_dim {panel[0]}{', causal' if panel[1] else ''}")
        axis.set_ylabel("TFLOP/s")
    axes.flat[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--max-seqlen", type=int, default=1 << 30, help="leave longer sequences out")
    parser.add_argument("--out", help="CSV file")
    parser.add_argument("--plot", help="PNG file")
    options = parser.parse_args()
    dtype = options.dtype or ("float16" if options.device == "gpu" else "float32")

    rows = []
    for case in cases(options.device):
        if case.seqlen > options.max_seqlen:
            continue
        for name, kind, seconds in measure(case, options.device, dtype, options.rounds):
            tflops = case.flops(kind == "backward") / seconds / 1e12
            rows.append(
                vars(case) | {"dtype": dtype, "provider": name, "pass": kind, "seconds": seconds, "tflops": tflops}
            )
            print(
                f"B={case.batch:<3} S={case.seqlen:<6} H={case.heads:<3} D={case.head_dim:<4} "
                f"{'causal' if case.causal else 'full':7} {kind:9} {name:12} "
                f"{seconds * 1e3:10.3f} ms {tflops:8.3f} TFLOP/s"
            )
    if options.out:
        with open(options.out, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
