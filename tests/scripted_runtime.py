"""A runtime whose kernels are NumPy: it reads their parameters and computes what they should, but for a planted fault.

A proof sees what it would see of the real kernel: arrays, guards and workspace. There is no kernel to build.
"""

import ctypes
import struct

import ml_dtypes
import numpy as np

from cupyflash import cpu
from cupyflash.problem import Band, Problem
from cupyflash.runtime.params import BACKWARD, BACKWARD_TENSOR, FORWARD, FORWARD_TENSOR

DTYPES = {"float": np.dtype(np.float32), "Float16": np.dtype(np.float16), "BFloat16": np.dtype(ml_dtypes.bfloat16)}
NAMES = {"float": "float32", "Float16": "float16", "BFloat16": "bfloat16"}

FAULTS = {
    "does nothing": "returns at once; the last candidate's results would still be right",
    "a tile is not written": "the output's last rows stay as they were",
    "NaN": "an overflow",
    "last key hidden": "a mask off by one",
    "first hidden key visible": "a mask off by one",
    "ragged tail counted": "what lies behind the last key weighs in",
    "stale tile": "a missing barrier: a tile of values is read before it has landed",
    "writes before": "a row in front of the output",
    "writes behind": "a row behind the output, as a whole tile would",
    "workspace overrun": "the workspace is one row too short for what is written",
    "heads mixed up": "query heads use the first key/value head",
    "no rescaling": "the sum is not rescaled when the maximum rises",
    "lse in bits": "the logarithm to base 2",
    "low precision": "sums in eight bits",
    "hidden values counted": "their weight is 0, but 0 times infinity is not",
    "dlse ignored": "the gradient of LSE is taken for zero",
}
ONLY_BACKWARD = ("workspace overrun", "dlse ignored")


