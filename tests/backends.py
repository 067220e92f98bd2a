"""What computes attention, behind one face: NumPy arrays in and out, whatever lies between.

A test that takes the ``backend`` fixture (see conftest.py) runs on all of them. Outputs are filled with NaN before the
call, and lie between guards that must survive it.
"""

import ctypes
import dataclasses
import functools

import numpy as np
import pytest
from oracles import DTYPES

from cupyflash import dispatch

GUARD = -0.0  # changes its sign even when a 0 is added to it

try:
    from numpy.lib.array_utils import byte_bounds
except ImportError:  # NumPy 1
    from numpy import byte_bounds


class Guarded:
    """A (B, S, ...) output full of NaN with guard rows before and after each batch entry."""

    rows = 8  # on either side

    def __init__(self, shape, dtype):
        batch, seqlen, *rest = shape
        self._buffer = np.full((batch, seqlen + 2 * self.rows, *rest), GUARD, dtype)
        self.inside = self._buffer[:, self.rows : self.rows + seqlen]
        self.inside[...] = np.nan

    def checked(self):
        """The output, after a look at the guards."""
        for rows, where in ((slice(self.rows), "before the first"), (slice(-self.rows, None), "behind the last")):
            guards = self._buffer[:, rows]
            assert (np.signbit(guards) & (guards == 0)).all(), f"written {where} row"
        return np.ascontiguousarray(self.inside)


class Backend:
    """The common part; ``name``, ``dtypes`` and the limits say what a test may ask for."""

    name = ""
    dtypes = tuple(DTYPES)
    max_head_dim = None
    max_scores = None  # score elements per head and batch entry that are still worth the time
    output = Guarded

    def missing(self):
        """Why the backend cannot be used here; empty if it can."""
        return ""

    def require(self, problem):
        """Skips what the backend does not do."""
        if problem.dtype not in self.dtypes:
            pytest.skip(f"{self.name} has no {problem.dtype}")
        if self.max_head_dim and max(problem.head_dim, problem.head_dim_v) > self.max_head_dim:
            pytest.skip(f"{self.name} has head dims up to {self.max_head_dim}")
        if self.max_scores and problem.scores > self.max_scores:
            pytest.skip(f"{self.name} would take too long")

    def splits(self, problem):
        """Whether the forward computes exact float32 by products of TF32 parts, which hold 23 of its 24 bits."""
        return False

    def forward(self, problem, q, k, v):
        """(out, lse) of (B, S, H, D) arrays, in the dtype of the problem."""
        self.require(problem)
        dtype = DTYPES[problem.dtype]
        shape = problem.batch, problem.seqlen_q, problem.num_heads
        out = self.output((*shape, problem.head_dim_v), dtype)
        lse_dtype = np.float64 if problem.dtype == "float64" else np.float32
        lse = Guarded((1, shape[0] * shape[2] * shape[1]), lse_dtype)  # contiguous between its guards
        self._forward(problem, q, k, v, out.inside, lse.inside.reshape(shape[0], shape[2], shape[1]))
        return out.checked(), lse.checked().reshape(shape[0], shape[2], shape[1])

    def backward(self, problem, dout, q, k, v, out, lse, dlse=None):
        """(dq, dk, dv) from the results of ``forward``."""
        self.require(problem)
        gradients = [self.output(x.shape, x.dtype) for x in (q, k, v)]
        self._backward(problem, dout, q, k, v, out, lse, *(x.inside for x in gradients), dlse)
        return tuple(x.checked() for x in gradients)

    def gradients(self, problem, dout, q, k, v):
        """(dq, dk, dv) from scratch."""
        return self.backward(problem, dout, q, k, v, *self.forward(problem, q, k, v))


class CpuBackend(Backend):
    """cupyflash.cpu."""

    name = "cpu"

    def _forward(self, problem, q, k, v, out, lse):
        from cupyflash import cpu

        cpu.forward(problem, q, k, v, out, lse)

    def _backward(self, problem, dout, q, k, v, out, lse, dq, dk, dv, dlse):
        from cupyflash import cpu

        cpu.backward(problem, dout, q, k, v, out, lse, dq, dk, dv, dlse)


