"""Kernels compiled by NVRTC with CuPy's options, on machines without a GPU; and what ptxas reports."""

import functools
import re
from dataclasses import dataclass

from cupyflash.runtime.source import flatten

# What CuPy 14 adds to a module's own options (cupy/cuda/compiler.py), but for the architecture.
CUPY_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")


class CompileError(Exception):
    """The compiler's messages."""


@functools.cache
def missing():
    """Why nothing can be compiled here; empty if it can."""
    try:
        from cupy.cuda import nvrtc

        program = nvrtc.createProgram("__global__ void nothing() {}", "nothing.cu", (), ())
        nvrtc.compileProgram(program, ("-arch=sm_80",))
    except Exception as error:  # no CuPy, no library, a library of another version
        return f"NVRTC does not work here: {type(error).__name__}: {error}"
    return ""


def compile_cuda(kernel, arch, *further, text=None):
    """The compiler's messages for a kernel's module. arch: "sm_90" for machine code, "compute_90" for PTX only.

    Raises:
        CompileError: the compiler does not accept the source.
    """
    from cupy.cuda import nvrtc

    from cupyflash.runtime.cuda import options

    program = nvrtc.createProgram(flatten(kernel.file) if text is None else text, kernel.file, (), ())
    try:
        nvrtc.compileProgram(program, (*options(kernel), *CUPY_OPTIONS, f"-arch={arch}", *further))
        return nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        raise CompileError(nvrtc.getProgramLog(program)) from error
    finally:
        nvrtc.destroyProgram(program)


@dataclass
class Usage:
    """What ptxas says of one kernel."""

    registers: int = 0
    stack_bytes: int = 0
    spill_bytes: int = 0  # stores and loads


def usage(log):
    """{kernel name: Usage} from the messages of ``--ptxas-options=-v``."""
    kernels, current = {}, Usage()
    for line in log.splitlines():
        if found := re.search(r"Compiling entry function '(\w+)'", line):
            current = kernels.setdefault(found[1], Usage())
        if found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            current.stack_bytes, current.spill_bytes = int(found[1]), int(found[2]) + int(found[3])
        if found := re.search(r"Used (\d+) registers", line):
            current.registers = int(found[1])
    return kernels
