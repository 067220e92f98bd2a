"""Importing cupyflash and computing on the CPU need NumPy, and no more than that."""

import os
import subprocess
import sys

import pytest


def run(program, **environment):
    """Runs a program in a fresh interpreter, with a home that is not there."""
    environment = {**os.environ, "HOME": "/nonexistent", "CUDA_VISIBLE_DEVICES": "", **environment}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_import_is_light():
    heavy = "cupy", "optuna", "yaml", "torch", "jax", "threadpoolctl", "ml_dtypes"
    loaded = run(f"import cupyflash, sys; print(*[name for name in {heavy} if name in sys.modules])")
    assert loaded == []


def test_cpu_without_cupy():
    program = """
import sys
sys.modules["cupy"] = None
import numpy as np, cupyflash
q = np.random.default_rng(0).standard_normal((2, 5, 4, 8), dtype=np.float32)
out, vjp = cupyflash.attention_vjp(q, q, q, causal=True)
gradients = vjp(np.ones_like(out))
print(type(out).__name__, *[type(gradient).__name__ for gradient in gradients], np.isfinite(out).all())
print(np.allclose(out, cupyflash.standard_attention(q, q, q, causal=True), atol=1e-6))
"""
    assert run(program) == ["ndarray"] * 4 + ["True"] * 2


@pytest.mark.parametrize(
    "call", ["cupyflash.attention(q, q, q, device='cuda')", "cupyflash.attention(device_array, q, q)"]
)
def test_what_to_install(call):
    program = f"""
import sys
sys.modules["cupy"] = None
import numpy as np, cupyflash
q = np.zeros((1, 2, 1, 8), np.float16)
class DeviceArray:
    def __dlpack_device__(self):
        return 2, 0
device_array = DeviceArray()
try:
    {call}
except ImportError as error:
    assert 'pip install "cupyflash[cuda13]"' in str(error) and 'pip install "cupyflash[cuda12]"' in str(error), error
    print("told")
print(*cupyflash.supported(q, q, q, device="cuda"))
"""
    answer = run(program)
    assert answer[:2] == ["told", "False"]
