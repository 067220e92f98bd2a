"""Reads of memory that nobody has written are reported with the line of the kernel; the kernels have none."""

import re
import subprocess

import emulated_cases
import faults
import pytest
import run_cases
from fault_tables.fault import Fault

from cupyflash.runtime import emulated

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),  # none of them runs kernels
    pytest.mark.skipif(not emulated.available(), reason="the emulated device needs g++"),
]

CASES = [
    "half, causal, 65x65x1x4x2",
    "half, deterministic causal, 97x97x2x2x1",
    "half, causal, 70x70, hidden key",
    "bfloat, causal, 130x130x1x2x1",
    "backward hopper, causal, 260x260x1x4x2",
    "backward hopper narrow, causal, 140x140, hidden key",
    "tf32, plain, 33x65x2x2x1",
    "float, causal, 65x130",
    "float, deterministic causal, 70x70",
    "half, causal, 70x33x2x4x2, finite dlse",
    "v1, causal, 65x65x1x4x2",
    "v1 narrow, causal, 70x70, hidden key",
    "backward hopper, causal, 300x150x2x4x2, hidden dlse",
]


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    monkeypatch.setenv("CUPYFLASH_EMULATED_FLAGS", emulated.WATCHED)


@pytest.mark.parametrize("case", CASES)
def test_kernels_read_what_was_written(case):
    run_cases.run(case, schedules=emulated_cases.SCHEDULES[-1:])


@pytest.mark.parametrize(
    ("file", "old", "reader"),
    [
        (  # shared memory
            "include/transposed_scores.cuh",
            "copy_async<4>(&lse[n], params.lse + (valid ? row + n : 0), valid);",
            "fused &= fuses(lse[S.col(n, 0)])",
        ),
        (  # the workspace
            "backward_mma.cu",
            "prepare_rows(params);",
            "copy_async<4>(&delta[n], params.delta + (valid ? row + n : 0), valid);",
        ),
    ],
    ids=["shared", "global"],
)
def test_planted_read_is_reported_with_its_line(tmp_path, file, old, reader):
    fault = Fault("", file, old, "", "", ())
    sources = faults.planted(fault, tmp_path)
    found = re.search(
        r"reads memory that nobody has written; (addr2line -i -e \S+ \S+) names the line",
        faults.failure("half, plain, 33x70", sources),
    )
    lines = subprocess.run(found[1].split(), check=True, capture_output=True, text=True).stdout
    text = (sources / "include" / "transposed_scores.cuh").read_text()
    assert f"transposed_scores.cuh:{text[: text.index(reader)].count(chr(10)) + 1}" in lines, lines
