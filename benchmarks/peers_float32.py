"""float32 on one GPU: cupyflash exact and in TF32, beside torch's memory-efficient attention, in interleaved rounds.

16,384 tokens of hidden size 2,048; TFLOP/s, the backward counted as 2.5 forwards. Each result is first compared with
float64 on its first rows.

    python benchmarks/peers_float32.py --seqlens 1024,8192
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from typing import Any

import cupy as cp
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import cupyflash

TOKENS, HIDDEN, ROWS = 16384, 2048, 64
Run = Callable[[], Any]


def runs(seqlen: int, head_dim: int, causal: bool) -> dict[str, dict[str, Run]]:
    """Per provider: its forward and its backward."""
    shape = (TOKENS // seqlen, seqlen, HIDDEN // head_dim, head_dim)
    q, k, v, dout = (torch.randn(shape, device="cuda") for _ in range(4))
    result: dict[str, dict[str, Run]] = {}
    for name, precision in (("ieee", "ieee"), ("tf32", "tf32")):
        qc, kc, vc, dc = (cp.from_dlpack(x) for x in (q, k, v, dout))
        options: dict[str, Any] = {"causal": causal, "precision": precision}
        out, lse = cupyflash.attention(qc, kc, vc, return_lse=True, **options)

        def forward(a: Any = (qc, kc, vc), options: Any = options) -> Any:
            return cupyflash.attention(*a, **options)

        def backward(a: Any = (dc, qc, kc, vc, out, lse), options: Any = options) -> Any:
            return cupyflash.attention_backward(*a, **options)

        result[name] = {"forward": forward, "backward": backward}

    tq, tk, tv = (x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v))

    def torch_forward() -> Any:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(tq, tk, tv, is_causal=causal)

    attended = torch_forward()
    dt = dout.transpose(1, 2)
    result["torch-eff"] = {
        "forward": torch_forward,
        "backward": lambda: torch.autograd.grad(attended, (tq, tk, tv), dt, retain_graph=True),
    }
    want = reference(q, k, v, causal)
    for name, provider in result.items():
        got = provider["forward"]()
        rows = got[:1, :, :ROWS].transpose(1, 2) if name == "torch-eff" else torch.from_dlpack(got)[:1, :ROWS]
        error = ((rows.double() - want).norm() / want.norm()).item()
        if not error < (1e-5 if name == "ieee" else 2e-3):
            raise AssertionError(f"{name} is off by {error} at {shape}")
    return result


def reference(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """The first rows of the first batch entry in float64."""
    q, k, v = q[:1, :ROWS].double(), k[:1].double(), v[:1].double()
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    if causal:
        i, j = torch.arange(ROWS, device="cuda"), torch.arange(k.shape[1], device="cuda")
        scores = scores.masked_fill(j[None] > i[:, None], float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


def milliseconds(run: Run, scratch: Any) -> float:
    run()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(3)]
    for start, end in pairs:
        scratch.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlens", default="1024,8192")
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    scratch = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "cupy", cp.__version__)
    print("direction d S mask".ljust(34), "ieee tf32 torch-eff  (TFLOP/s)")
    for head_dim in map(int, arguments.head_dims.split(",")):
        for seqlen in map(int, arguments.seqlens.split(",")):
            for causal in (False, True):
                providers = runs(seqlen, head_dim, causal)
                flops = 4 * TOKENS * seqlen * HIDDEN / (2 if causal else 1)
                for direction, factor in (("forward", 1.0), ("backward", 2.5)):
                    times: dict[str, list[float]] = {name: [] for name in providers}
                    for _ in range(arguments.rounds):
                        for name in random.sample(list(providers), len(providers)):
                            times[name].append(milliseconds(providers[name][direction], scratch))
                    rates = [factor * flops / statistics.median(times[name]) / 1e9 for name in providers]
                    label = f"{direction} {head_dim} {seqlen} {'causal' if causal else 'full'}"
                    print(label.ljust(34), " ".join(f"{rate:8.1f}" for rate in rates), flush=True)


if __name__ == "__main__":
    main()
