"""The CUDA C++ sources, compiled at run time. Data only; ``cupyflash.runtime`` reads them."""
