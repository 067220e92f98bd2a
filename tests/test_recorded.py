"""Tunes on samples that were taken on GPUs, by ``benchmarks/tuner_check.py regret --out tests/recorded``."""

import json
import statistics
from pathlib import Path

import pytest
from fake_bench import FACTORY, key

from cupyflash.resources import KNOWN_GPUS
from cupyflash.tiles import TileConfig
from cupyflash.tuning.tasks import Size, TuningTask

pytest.importorskip("optuna")
from cupyflash.tuning import tune
from cupyflash.tuning.driver import WorkerSpec

HERE = Path(__file__).parent
RECORDINGS = sorted((HERE / "recorded").glob("*.json"))
assert len(RECORDINGS) >= 2, "without samples nothing would be tested"


def regrets(path, folder, tunes=5):
    """Of the winners of tunes from empty, relative to the best by the median of all samples."""
    content = json.loads(path.read_text())
    gpu = next(name for name, limits in KNOWN_GPUS.items() if limits.name == content["limits"]["name"])
    task = TuningTask(**{**content["task"], "sizes": tuple(Size(**size) for size in content["task"]["sizes"])})
    oracle = {key(TileConfig(**s["config"])): statistics.median(s["seconds"]) for s in content["samples"]}
    for seed in range(tunes):
        spec = WorkerSpec(FACTORY, {"gpu": gpu, "recorded": str(path)}, threads=2)
        tuned = tune([task], workers=[spec], folder=folder / str(seed), store=False, seed=seed)
        yield oracle[key(tuned.winners[0].config)] / min(oracle.values()) - 1


@pytest.fixture(autouse=True)
def _fakes_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))


@pytest.mark.usefixtures("no_winners")
@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_regret_on_recorded_samples(path, tmp_path):
    assert max(regrets(path, tmp_path)) <= 0.01
