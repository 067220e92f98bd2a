"""Arrays of every library: taken in without a copy, and results handed back in the library of the caller.

Two types are native: ``numpy.ndarray``, computed on the CPU, and ``cupy.ndarray``, computed on the GPU. Everything else
(torch, JAX, anything with DLPack or ``__cuda_array_interface__``) is adopted as a view of one of the two. Libraries are
looked up in ``sys.modules`` only: whoever holds a torch tensor has imported torch already.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = Any  # no one type spans NumPy, CuPy, torch and JAX; the docstrings say which shapes and dtypes

# Array types and their modules. CuPy joins at the first CuPy array, so that importing cupyflash never imports CuPy.
native: dict[type, Any] = {np.ndarray: np}

INSTALL = 'pip install "cupyflash[cuda13]" (driver 580 or newer) or pip install "cupyflash[cuda12]"'

# DLDeviceType of dlpack.h: memory that NumPy can address, memory that CuPy can address
_HOST_DEVICES = (1, 3)  # kDLCPU, kDLCUDAHost
_CUDA_DEVICES = (2, 13)  # kDLCUDA, kDLCUDAManaged


def through(
    function: Callable[..., Any], required: dict[str, Array], optional: dict[str, Array | None], *arguments: Any
) -> Any:
    """Calls ``function(*arrays, *arguments)`` with native arrays and hands its results back as the caller's kind.

    The kind is that of the first required array. An optional array that is None stays None; one that the function
    returns (an ``out``) comes back as the very object that was passed in.
    """
    given = required | {name: array for name, array in optional.items() if array is not None}
    kinds = set(map(type, given.values()))
    if len(kinds) == 1 and kinds <= native.keys():
        return function(*required.values(), *optional.values(), *arguments)
    library = library_of(next(iter(required.values())))
    if library_of(given.get("out")) == "jax":
        raise ValueError("out is a JAX array, which cannot be written to; use the returned array instead")
    with _stream_of(given.values()):
        adopted = {name: adopt(name, array) for name, array in given.items()}
        check_one_place(adopted)
        results = function(*(adopted.get(name) for name in required | optional), *arguments)
        originals = {id(adopted[name]): given[name] for name in optional if name in given}

        def finished(result: Array) -> Array:
            return originals[id(result)] if id(result) in originals else hand_back(result, library)

        return tuple(map(finished, results)) if isinstance(results, tuple) else finished(results)


def adopt(name: str, array: Array) -> Array:
    """The NumPy or CuPy view of an array of any library."""
    kind = type(array)
    if kind in native:
        return array
    if kind is np.memmap:
        return array.view(np.ndarray)
    if isinstance(array, np.ndarray):
        raise TypeError(f"{name} is a {_type_name(array)}; subclasses of numpy.ndarray are not accepted, pass a view")
    if _is_cupys(array):
        return array

    try:
        view = _shared(name, array)
    except (BufferError, NotImplementedError, RuntimeError) as error:
        raise TypeError(f"{name} is a {_type_name(array)} that cannot be shared: {error}") from error
    if view is None:
        raise TypeError(
            f"{name} is a {_type_name(array)}; expected a CuPy or NumPy array, or one that shares its memory through "
            "DLPack or __cuda_array_interface__"
        )
    return view


def hand_back(result: Array | None, library: str | None) -> Array | None:
    """A native result as an array of ``library`` ("torch", "jax", or None: as it is), without a copy."""
    if result is None or library is None:
        return result
    if library == "torch":
        torch = sys.modules["torch"]
        if result.dtype.name == "bfloat16":
            return torch.from_dlpack(result.view(np.int16)).view(torch.bfloat16)
        return torch.from_dlpack(result)
    if type(result) is np.ndarray:
        return importlib.import_module("jax.numpy").asarray(result)
    return importlib.import_module("jax.dlpack").from_dlpack(result)


def library_of(array: Array) -> str | None:
    """Which library that results can be handed back to made this array, if any."""
    for library, array_type in (("torch", "Tensor"), ("jax", "Array")):
        module = sys.modules.get(library)
        if module is not None and isinstance(array, getattr(module, array_type, ())):
            return library
    return None


def check_one_place(arrays: dict[str, Array]) -> None:
    """Refuses a mix of CPU and GPU arrays; nothing is moved silently."""
    host = [name for name, array in arrays.items() if type(array) is np.ndarray]
    device = [name for name in arrays if name not in host]
    if host and device:
        raise TypeError(
            f"{', '.join(host)} in CPU memory (NumPy) but {', '.join(device)} on the GPU (CuPy); "
            "move them to one place with cupy.asarray or cupy.asnumpy"
        )


def gpu_of(names: tuple[str, ...], *arrays: Array) -> int:
    """The one GPU that holds all these CuPy arrays."""
    devices = [array.data.device_id for array in arrays]
    if devices.count(devices[0]) != len(devices):
        listed = ", ".join(f"{name} on GPU {device}" for name, device in zip(names, devices, strict=True))
        raise ValueError(f"the arrays are on different GPUs: {listed}; move them to one")
    return int(devices[0])


def _is_cupys(array: Array) -> bool:
    """Whether this is CuPy's own array, whose type is then known as native."""
    cupy = sys.modules.get("cupy")
    if cupy is None or type(array) is not cupy.ndarray:
        return False
    native[cupy.ndarray] = cupy
    return True


