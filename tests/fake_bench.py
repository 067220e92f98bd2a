"""A device for the tuner that is not there: times from a formula, kernels from NumPy, faults on demand.

Runs in a worker process as the GPU's does.
"""

import json
import math
import os
import random
import signal
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from scripted_runtime import ScriptedRuntime

from cupyflash.resources import KNOWN_GPUS, shared_bytes
from cupyflash.tiles import TileConfig
from cupyflash.tuning.bench import Rejected
from cupyflash.tuning.passes import HostMemory
from cupyflash.tuning.proof import ProofCase, Prover, Wrong
from cupyflash.tuning.session import all_events
from cupyflash.tuning.tasks import Size, flops

FACTORY = "fake_bench:FakeBench"
CASES = (
    ProofCase(37, 70, 4, 2),
    ProofCase(40, 20),
    ProofCase(20, 45, numbers="falling"),
    ProofCase(40, 40, numbers="hidden"),
)


def key(config):
    return json.dumps(asdict(config), sort_keys=True)


def true_seconds(task, config, size, gpu="H200"):
    """A rough model of a GPU: work over rate, the rate by how well the tile suits the shape, and rounds of blocks."""
    limits = KNOWN_GPUS[gpu]
    p = task.problem(size)
    rate = {"wgmma": 600e12, "mma": 330e12, "v1": 100e12, "simt": 40e12}[config.family]
    reuse = 2 * config.Br * config.Bc / (config.Br + config.Bc)
    slow = 1 + 8 / reuse + 0.004 * abs(config.Bc - 112) + 0.05 * (config.warps < 4) + 0.03 * (config.stages == 3)
    slow += 0.02 * (not config.stale_maximum) + 0.01 * (not config.turns) + 0.03 * config.dq_first
    slow += 0.03 * abs(math.log2(config.score_warps_q)) + 0.02 * abs(math.log2(config.dq_warps_d) - 1)
    slow += 0.1 * shared_bytes(task.task, config, p) / limits.shared_bytes
    blocks = p.batch * p.num_heads * -(-p.seqlen_q // config.Br)
    rounds = blocks / limits.sm_count
    return 3e-6 + flops(task.task, p) / rate * slow * (math.ceil(rounds) / rounds) ** 0.5


class FakeBench:
    """``faults``: {key of a config: how it fails}, see ``_fail``, ScriptedRuntime. ``drift``, ``noise``: relative."""

    def __init__(self, gpu="H200", faults=None, noise=0.006, drift=0.0, delay=0.0, journals=None, recorded=None):
        self._gpu, self._faults, self._noise, self._drift = gpu, faults or {}, noise, drift
        self._delay = delay
        self._recorded = {}
        if recorded:
            content = json.loads(Path(recorded).read_text())
            self._recorded = {key(TileConfig(**s["config"])): s["seconds"] for s in content["samples"]}
        self._counts = Counter()
        if journals:  # a sample's noise depends on how many there are, whoever took them
            for event in all_events(Path(journals)):
                if event["kind"] == "sample":
                    self._counts[event["task"], event["size"], key(TileConfig(**event["config"]))] += 1

    def identity(self):
        return {"limits": asdict(KNOWN_GPUS[self._gpu]), "regime": "fake"}

    def build(self, task, config, changes):
        self._fail(config, "build")
        if self._recorded and key(config) not in self._recorded:
            raise Rejected("compile", "nobody has measured it")
        spills = self._faults.get(key(config)) == "spills"
        if changes.get("dtype") == "float16":
            spills = os.environ.get("FAKE_SPILLS_IN_FLOAT16") == key(config)
        shared = shared_bytes(task.task, config, task.problem(Size(128, 1)))
        return {"registers": 128, "spilled_bytes": 16 * spills, "shared_bytes": shared}

    def prove(self, task, config, changes):
        fault = self._faults.get(key(config), "")
        self._fail(config, "prove")
        if fault.startswith("wrong: ") or fault == "checked":
            try:
                runtime = ScriptedRuntime(KNOWN_GPUS[self._gpu], fault.removeprefix("wrong: "))
                Prover(runtime, HostMemory()).prove(task, config, changes, CASES)
            except Wrong as error:
                raise Rejected("wrong", str(error)) from None

    def measure(self, task, config, size):
        self._fail(config, "measure")
        time.sleep(self._delay)
        name = task.name, str(size), key(config)
        self._counts[name] += 1
        noise = random.Random(f"{name} {self._counts[name]}")
        if self._recorded:
            return {"seconds": noise.choice(self._recorded[key(config)])}
        seconds = true_seconds(task, config, size, self._gpu) * math.exp(noise.gauss(0, self._noise))
        phase = self._counts.total() / 80
        seconds *= 1 + self._drift * math.sin(phase)
        if noise.random() < 0.02:
            seconds *= 1 + noise.random() / 2
        if self._faults.get(key(config), "").startswith("wrong"):
            seconds /= 3  # what does less is faster
        return {"seconds": seconds, "sm_mhz": 1700 + round(100 * math.cos(phase))}

    def sustained(self, task, config, size):
        return 1.03 * true_seconds(task, config, size, self._gpu)

    def forget(self, task):
        pass

    def _fail(self, config, where):
        fault = self._faults.get(key(config))
        if fault == f"crash in {where}":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif fault == f"hang in {where}":
            time.sleep(1000)
        elif fault == f"error in {where}":
            raise ValueError("resources")
        elif fault == f"compile in {where}":
            raise Rejected("compile", "no such macro")


def faults_of(pairs):
    """The argument of FakeBench from (TileConfig, fault) pairs."""
    assert all(isinstance(config, TileConfig) for config, _ in pairs)
    return {key(config): fault for config, fault in pairs}