class KernelBackend(Backend):
    """What the CUDA kernels have in common wherever they run."""

    dtypes = ("float16", "bfloat16", "float32")
    max_head_dim = 256
    algorithm = "auto"

    def require(self, problem):
        super().require(problem)
        if self.algorithm == "v1" and problem.dtype == "float32" and problem.precision == "ieee":
            pytest.skip(f"{self.name} has no exact float32")

    def splits(self, problem):
        problem = dataclasses.replace(problem, algorithm=self.algorithm)
        config, _ = dispatch.choose("forward", problem, self._engine._runtime.limits(), self._tiles)
        return config.family == "mma" and problem.is_exact

    @staticmethod
    def unit_stride(array):
        """The array, copied if its last stride is not one element: the caller of a kernel sees to that."""
        return array if array.shape[-1] == 1 or array.strides[-1] == array.itemsize else np.ascontiguousarray(array)

    def _forward(self, problem, q, k, v, out, lse):
        if problem.scores == 0:  # nothing is launched, the caller of a kernel fills in the answer
            out[...] = 0
            lse[...] = -np.inf
            return
        problem = dataclasses.replace(problem, algorithm=self.algorithm)
        self._launch("forward", problem, [*map(self.unit_stride, (q, k, v))], [out, lse])

    def _backward(self, problem, dout, q, k, v, out, lse, dq, dk, dv, dlse):
        if problem.scores == 0:
            for gradient in (dq, dk, dv):
                gradient[...] = 0
            return
        problem = dataclasses.replace(problem, algorithm=self.algorithm)
        inputs = [*map(self.unit_stride, (dout, q, k, v, out)), lse]
        self._launch("backward", problem, inputs, [dq, dk, dv], [] if dlse is None else [dlse])


class GpuBackend(KernelBackend):
    """cupyflash.gpu, on the current GPU. Views go over as views: strides, offsets and neighbours are kept."""

    name = "gpu"

    def __init__(self, tiles=None, algorithm="auto"):
        """Tiles that are not to be chosen, and what is asked for."""
        self._tiles = tiles
        if algorithm != "auto":
            self.algorithm, self.name = algorithm, f"gpu {algorithm}"

    @functools.cached_property
    def _engine(self):
        from cupyflash import gpu
        from cupyflash.engine import Engine

        return Engine(gpu._engine._runtime, self._tiles) if self._tiles else gpu._engine

    def missing(self):
        try:
            import cupy
        except ImportError as error:
            return f"CuPy cannot be imported: {error}"
        return "" if cupy.is_available() else "CuPy finds no GPU"

    def _launch(self, method, problem, inputs, outputs, more_inputs=()):
        twins = [GpuTwin(array) for array in (*inputs, *outputs, *more_inputs)]
        getattr(self._engine, method)(problem, *(twin.view for twin in twins))
        for twin in twins[len(inputs) : len(inputs) + len(outputs)]:
            twin.bring_back()


class GpuTwin:
    """A NumPy view on the GPU: with its strides, its alignment, and all the memory that lies between its elements."""

    alignment = 256

    def __init__(self, array):
        import cupy

        low, high = byte_bounds(array)
        self._bytes = np.frombuffer((ctypes.c_uint8 * (high - low)).from_address(low), np.uint8)
        buffer = cupy.empty(len(self._bytes) + self.alignment, np.uint8)
        self._memory = buffer[low % self.alignment :][: len(self._bytes)]
        self._memory.set(self._bytes)
        pointer = self._memory.data + (array.ctypes.data - low)
        self.view = cupy.ndarray(array.shape, array.dtype, pointer, strides=array.strides)

    def bring_back(self):
        """Copies what the GPU wrote, between the elements too."""
        self._bytes[:] = self._memory.get()


class EmulatedBackend(KernelBackend):
    """The CUDA kernels built by g++ and run on the CPU: slow to build and to run, so only small problems and tiles."""

    name = "emulated"
    max_head_dim = 64
    max_scores = 1 << 13

    def __init__(self, tiles=None, **runtime):
        """Tiles that are not to be chosen, and attributes of the ``HostRuntime``."""
        self._tiles, self._runtime = tiles, runtime

    def missing(self):
        from cupyflash.runtime import emulated

        return "" if emulated.available() else "there is no g++"

    @functools.cached_property
    def _engine(self):
        from cupyflash.engine import Engine
        from cupyflash.runtime.host import HostRuntime

        return Engine(HostRuntime(**self._runtime), self._tiles)

    def _launch(self, method, problem, inputs, outputs, more_inputs=()):
        getattr(self._engine, method)(problem, *inputs, *outputs, *more_inputs)


BACKENDS = {
    backend.name: backend for backend in (CpuBackend(), GpuBackend(), GpuBackend(algorithm="v1"), EmulatedBackend())
}
