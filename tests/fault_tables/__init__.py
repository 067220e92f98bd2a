"""Kernels with one thing wrong, a table for each part of them; ``faults.py`` plants them."""

from . import (
    backward,
    forward,
    hopper_backward,
    hopper_backward_wide,
    hopper_forward,
    hopper_rows,
    hopper_shares,
    simt,
    tiles,
    v1,
)

TABLES = (
    forward,
    hopper_forward,
    tiles,
    hopper_backward,
    hopper_rows,
    hopper_shares,
    hopper_backward_wide,
    backward,
    v1,
    simt,
)
FAULTS = [fault for table in TABLES for fault in table.FAULTS]
