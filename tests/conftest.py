"""The backends, as a fixture; tests marked gpu are skipped, with the reason, where there is none."""

import os

import kernel_coverage
import pytest
from backends import BACKENDS

from cupyflash.tuning import store

# What this machine's user has tuned or set must not decide over tests.
os.environ["CUPYFLASH_CACHE_DIR"] = os.devnull
for variable in ("CUPYFLASH_CONFIG", "CUPYFLASH_TUNE"):
    os.environ.pop(variable, None)


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("gpu", marks=pytest.mark.gpu),
        pytest.param("gpu v1", marks=pytest.mark.gpu),
        pytest.param("emulated", marks=[pytest.mark.emulated, pytest.mark.slow]),
    ]
)
def backend(request):
    """Each of what computes attention: a test that takes this runs on all of them."""
    backend = BACKENDS[request.param]
    if reason := backend.missing():
        pytest.skip(reason)
    return backend


@pytest.fixture
def no_winners(monkeypatch):
    """Nothing has been measured on any GPU: the heuristic decides."""
    for find in ("find", "find_related"):
        monkeypatch.setattr(store, find, lambda *_: ())


@pytest.fixture
def counted(monkeypatch):
    """Kernels that the test builds count which of their lines run, if kernel_coverage.py is to report them."""
    for variable, value in kernel_coverage.environment().items():
        monkeypatch.setenv(variable, value)


def gpu_is_missing():
    try:
        import cupy
    except ImportError as error:
        return f"CuPy cannot be imported: {error}"
    return "" if cupy.is_available() else "CuPy finds no GPU"


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (reason := gpu_is_missing()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