def module_of(array: Array) -> Any:
    """NumPy or CuPy, whichever made this native array."""
    if type(array) not in native:
        _is_cupys(array)
    return native[type(array)]


def on_gpu_of(names: tuple[str, ...], *arrays: Array) -> contextlib.AbstractContextManager[Any]:
    """A context in which the one GPU that holds these native arrays is current; nothing for NumPy arrays."""
    if type(arrays[0]) is np.ndarray:
        return contextlib.nullcontext()
    device: contextlib.AbstractContextManager[Any] = module_of(arrays[0]).cuda.Device(gpu_of(names, *arrays))
    return device


def address(array: Array) -> int:
    """The address of a native array's first element."""
    return int(array.__array_interface__["data"][0] if type(array) is np.ndarray else array.data.ptr)


def require_cupy(who: str) -> Any:
    """The CuPy module, or the line that installs it."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise ImportError(f"{who} needs CuPy, which cannot be imported ({error}); {INSTALL}") from error


def require_gpu(who: str) -> Any:
    """The CuPy module on a machine where it finds a GPU."""
    cupy = require_cupy(who)
    if not cupy.is_available():
        raise RuntimeError(f"{who} needs an NVIDIA GPU, but CuPy finds no GPU or no fitting driver; {INSTALL}")
    return cupy


def bfloat16(name: str) -> Any:
    """NumPy's bfloat16, which ml_dtypes registers."""
    try:
        return np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    except ImportError as error:
        raise ImportError(
            f"{name} is bfloat16, which NumPy and CuPy take from ml_dtypes; pip install ml_dtypes"
        ) from error


def _shared(name: str, array: Array) -> Array | None:
    """The NumPy or CuPy array over the memory of another library's array; None if there is no way."""
    library = library_of(array)
    if library == "torch":
        return _from_torch(name, array)
    try:
        device = array.__dlpack_device__()[0] if hasattr(array, "__dlpack_device__") else None
        if device in _HOST_DEVICES:
            # JAX passes bfloat16 through the buffer protocol only; both ways share its memory
            return np.asarray(array) if library == "jax" else np.from_dlpack(array)
        if device in _CUDA_DEVICES:
            return require_cupy(f"{name} is on a GPU and").from_dlpack(array)
        if hasattr(array, "__cuda_array_interface__"):
            return require_cupy(f"{name} is on a GPU and").asarray(array)
    except (AttributeError, TypeError, ValueError) as error:  # which do not say of what
        raise BufferError(str(error)) from error
    return None


def _from_torch(name: str, tensor: Array) -> Array:
    torch = sys.modules["torch"]
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires grad, but torch cannot record this call; pass {name}.detach() (or call under "
            "torch.no_grad()) and take gradients from cupyflash.attention_vjp"
        )
    place = tensor.device
    if place.type == "cpu":
        if tensor.dtype is torch.bfloat16:  # torch and NumPy have no way to pass it: the bits travel as int16
            return tensor.detach().view(torch.int16).numpy().view(bfloat16(name))
        return tensor.detach().numpy()
    if place.type != "cuda":
        raise TypeError(f"{name} is on torch device {place}; expected cpu or cuda")
    # Five times as fast as DLPack, whose ordering of streams is not needed under torch's own stream.
    if tensor.is_neg():
        raise BufferError("its negation is still to be done; call resolve_neg()")
    cupy = require_cupy(f"{name} is on a GPU and")
    dtype = _numpy_dtype(name, tensor)
    memory = cupy.cuda.UnownedMemory(tensor.data_ptr(), tensor.nbytes, tensor, place.index)
    strides = tuple(stride * dtype.itemsize for stride in tensor.stride())
    return cupy.ndarray(tuple(tensor.shape), dtype, cupy.cuda.MemoryPointer(memory, 0), strides)


def _numpy_dtype(name: str, tensor: Array) -> Any:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype == "bfloat16":
        return bfloat16(name)
    try:
        return np.dtype(dtype)
    except TypeError:
        raise TypeError(f"{name} has dtype {tensor.dtype}, which NumPy and CuPy do not have") from None


class _TorchStream:
    """torch's current stream in the words of the CUDA stream protocol, which older torch versions do not speak."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


@contextlib.contextmanager
def _stream_of(arrays: Iterable[Array]) -> Iterator[None]:
    """Makes torch's current stream CuPy's, so that torch's work before and after the call is in order.

    Arrays of other libraries order themselves when DLPack hands CuPy's current stream to them.
    """
    torch = sys.modules.get("torch")
    tensor_type = getattr(torch, "Tensor", ())
    tensor = next((array for array in arrays if isinstance(array, tensor_type) and array.is_cuda), None)
    if torch is None or tensor is None:
        yield
        return
    cuda = require_cupy("a torch tensor on a GPU").cuda
    stream = _TorchStream(torch.cuda.current_stream(tensor.device).cuda_stream)
    with cuda.Device(tensor.device.index), cuda.Stream.from_external(stream):
        yield


def _type_name(array: Any) -> str:
    kind = type(array)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
