"""Kernels stay inside their arrays; a planted access out of bounds is reported with the line of the kernel."""

import re

import faults
import pytest
import sanitized_cases
from fault_tables.fault import Fault

from cupyflash.runtime import emulated

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.slow,
    pytest.mark.skipif(not emulated.available(), reason="the emulated device needs g++"),
]

FEW = [name for name in sanitized_cases.CASES if name.startswith(("half,", "float,")) or "520x350" in name]


def test_kernels_stay_in_bounds():
    result = sanitized_cases.run(FEW)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("no access out of bounds") == len(FEW)


def test_planted_read_out_of_bounds_is_reported_with_its_line(tmp_path):
    load_K = "load_tile<kHeadDim>(shared.in.K, k, params.k_row_stride, j * static_cast<i32>(kBc), params.seqlen_k"
    fault = Fault("", "forward_mma.cu", load_K, f"{load_K} + 1", "a row behind the last key", ())
    sources = faults.planted(fault, tmp_path)
    text = (sources / fault.file).read_text()
    line = text[: text.index(fault.new)].count("\n") + 1
    result = sanitized_cases.run(FEW[:1], sources)
    assert result.returncode != 0
    assert "heap-buffer-overflow" in result.stderr
    assert re.search(rf"#\d+ .* in .*attend.*forward_mma\.cu:{line}\b", result.stderr), result.stderr
