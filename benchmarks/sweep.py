"""Times every tile configuration of the tensor-core kernels on a GPU and keeps the fastest per kind of problem.

All configurations of a task are timed in interleaved rounds in random order, on 16,384 tokens of hidden size 2,048
cut into sequences of two lengths; a configuration's figure is the geometric mean over both. Kernels that spill are left
out.

    python benchmarks/sweep.py --tasks forward,backward --head-dims 64,128,256 --yaml winners.yaml
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cupy as cp
import ml_dtypes
import numpy as np

import cupyflash
from cupyflash.dispatch import plan_backward, plan_forward
from cupyflash.engine import prepare
from cupyflash.problem import Problem
from cupyflash.runtime.cuda import CudaRuntime
from cupyflash.runtime.params import BACKWARD, BACKWARD_TENSOR, FORWARD, FORWARD_TENSOR
from cupyflash.tiles import Task, TileConfig
from cupyflash.tuning.entries import Entry, Kind, Measured, Winners
from cupyflash.tuning.files import text_of
from cupyflash.tuning.kernel_hash import kernel_hash
from cupyflash.tuning.space import space

TOKENS, HIDDEN = 16384, 2048
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "tf32": np.float32}
PRODUCTS = {"forward": 2, "backward": 5, "backward_dkv": 4, "backward_dq": 3}  # matrix products of a task
Run = Callable[[], None]


class Case:
    """One problem with its arrays, the forward's results included: gradients of rubbish would take the rare paths."""

    def __init__(self, seqlen: int, head_dim: int, causal: bool, dtype: str, deterministic: bool) -> None:
        shape = (TOKENS // seqlen, seqlen, HIDDEN // head_dim, head_dim)
        self.q, self.k, self.v, self.dout = (
            cp.random.standard_normal(shape, dtype=cp.float32).astype(DTYPES[dtype]) for _ in range(4)
        )
        options: dict[str, Any] = {"causal": causal, "precision": "tf32" if dtype == "tf32" else None}
        self.out, self.lse = cupyflash.attention(self.q, self.k, self.v, return_lse=True, **options)
        self.dq, self.dk, self.dv = (cp.empty_like(self.q) for _ in range(3))
        self.problem = Problem.of(self.q, self.k, self.v, deterministic=deterministic, **options)
        self.flops_per_product = 2 * shape[0] * shape[2] * head_dim * seqlen**2 / (2 if causal else 1)

    def prepare(self, runtime: CudaRuntime, task: Task, config: TileConfig) -> tuple[int, Run]:
        """(bytes of spills, a function that runs the task once)."""
        if task == "forward":
            plan = plan_forward(self.problem, 16, runtime.limits(), {task: config})
            arrays, struct = (self.q, self.k, self.v, self.out), FORWARD_TENSOR if plan.map_rows else FORWARD
            pointers = [a.data.ptr for a in (*arrays, self.lse)]
        else:
            plan = plan_backward(self.problem, 16, runtime.limits(), {task: config})
            arrays = (self.dout, self.q, self.k, self.v, self.out, self.dq, self.dk, self.dv)
            struct = BACKWARD_TENSOR if plan.map_rows else BACKWARD
            workspace = cp.empty(plan.delta_floats + plan.dq_floats, cp.float32)
            pointers = [a.data.ptr for a in (*arrays[:5], self.lse)] + [0]  # no dlse
            pointers += [a.data.ptr for a in (*arrays[5:], workspace)]
            pointers.append(pointers[-1] + 4 * plan.delta_floats)
        prepared = prepare(runtime, self.problem, plan, struct, arrays)
        if task == "backward_dkv":
            prepared.launchers = prepared.launchers[:2]
        elif task == "backward_dq":
            prepared.launch(*pointers)  # delta has to be there once
            prepared.launchers = prepared.launchers[2:]
        spills = sum(runtime.raw_kernel(kernel).local_size_bytes for kernel, _ in plan.launches)
        keep = None if task == "forward" else workspace
        return spills, lambda keep=keep: prepared.launch(*pointers)  # type: ignore[misc]


def milliseconds(run: Run, scratch: Any, repeats: int = 4) -> float:
    """Median time of a call, the L2 cache overwritten before each."""
    run()
    pairs = [(cp.cuda.Event(), cp.cuda.Event()) for _ in range(repeats)]
    for start, end in pairs:
        scratch.fill(0)
        start.record()
        run()
        end.record()
    pairs[-1][1].synchronize()
    return statistics.median(cp.cuda.get_elapsed_time(start, end) for start, end in pairs)


def sweep(
    runtime: CudaRuntime, task: Task, cases: list[Case], rounds: int, where: dict[str, int | str]
) -> list[tuple[TileConfig, list[float]]]:
    """(configuration, TFLOP/s per case) of all with these values that do not spill, fastest first."""
    device = cp.cuda.Device()

    def spills(config: TileConfig) -> int:
        with device:
            return cases[0].prepare(runtime, task, config)[0]

    configs = [
        config
        for config in space(task, cases[0].problem, runtime.limits())
        if all(getattr(config, name) == value for name, value in where.items())
    ]
    with ThreadPoolExecutor(16) as pool:
        clean = [config for config, spilled in zip(configs, pool.map(spills, configs), strict=True) if not spilled]
    scratch = cp.empty(256 << 20, cp.int8)
    times: dict[tuple[TileConfig, int], list[float]] = defaultdict(list)
    for _ in range(rounds):
        order = [(config, n) for config in clean for n in range(len(cases))]
        for config, n in random.sample(order, len(order)):
            times[config, n].append(milliseconds(cases[n].prepare(runtime, task, config)[1], scratch))
    rates = [
        [PRODUCTS[task] * case.flops_per_product / statistics.median(times[c, n]) / 1e9 for n, case in enumerate(cases)]
        for c in clean
    ]
    return sorted(zip(clean, rates, strict=True), key=lambda pair: -math.prod(pair[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="forward,backward,backward_dkv,backward_dq")
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--seqlens", default="1024,8192")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--show", type=int, default=5)
    parser.add_argument("--where", default="", help="only tiles with these values, as in family=wgmma,Br=64")
    parser.add_argument("--yaml", help="file to write the winners to")
    arguments = parser.parse_args()
    pairs = (pair.split("=") for pair in arguments.where.split(",") if pair)
    where = {name: int(value) if value.isdigit() else value for name, value in pairs}
    runtime = CudaRuntime()
    winners = []
    for task in arguments.tasks.split(","):
        for head_dim in map(int, arguments.head_dims.split(",")):
            for causal in (False, True):
                deterministic = task in ("backward_dkv", "backward_dq")
                lengths = map(int, arguments.seqlens.split(","))
                cases = [Case(length, head_dim, causal, arguments.dtype, deterministic) for length in lengths]
                ranked = sweep(runtime, task, cases, arguments.rounds, where)
                print(f"{task} d{head_dim} {'causal' if causal else 'full'}, TFLOP/s at {arguments.seqlens}:")
                for config, rates in ranked[: arguments.show]:
                    numbers = {name: value for name, value in asdict(config).items() if value != 1}
                    print("  ", " ".join(f"{rate:6.1f}" for rate in rates), numbers, flush=True)
                if ranked:
                    kind, winner = Kind.of(task, cases[0].problem).general(), ranked[0][0]
                    measured = Measured(kernel=kernel_hash(winner.family, task), provenance="benchmarks/sweep.py")
                    winners.append(Entry(kind, winner, measured))
    if arguments.yaml:
        text = text_of(Winners(runtime.limits(), tuple(winners)))
        Path(arguments.yaml).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
