"""The kernels on the emulated device: many small odd problems, several schedules, against float64."""

import emulated_cases
import pytest
import run_cases

from cupyflash.runtime import emulated

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.usefixtures("counted"),
    pytest.mark.skipif(not emulated.available(), reason="the emulated device needs g++"),
]


@pytest.mark.parametrize("case", emulated_cases.CASES)
def test_kernels_are_right_in_every_order(case):
    run_cases.run(case)
