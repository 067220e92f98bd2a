"""cupyflash: exact FlashAttention for CuPy and NumPy, with kernels compiled at run time.

``attention`` and its relatives take NumPy arrays (computed on the CPU), CuPy arrays (on the GPU), and arrays of other
libraries that share their memory through DLPack or ``__cuda_array_interface__``. Importing this package imports NumPy
and nothing else; CuPy is imported when the first GPU array arrives.
"""

from .api import attention, attention_backward, attention_vjp, supported
from .dropin import (
    dot_product_attention,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    scaled_dot_product_attention,
)
from .merge import merge_attention
from .standard import standard_attention

__version__ = "0.1.0"

__all__ = [
    "attention",
    "attention_backward",
    "attention_vjp",
    "dot_product_attention",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "merge_attention",
    "scaled_dot_product_attention",
    "standard_attention",
    "supported",
]
