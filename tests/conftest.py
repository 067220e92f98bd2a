"""The backends, as a fixture; tests marked gpu are skipped, with the reason, where there is none."""

import pytest
from backends import BACKENDS


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("gpu", marks=pytest.mark.gpu),
        pytest.param("emulated", marks=[pytest.mark.emulated, pytest.mark.slow]),
    ]
)
def backend(request):
    """Each of what computes attention: a test that takes this runs on all of them."""
    backend = BACKENDS[request.param]
    if reason := backend.missing():
        pytest.skip(reason)
    return backend


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
