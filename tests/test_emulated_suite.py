"""The kernels on the emulated device: many small odd problems, several schedules, against float64."""

import emulated_cases
import kernel_coverage
import pytest

from cupyflash.runtime import emulated

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(not emulated.available(), reason="the emulated device needs g++"),
]


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    for variable, value in kernel_coverage.environment().items():
        monkeypatch.setenv(variable, value)


@pytest.mark.parametrize("case", emulated_cases.CASES)
def test_kernels_are_right_in_every_order(case):
    emulated_cases.run(case)
