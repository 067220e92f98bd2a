"""What the tuner must reach on a GPU, each part with a time limit of its own and one line of result.

    python benchmarks/tuner_check.py tune --seconds 450 --out build/tune
    python benchmarks/tuner_check.py resources --seconds 60
    python benchmarks/tuner_check.py held --seconds 60
    python benchmarks/tuner_check.py regret --seconds 90 --out tests/recorded
    python benchmarks/tuner_check.py noise --seconds 20

``tune`` writes the winners where calls find them, which ``held`` then compares with the heuristic on sizes that were
not tuned: run it in the same environment, with CUPYFLASH_CACHE_DIR set to keep them apart from one's own. GPU work is
done by the tuner's workers; this process only asks. The exit status is 1 if anything is not reached, or was not
measured for want of time.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cupyflash import dispatch, heuristics
from cupyflash.resources import Limits, shared_bytes
from cupyflash.tiles import TileConfig
from cupyflash.tuning import tune
from cupyflash.tuning.driver import CandidateFailed, Worker, WorkerSpec
from cupyflash.tuning.family_search import BATCH
from cupyflash.tuning.journal import short
from cupyflash.tuning.progress import suitable
from cupyflash.tuning.race import Failed, Rung, gain_over, race
from cupyflash.tuning.space import families, space
from cupyflash.tuning.tasks import Size, TuningTask, default_tasks, sizes
from cupyflash.tuning.tuner import visible_gpus

TUNE_SECONDS = 600
HELD_SHAPES = 40
ORACLE_SAMPLES = 32
TUNES = 5
LEAST_RACES = 20  # of either kind, or shares of them say little
DTYPES = ("bfloat16", "bfloat16", "float16", "tf32", "float32")


@contextmanager
def worker_of(spec: WorkerSpec) -> Iterator[tuple[Worker, Limits]]:
    worker = Worker(spec)
    worker.start()
    try:
        yield worker, Limits(**worker.identity["limits"])
    finally:
        worker.stop()


Checked = tuple[str, bool]  # what came out, and whether that is what it must be


def check_tune(spec: WorkerSpec, seconds: float, out: Path | None) -> Checked:
    """The full quick tune."""
    tuned = tune(budget=seconds, folder=out, workers=[spec], progress=suitable())
    first: dict[Any, Any] = {}
    for winner in tuned.winners:
        first.setdefault((winner.task, winner.size), winner)
    ratios = [w.seconds / w.default_seconds for w in first.values()]
    shares = ", ".join(f"{name} {tuned.seconds[name] / tuned.seconds['all']:.0%}" for name in tuned.seconds)
    worst, spent = max(ratios, default=math.inf), tuned.seconds["all"]
    good = worst <= 1.01 and spent <= TUNE_SECONDS and not tuned.unreached and tuned.seconds["proof"] < 0.2 * spent
    return (
        f"{spent:.0f} s for {len(first)} problems, {len(tuned.unreached)} tasks not reached; "
        f"tuned / default {_mean(ratios):.3f}, worst {worst:.3f}; "
        f"{sum(not w.is_default for w in first.values())} faster; of the time: {shares} (proof: less than 20%); "
        f"out: {tuned.failures}; report {tuned.report}"
    ), good


def check_resources(spec: WorkerSpec, seconds: float, out: Path | None) -> Checked:
    """Predicted against actual shared memory, and launches, over a random part of the whole space."""
    until = time.monotonic() + seconds
    counts: Counter[str] = Counter()
    problems: list[str] = []
    with worker_of(spec) as (worker, limits):
        everything = [
            (task, config)
            for task in default_tasks("full")
            for config in space(task.task, task.problem(task.sizes[0]), limits)
        ]
        picked = random.Random(0).sample(everything, len(everything))
        while picked and time.monotonic() < until:
            batch, picked = picked[: 4 * BATCH], picked[4 * BATCH :]
            for task, config in batch:
                worker.prefetch(task, [config])
            for task, config in batch:
                if time.monotonic() > until:
                    break
                outcome, message = _outcome(worker, task, config)
                counts[outcome] += 1
                if outcome not in ("right", "spills"):
                    problems.append(f"{task.name} {config}: {message}")
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    listed = "".join(f"\n    {p}" for p in problems[:10])
    return f"{counts.total()} of {len(everything)} configurations: {told}{listed}", bool(counts) and not problems


def _outcome(worker: Worker, task: TuningTask, config: TileConfig) -> tuple[str, str]:
    try:
        built = worker.build(task, config)
        predicted = shared_bytes(task.task, config, task.problem(Size(128, 1)))
        if built["shared_bytes"] != predicted:
            return "other shared memory", f"{built['shared_bytes']} bytes, predicted {predicted}"
        worker.prove(task, config)  # launches it
    except CandidateFailed as error:
        return error.kind, str(error)
    return ("spills" if built["spilled_bytes"] else "right"), ""


def held_shapes(count: int) -> list[tuple[TuningTask, Size]]:
    """Random kinds and sizes; none of the sizes that are tuned."""
    rng = random.Random(40)
    shapes = []
    while len(shapes) < count:
        task = rng.choice(("forward", "forward", "backward", "backward", "backward_dkv", "backward_dq"))
        dtype, head_dim = rng.choice(DTYPES), rng.choice((64, 128, 256))
        seqlen = rng.choice((64, 197, 256, 384, 640, 1000, 1536, 2048, 3000, 6000, 8192))
        size = Size(seqlen, max(1, rng.choice((256, 4096, 16384)) // seqlen))
        if size not in sizes(dtype):
            shapes.append((TuningTask(task, dtype, head_dim, head_dim, rng.random() < 0.5, (size,)), size))
    return shapes


def check_held(spec: WorkerSpec, seconds: float, out: Path | None) -> Checked:
    """Tuned against heuristic tiles on held shapes, in turn."""
    until = time.monotonic() + seconds
    rows: list[tuple[float, str]] = []
    same = 0
    with worker_of(spec) as (worker, limits):
        pairs = []
        for task, size in held_shapes(HELD_SHAPES):
            problem = task.problem(size)
            tuned, origin = dispatch.choose(task.task, problem, limits)
            default = heuristics.candidates(task.task, problem, limits)[0]
            pairs.append((task, size, tuned, default, origin))
            worker.prefetch(task, list(dict.fromkeys([tuned, default])))
        for task, size, tuned, default, origin in pairs:
            if time.monotonic() > until:
                break
            same += tuned == default
            ratio = 1.0 if tuned == default else _ratio(worker, task, size, tuned, default)
            rows.append((ratio, f"{ratio:.3f} {task.name} {size} {tuned.family} ({origin})"))
            worker.forget(task)
    rows.sort(reverse=True)
    ratios = [ratio for ratio, _ in rows]
    good = len(rows) == HELD_SHAPES and max(ratios) <= 1.01 and _mean(ratios) <= 0.95
    return (
        f"{len(rows)} of {HELD_SHAPES} shapes ({same} with the same tiles): tuned / heuristic {_mean(ratios):.3f}, "
        f"{sum(ratio > 1.01 for ratio in ratios)} above 1.01; the slowest:"
        + "".join(f"\n    {row}" for _, row in rows[:5])
    ), good


def _ratio(worker: Worker, task: TuningTask, size: Size, config: TileConfig, other: TileConfig) -> float:
    outcome = race([config], other, _measure(worker, task, size), preference=str, rungs=(Rung(15, 2),))
    return 1 - gain_over(outcome, config, other)[0]


def _measure(worker: Worker, task: TuningTask, size: Size) -> Callable[[TileConfig, int], float]:
    def measure(config: TileConfig, number: int) -> float:
        try:
            return float(worker.measure(task, config, size)["seconds"])
        except CandidateFailed as error:
            raise Failed(str(error)) from error

    return measure


REGRET_TASKS = (
    TuningTask("backward_dq", "bfloat16", 128, 128, True, (Size(4096, 4),)),
    TuningTask("forward", "bfloat16", 256, 256, True, (Size(4096, 4),)),
    TuningTask("forward", "tf32", 128, 128, False, (Size(512, 16),)),
)


def check_regret(spec: WorkerSpec, seconds: float, out: Path | None) -> Checked:
    """Winners of tunes from empty against an oracle: every configuration, sampled often."""
    until = time.monotonic() + seconds
    lines, worst = [], []
    for task in REGRET_TASKS:
        if time.monotonic() > until:
            break
        with worker_of(spec) as (worker, limits):
            samples = _oracle(worker, task, limits)
        oracle = {config: statistics.median(taken) for config, taken in samples.items()}
        if out is not None:
            _record(out / f"{task.name}.json", limits, task, samples)
        found = []
        for seed in range(TUNES):
            if time.monotonic() > until:
                break
            with tempfile.TemporaryDirectory() as folder:
                tuned = tune([task], workers=[spec], folder=folder, store=False, seed=seed)
            found += [winner.config for winner in tuned.winners[:1]]
        # What the oracle has not measured is of another family, or spills: nobody knows what it costs.
        regrets = [oracle.get(config, math.inf) / min(oracle.values()) - 1 for config in found]
        worst.append(max(regrets) if len(regrets) == TUNES else math.inf)
        lines.append(
            f"{task.name}: {len(oracle)} configurations, {len(found)} tunes, {len(set(found))} winners, regret "
            f"{statistics.fmean(regrets):.2%}, worst {max(regrets):.2%}"
            if regrets
            else f"{task.name}: no tune"
        )
    return "; ".join(lines), len(worst) == len(REGRET_TASKS) and max(worst) <= 0.01


def _oracle(worker: Worker, task: TuningTask, limits: Limits) -> dict[TileConfig, list[float]]:
    """Seconds of every configuration that compiles without spills; all in turn, the fast ones often."""
    (size,) = task.sizes
    members = next(iter(families(space(task.task, task.problem(size), limits)).values()))
    default = dispatch.choose(task.task, task.problem(size), limits)[0]
    worker.prefetch(task, members)
    clean = []
    for config in dict.fromkeys([default, *members]):
        try:
            if config == default or not worker.build(task, config)["spilled_bytes"]:
                clean.append(config)
        except CandidateFailed:
            continue
    rungs = (Rung(1, len(clean)), Rung(5, 20), Rung(ORACLE_SAMPLES, 20))
    outcome = race(clean, default, _measure(worker, task, size), preference=str, rungs=rungs)
    return {config: list(taken.values()) for config, taken in outcome.samples.items() if taken}


def _record(path: Path, limits: Limits, task: TuningTask, samples: dict[TileConfig, list[float]]) -> None:
    """For tests/recorded, with which the tuner is tested where there is no GPU."""
    content = {
        "limits": asdict(limits),
        "task": asdict(task),
        "samples": [{"config": short(config), "seconds": taken} for config, taken in samples.items()],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def check_noise(spec: WorkerSpec, seconds: float, out: Path | None) -> Checked:
    """The default against itself, and against itself slowed down by 5%."""
    until = time.monotonic() + seconds
    told = Counter[str]()
    with worker_of(spec) as (worker, limits):
        tasks = default_tasks("quick", tasks=("forward", "backward"), dtypes=("bfloat16",), head_dims=(64, 128))
        cases = [(task, size) for task in tasks for size in task.sizes]
        for number in range(1000):
            if time.monotonic() > until:
                break
            task, size = cases[number % len(cases)]
            config = dispatch.choose(task.task, task.problem(size), limits)[0]
            slowed = 1.05 if number % 2 else 1.0

            def measure(label: str, _: int, task=task, size=size, config=config, slowed=slowed) -> float:
                seconds = float(worker.measure(task, config, size)["seconds"])
                return seconds * (slowed if label == "default" else 1)

            outcome = race(["candidate"], "default", measure, preference=str, seed=number)
            told["planted" if number % 2 else "equal"] += 1
            if outcome.winner == "candidate":
                told["found" if number % 2 else "false"] += 1
    good = told["false"] <= 0.05 * told["equal"] and told["found"] >= 0.95 * told["planted"] > LEAST_RACES
    return (
        f"A/A: {told['false']} false of {told['equal']} (at most 5%); "
        f"5% slow-down: {told['found']} found of {told['planted']} (at least 95%)"
    ), good


def _mean(ratios: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios))) if ratios else 1.0


CHECKS: dict[str, Callable[[WorkerSpec, float, Path | None], Checked]] = {
    "tune": check_tune,
    "resources": check_resources,
    "held": check_held,
    "regret": check_regret,
    "noise": check_noise,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=CHECKS)
    parser.add_argument("--seconds", type=float, default=60, help="for each part (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder for the tune's journals and report, or for regret's samples")
    parser.add_argument("--factory", help="module:callable of another Bench, to try this without a GPU")
    arguments = parser.parse_args()
    spec = WorkerSpec(arguments.factory, threads=2) if arguments.factory else visible_gpus()[0]
    status = 0
    for part in arguments.parts:
        began = time.monotonic()
        said, good = CHECKS[part](spec, arguments.seconds, arguments.out)
        print(f"{part} ({time.monotonic() - began:.0f} s{'' if good else ', not reached'}): {said}", flush=True)
        status |= not good
    return status


if __name__ == "__main__":
    sys.exit(main())
