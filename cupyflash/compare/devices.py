"""What vendors promise of their GPUs: the roofs that nobody reaches, beside those that are measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peak:
    """Dense 16-bit tensor-core operations with sums in float32, and memory bandwidth, per second."""

    flops: float
    bytes: float


# By the name that the driver gives; from data sheets.
PEAKS = {
    "Tesla T4": Peak(65e12, 320e9),
    "NVIDIA A10": Peak(125e12, 600e9),
    "NVIDIA A100-SXM4-40GB": Peak(312e12, 1555e9),
    "NVIDIA A100-SXM4-80GB": Peak(312e12, 2039e9),
    "NVIDIA A100-PCIE-40GB": Peak(312e12, 1555e9),
    "NVIDIA A100 80GB PCIe": Peak(312e12, 1935e9),
    "NVIDIA GeForce RTX 3090": Peak(71e12, 936e9),
    "NVIDIA L4": Peak(121e12, 300e9),
    "NVIDIA L40S": Peak(362e12, 864e9),
    "NVIDIA GeForce RTX 4090": Peak(165e12, 1008e9),
    "NVIDIA H100 PCIe": Peak(756e12, 2039e9),
    "NVIDIA H100 80GB HBM3": Peak(989e12, 3352e9),
    "NVIDIA H200": Peak(989e12, 4800e9),
    "NVIDIA B200": Peak(2250e12, 8000e9),
    "NVIDIA GeForce RTX 5090": Peak(210e12, 1792e9),
}


def peak(name: str) -> Peak | None:
    """Of a GPU, or None if the table does not have it."""
    return PEAKS.get(name)
