"""Times every tile configuration of the tensor-core kernels on the GPU at hand, and prints the fastest per kind of problem.

All configurations of a task are timed in interleaved rounds in random order, on 16,384 tokens of hidden size 2,048 cut
into sequences of two lengths; a configuration's figure is the geometric mean over both. Spilling kernels are left out.

    python benchmarks/sweep.py --tasks forward,backward --head-dims 64,128,256 --yaml winners.yaml
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import cupy as cp
import yaml

from cupyflash.dispatch import plan_backward, plan_forward
from cupyflash.engine import _Prepared, _constants, _strides
from cupyflash.problem import Problem
from cupyflash.runtime.cuda import CudaRuntime
from cupyflash.runtime.params import BACKWARD, FORWARD
from cupyflash.tiles import TileConfig
from cupyflash.tuning.space import space
from cupyflash.tuning.store import key

TOKENS, HIDDEN = 16384, 2048


class Case:
    """One problem with its arrays."""

    def __init__(self, seqlen: int, head_dim: int, causal: bool, dtype: Any) -> None:
        shape = (TOKENS // seqlen, seqlen, HIDDEN // head_dim, head_dim)
        self.q, self.k, self.v, self.dout = (cp.random.standard_normal(shape, dtype=cp.float32).astype(dtype) for _ in range(4))
        self.out, self.dq, self.dk, self.dv = (cp.empty_like(self.q) for _ in range(4))
        self.lse = cp.zeros((shape[0], shape[2], seqlen), cp.float32)
        self.problem = Problem.of(self.q, self.k, self.v, causal=causal)
        self.flops = 4 * shape[0] * shape[2] * head_dim * seqlen**2 / (2 if causal else 1)

    def prepare(self, runtime: CudaRuntime, task: str, config: TileConfig) -> Any:
        """A function that runs the task once with the configuration."""
        limits = runtime.limits()
        if task == "forward":
            plan = plan_forward(self.problem, 16, limits, {"forward": config})
            arrays, struct = (self.q, self.k, self.v, self.out), FORWARD
            pointers = [a.data.ptr for a in (*arrays, self.lse)]
            launches = plan.launches
        else:
            problem = self.problem
            if task != "backward":
                problem = Problem.of(self.q, self.k, self.v, causal=problem.band.last is not None, deterministic=True)
            plan = plan_backward(problem, 16, limits, {task: config})
            arrays, struct = (self.dout, self.q, self.k, self.v, self.out, self.dq, self.dk, self.dv), BACKWARD
            self.workspace = cp.empty(plan.delta_floats + plan.dq_floats, cp.float32)
            pointers = [a.data.ptr for a in (*arrays[:5], self.lse, *arrays[5:], self.workspace)]
            pointers.append(pointers[-1] + 4 * plan.delta_floats)
            launches = {"backward": plan.launches, "backward_dkv": plan.launches[1:2], "backward_dq": plan.launches[2:]}[task]
        launchers = [runtime.load(kernel, grid) for kernel, grid in launches]
        spills = sum(runtime.raw_kernel(kernel).local_size_bytes for kernel, _ in launches)
        prepared = _Prepared(plan, launchers, struct, _constants(self.problem, plan.section, [_strides(a) for a in arrays]))
        workspace = getattr(self, "workspace", None)
        return spills, lambda keep=workspace: prepared.launch(*pointers)


def milliseconds(run: Any, scratch: Any, repeats: int) -> float:
    """Median time of a call, the L2 cache overwritten before each."""
    pairs = [(cp.cuda.Event(), cp.cuda.Event()) for _ in range(repeats)]
    for start, end in pairs:
        scratch.fill(0)
        start.record()
        run()
        end.record()
    pairs[-1][1].synchronize()
    return statistics.median(cp.cuda.get_elapsed_time(start, end) for start, end in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="forward,backward,backward_dkv,backward_dq")
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--seqlens", default="1024,8192")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--show", type=int, default=6)
    parser.add_argument("--yaml")
    arguments = parser.parse_args()
    runtime = CudaRuntime()
    device = cp.cuda.Device()
    scratch = cp.empty(256 << 20, cp.int8)
    winners = []
    for task in arguments.tasks.split(","):
        for head_dim in map(int, arguments.head_dims.split(",")):
            for causal in (False, True):
                cases = [Case(int(s), head_dim, causal, arguments.dtype) for s in arguments.seqlens.split(",")]
                configs = space(task, cases[0].problem, runtime.limits())  # type: ignore[arg-type]

                def compile_one(config: TileConfig, case: Case = cases[0], task: str = task) -> Any:
                    with device:
                        try:
                            return case.prepare(runtime, task, config)[0]
                        except Exception as error:
                            return repr(error)[:200]

                with ThreadPoolExecutor(16) as pool:
                    spills = list(pool.map(compile_one, configs))
                for config, spilled in zip(configs, spills, strict=True):
                    if isinstance(spilled, str):
                        print("failed:", task, config, spilled)
                clean = [c for c, s in zip(configs, spills, strict=True) if s == 0]
                times: dict[tuple[TileConfig, int], list[float]] = {}
                for _ in range(arguments.rounds):
                    order = [(config, n) for config in clean for n in range(len(cases))]
                    random.shuffle(order)
                    for config, n in order:
                        _, run = cases[n].prepare(runtime, task, config)
                        run()
                        times.setdefault((config, n), []).append(milliseconds(run, scratch, 4))
                factor = {"forward": 1.0, "backward": 2.5, "backward_dkv": 2.0, "backward_dq": 1.5}[task]

                def rate(config: TileConfig, n: int, times: Any = times, cases: Any = cases, factor: float = factor) -> float:
                    return factor * cases[n].flops / statistics.median(times[config, n]) / 1e9

                ranked = sorted(clean, key=lambda c: -math.prod(rate(c, n) for n in range(len(cases))))
                print(f"\n{task} d{head_dim} {'causal' if causal else 'full'}: {len(configs)} legal, {len(clean)} without spills; TFLOP/s at {arguments.seqlens}")
                for config in ranked[: arguments.show]:
                    print("  ", " ".join(f"{rate(config, n):6.1f}" for n in range(len(cases))), config, flush=True)
                names = ("task", "dtype", "head_dim", "head_dim_v", "masked")
                winners.append(dict(zip(names, key(task, cases[0].problem), strict=True), config=asdict(ranked[0])))  # type: ignore[arg-type]
    if arguments.yaml:
        with open(arguments.yaml, "w", encoding="utf-8") as file:
            yaml.safe_dump({"device": runtime.limits().name, "winners": winners}, file, sort_keys=False, default_flow_style=None, width=160)


if __name__ == "__main__":
    main()
