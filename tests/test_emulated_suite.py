"""The kernels on the emulated device: many small odd problems, several schedules, against float64.

All take a quarter of an hour on two cores: a run takes a fourth, another one each day; ``make coverage`` takes all.
"""

import datetime

import emulated_cases
import pytest

from cupyflash.runtime import emulated

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(not emulated.available(), reason="the emulated device needs g++"),
]


_PARTS = 4
TODAYS = list(emulated_cases.CASES)[datetime.datetime.now(datetime.timezone.utc).toordinal() % _PARTS :: _PARTS]


@pytest.mark.parametrize("case", TODAYS)
def test_kernels_are_right_in_every_order(case):
    emulated_cases.run(case)
