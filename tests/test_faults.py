"""The emulated suite catches every planted fault of faults.py, and passes where none is planted."""

import emulated_cases
import faults
import pytest
from fault_tables.fault import Fault

from cupyflash.runtime import emulated

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),  # none of them runs kernels
    pytest.mark.skipif(not emulated.available(), reason="the emulated device needs g++"),
]


@pytest.fixture(autouse=True)
def quickly_built(monkeypatch):
    monkeypatch.setenv("CUPYFLASH_EMULATED_FLAGS", faults.FLAGS)


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name)
def test_suite_catches(fault, tmp_path):
    sources = faults.planted(fault, tmp_path)
    assert any(faults.failure(case, sources) for case in fault.cases), f"{fault.cases} pass although {fault.why}"


@pytest.mark.parametrize(
    "case",
    [
        "backward hopper wide, plain, 70x300x1x4x2",  # tiles of which a part lies beyond the last query
        "backward hopper panels, causal, 150x300",
    ],
)
def test_ordinary_tiles_are_not_rare(case, tmp_path):
    """Where they were, results would be right, and late: a rare tile has no numbers here."""
    old, new = "return numbers + which * kBr;", "return nullptr;"
    never = Fault("folded rows: no rare numbers", "backward_wgmma.cu", old, new, why="", cases=())
    assert faults.failure(case, faults.planted(never, tmp_path)) == ""


@pytest.mark.parametrize("kind", emulated_cases.KINDS)
def test_suite_passes_without_a_fault(kind, tmp_path):
    """What fails above fails for the fault."""
    sources = faults.copied(tmp_path)
    cases = {case for fault in faults.FAULTS for case in fault.cases if emulated_cases.CASES[case].kind == kind}
    assert {case: how for case in cases if (how := faults.failure(case, sources))} == {}
