"""The ops on Triton kernels. Importing this module imports triton."""

from __future__ import annotations

from collections.abc import Sequence

import triton
from torch import Tensor

from isthmus.kernels import elementwise
from isthmus.kernels.numbers import BLOCK, INTERPRETED

from . import tables
from .consensus import consensus, gram, l1
from .linear import add_product, multi_linear
from .permute import lerp_permuted, permute
from .select import select
from .tables import Column

VERSION: str = triton.__version__
__all__ = [
    "INTERPRETED",
    "VERSION",
    "add_product",
    "consensus",
    "gram",
    "l1",
    "lerp",
    "lerp_permuted",
    "load_driver",
    "multi_linear",
    "permute",
    "select",
    "weighted_sum",
]


def load_driver() -> None:
    """Load what launches kernels, which Triton builds with a C compiler; raises what a first launch would."""
    triton.runtime.driver.active.get_current_target()


def lerp(a: Column, b: Column, outputs: Column, weights: Tensor) -> None:
    """Write the interpolations, with one float64 weight for all rows or one for each, on any device."""
    tables.run([a, b], outputs, lambda part: elementwise.lerp(part.table, part.of_rows(weights)), block=BLOCK)


def weighted_sum(columns: Sequence[Column], outputs: Column, weights: Tensor) -> None:
    """Write the sums; float64 weights of shape (1 or rows, models), on any device."""
    tables.run(columns, outputs, lambda part: elementwise.weighted_sum(part.table, part.of_rows(weights)), block=BLOCK)