class ScriptedRuntime:
    """``fault``: a key of FAULTS; what it does not know ("checked") is none."""

    def __init__(self, limits, fault=""):
        self._limits, self._fault = limits, fault
        self._counter = np.zeros(2, np.uint32)

    def device(self):
        return 0

    def limits(self):
        return self._limits

    def stream(self, device):
        return 0

    def address(self, array):
        return array.ctypes.data

    def tensor_map(self, *description):
        return bytes(128)

    def tile_counter(self, device, stream):
        return self._counter.ctypes.data

    def workspace(self, floats):
        raise AssertionError("a proof brings its own")

    def load(self, kernel, grid):
        defines = dict(kernel.defines)
        forward = kernel.name.startswith("forward")
        tensor = kernel.file.endswith("_wgmma.cu")
        layout = {
            (True, True): FORWARD_TENSOR,
            (True, False): FORWARD,
            (False, True): BACKWARD_TENSOR,
            (False, False): BACKWARD,
        }[forward, tensor]

        def launch(block, stream):
            values = struct.unpack(layout.packer.format, block.tobytes())
            p = dict(zip((name for name, _ in layout.fields), values, strict=True))
            if forward:
                self._forward(p, defines)
            elif kernel.name == "backward_rows":  # one launch does the work of all
                self._backward(p, defines, kernel.file == "backward_mma.cu")

        return launch

    def _problem(self, p, defines):
        band = Band(
            p["band_first"] if defines["CF_BAND_FIRST"] else None, p["band_last"] if defines["CF_BAND_LAST"] else None
        )
        dims = defines["CF_HEAD_DIM"], defines["CF_HEAD_DIM_V"]
        sizes = p["batch"], p["seqlen_q"], p["seqlen_k"], p["num_heads"], p["num_kv_heads"]
        return Problem(*sizes, *dims, NAMES[defines["CF_ELEMENT"]], band, p["scale"], p["softcap"], "ieee", False)

    @staticmethod
    def _array(p, defines, name, shape):
        dtype = np.dtype(np.float32) if name in ("lse", "dlse") else DTYPES[defines["CF_ELEMENT"]]
        size = int(np.prod(shape)) * dtype.itemsize
        return np.frombuffer((ctypes.c_uint8 * size).from_address(p[name]), dtype).reshape(shape)

    def _arrays(self, p, defines, problem):
        q = (problem.batch, problem.seqlen_q, problem.num_heads)
        k = (problem.batch, problem.seqlen_k, problem.num_kv_heads)
        D, Dv = problem.head_dim, problem.head_dim_v
        shapes = {
            **{"q": (*q, D), "k": (*k, D), "v": (*k, Dv), "out": (*q, Dv), "lse": (q[0], q[2], q[1])},
            "dlse": (q[0], q[2], q[1]),
            **{"dout": (*q, Dv), "dq": (*q, D), "dk": (*k, D), "dv": (*k, Dv)},
        }
        return {name: self._array(p, defines, name, shape) for name, shape in shapes.items() if p.get(name)}

    def _forward(self, p, defines):
        problem = self._problem(p, defines)
        a = self._arrays(p, defines, problem)
        problem, q, k, v = self._distorted(problem, a["q"], a["k"], a["v"])
        if self._fault == "does nothing":
            return
        out, lse = np.empty_like(a["out"]), np.empty_like(a["lse"])
        cpu.forward(problem, q, k, v, out, lse)
        if self._fault == "no rescaling":
            out *= out.dtype.type(1) + np.arange(out.shape[1])[:, None, None].astype(out.dtype) / out.dtype.type(100)
        if self._fault == "lse in bits":
            lse /= np.float32(np.log(2))
        if self._fault == "hidden values counted" and not np.isfinite(v.astype(np.float32)).all():
            out[0, 0, :, 2] = np.nan
        self._store(a, {"out": out, "lse": lse}, "out")

    def _backward(self, p, defines, sums):
        problem = self._problem(p, defines)
        a = self._arrays(p, defines, problem)
        problem, q, k, v = self._distorted(problem, a["q"], a["k"], a["v"])
        if self._fault == "does nothing":
            return
        gradients = {name: np.empty_like(a[name]) for name in ("dq", "dk", "dv")}
        lse = a["lse"] * np.float32(np.log(2)) if self._fault == "lse in bits" else a["lse"]
        out, dlse = a["out"], None if self._fault == "dlse ignored" else a.get("dlse")
        full = {n: np.empty(x.shape, x.dtype) for n, x in zip(("dq", "dk", "dv"), (q, k, v), strict=True)}
        cpu.backward(problem, a["dout"], q, k, v, out, lse, full["dq"], full["dk"], full["dv"], dlse)
        for name, gradient in gradients.items():
            gradient[...] = full[name][:, : gradient.shape[1], : gradient.shape[2]]
        if self._fault == "hidden values counted" and not np.isfinite(v.astype(np.float32)).all():
            gradients["dq"][0, 0] = np.nan
        if self._fault == "no rescaling":
            gradients["dv"] *= gradients["dv"].dtype.type(1.2)
        if self._fault == "workspace overrun":
            ctypes.memset(p["dq_sum"] + 4 * self._summed_floats(problem, defines, sums), 0, 64)
        self._store(a, gradients, "dk")

    @staticmethod
    def _summed_floats(problem, defines, sums):
        """Of dQ in the workspace, which end it; plain multiply-adds sum it in place."""
        tiles = problem.batch * problem.num_heads * -(-problem.seqlen_q // defines["CF_BR"])
        return tiles * defines["CF_BR"] * defines["CF_TILE_D"] if sums else 0

    def _distorted(self, problem, q, k, v):
        """The problem that a kernel with this fault computes."""
        from dataclasses import replace

        fault, band = self._fault, problem.band
        last = problem.seqlen_k - 1
        if fault == "last key hidden":
            bound = last - 1 if band.last is None else band.last - 1
            problem = replace(problem, band=Band(band.first, bound))
        elif fault == "first hidden key visible" and band.last is not None:
            problem = replace(problem, band=Band(band.first, band.last + 1))
        elif fault == "first hidden key visible":
            problem = replace(problem, band=Band(1, None))
        elif fault == "ragged tail counted":
            more = ((0, 0), (0, 16 - problem.seqlen_k % 16), (0, 0), (0, 0))
            k, v = (np.pad(x, more, mode="edge") for x in (k, v))
            problem = replace(problem, seqlen_k=k.shape[1], band=Band(band.first, None))
        elif fault == "stale tile":
            v = v.copy()
            v[:, -16:] = v[:, :16] if v.shape[1] >= 32 else 0
        elif fault == "heads mixed up":
            k, v = (np.broadcast_to(x[:, :, :1], x.shape) if x.shape[2] > 1 else x[:, ::-1] for x in (k, v))
        elif fault == "low precision":
            q, k, v = (x.astype(ml_dtypes.float8_e4m3fn).astype(x.dtype) for x in (q, k, v))
        return problem, q, k, v

    def _store(self, a, results, main):
        fault = self._fault
        for name, values in results.items():
            target = a[name]
            rows = values.shape[1] - 7 if fault == "a tile is not written" and name == main else values.shape[1]
            target[:, :rows] = values[:, :rows]
            if fault == "NaN" and name == main:
                target[0, 0, 0, 0] = np.nan
            if fault == "writes before":
                ctypes.memset(target.ctypes.data - 32, 0, 32)
            if fault == "writes behind":
                ctypes.memset(target.ctypes.data + target.nbytes, 0, 32)
