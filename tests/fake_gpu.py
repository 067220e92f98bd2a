"""CuPy arrays in host memory and a gpu module that computes there: tests the way to a launch without a GPU.

CuPy creates, slices and transposes arrays without a driver as long as their memory comes from elsewhere. Whatever
launches a kernel (fill, copies of non-contiguous arrays) stays out of reach.
"""

import ctypes
import functools
import operator
import sys
import types

import numpy as np
import pytest

import cupyflash
from cupyflash import api, cpu

cupy = pytest.importorskip("cupy")


class FakeGpu(types.ModuleType):
    """Stands for cupyflash.gpu; ``launches`` lists the problems it was given."""

    def __init__(self, monkeypatch):
        super().__init__("cupyflash.gpu")
        self.launches = []
        self.switches = []
        self.current_device = 0
        self.memory = []
        monkeypatch.setitem(sys.modules, "cupyflash.gpu", self)
        monkeypatch.setattr(cupyflash, "gpu", self, raising=False)
        for memory in ("_calls", "_bound_forward", "_bound_backward"):
            monkeypatch.setattr(api, memory, {})
        monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: self.current_device)
        monkeypatch.setattr(cupy.cuda, "Device", self._device)

    def allocate(self, size, device=None, offset=0):
        """Memory that begins `offset` bytes behind a multiple of 256; an allocator for CuPy."""
        device = self.current_device if device is None else device
        buffer = np.full(size + 512, 0xFF, np.uint8)  # NaN in every float type: what is not written shows
        self.memory.append(buffer)
        memory = cupy.cuda.UnownedMemory(buffer.ctypes.data, buffer.nbytes, buffer, device)
        return cupy.cuda.MemoryPointer(memory, -buffer.ctypes.data % 256 + offset)

    def empty(self, shape, dtype=np.float32, device=None):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return cupy.ndarray(shape, dtype, memptr=self.allocate(size, device))

    def array(self, host, device=None):
        result = self.empty(host.shape, host.dtype, device)
        self.host(result)[...] = host
        return result

    @staticmethod
    def host(array):
        """The NumPy array over the memory of a fake CuPy array."""
        low = sum(min(0, (n - 1) * s) for n, s in zip(array.shape, array.strides, strict=True))
        high = sum(max(0, (n - 1) * s) for n, s in zip(array.shape, array.strides, strict=True)) + array.itemsize
        bytes_ = (ctypes.c_char * (high - low)).from_address(array.data.ptr + low)
        return np.ndarray(array.shape, array.dtype, bytes_, offset=-low, strides=array.strides)

    def check(self, problem, *arrays):
        pass

    def forward(self, problem, *arrays):
        self._launch(cpu.forward, problem, arrays)

    def backward(self, problem, *arrays):
        self._launch(cpu.backward, problem, arrays)

    def bind_forward(self, problem, q, k, v, out):
        return self._bound(self.forward, problem, q, k, v, out, self._lse(problem))

    def bind_backward(self, problem, dout, q, k, v, out, dq, dk, dv):
        rows = self._lse(problem)
        launch = self._bound(self.backward, problem, dout, q, k, v, out, rows, dq, dk, dv, rows)

        def launch_in_the_engines_order(*addresses):
            *operands, dlse, dq, dk, dv = addresses
            launch(*operands, dq, dk, dv, dlse)

        return launch_in_the_engines_order

    def _lse(self, problem):
        return self.empty((problem.batch, problem.num_heads, problem.seqlen_q))

    def _bound(self, function, problem, *arrays):
        """Calls ``function`` with arrays like these, as it finds them at the addresses that a launch is given."""
        device, unaligned = self.current_device, functools.reduce(operator.or_, (x.data.ptr for x in arrays)) & 15

        def moved(array, address):
            if address == 0:
                return None
            memory = cupy.cuda.UnownedMemory(address, array.nbytes, self, device)
            return cupy.ndarray(array.shape, array.dtype, cupy.cuda.MemoryPointer(memory, 0), array.strides)

        def launch(*addresses):
            assert device == self.current_device
            assert not functools.reduce(operator.or_, addresses) & 15 & ~unaligned
            function(problem, *map(moved, arrays, addresses))

        return launch

    def _launch(self, function, problem, arrays):
        self.launches.append(problem)
        for array in arrays[: 4 if function is cpu.forward else 5]:
            assert array.strides[3] == array.itemsize
        function(problem, *(array if array is None else self.host(array) for array in arrays))

    def _device(self, index):
        gpu = self

        class Switch:
            def __enter__(self):
                self.previous, gpu.current_device = gpu.current_device, index
                gpu.switches.append(index)

            def __exit__(self, *_):
                gpu.current_device = self.previous

        return Switch()
