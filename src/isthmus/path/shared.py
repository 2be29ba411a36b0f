r"""Skip the first layer between the ends of a line.

A layer that is affine in its parameters and reads nothing but the data,

.. math:: z_\alpha = W_\alpha x + c_\alpha = (1 - \alpha)\,(W_A x + c_A) + \alpha\,(W_B x + c_B),

needs no matrix product between the ends: its outputs there are combinations of its outputs at the ends. For a
784-512-512-10 MLP that saves 60 % of the work of a point. The outputs differ from a direct evaluation by rounding alone
(relative differences of losses stay below 1e-6 in float32).

No analysis of the model is needed. During the evaluation of an end, each call of an affine layer on a view of the
evaluator's own data is remembered; such an input depends on no parameter, whatever the model does before or after.
Between the ends, calls on the same view are answered from memory, all others are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from .evaluate import is_compiled

AFFINE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
MIN_FAN_IN = 128  # below about 50 products per output, combining two remembered outputs costs as much as computing one
MEMORY_LIMIT = 2**29  # bytes of remembered outputs; what comes after is computed

Forward = Callable[[nn.Module, Tensor], Tensor]


class SharedLayers:
    """What a model's first layers return for resident data at the two ends of a line."""

    def __init__(self, model: nn.Module, resident: Iterable[Tensor]) -> None:
        """Find the affine layers of ``model``; ``resident`` are the tensors whose views are remembered."""
        self._layers = [] if is_compiled(model) else [layer for layer in model.modules() if _is_affine(layer)]
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in resident}
        self._ends: tuple[dict[object, Tensor], dict[object, Tensor]] = ({}, {})
        self._room = MEMORY_LIMIT

    @property
    def active(self) -> bool:
        """Whether any call is remembered at both ends."""
        return not self._ends[0].keys().isdisjoint(self._ends[1])

    @contextmanager
    def record(self, end: int) -> Iterator[None]:
        """Remember the outputs at ``end`` 0 (A) or 1 (B); the model must have the weights of that end."""

        def forward(layer: nn.Module, inputs: Tensor) -> Tensor:
            outputs: Tensor = type(layer).forward(layer, inputs)
            if inputs.untyped_storage().data_ptr() in self._storages and outputs.nbytes <= self._room:
                self._ends[end][_call(layer, inputs)] = outputs
                self._room -= outputs.nbytes
            return outputs

        with self._replaced(forward):
            yield

    @contextmanager
    def combine(self, alpha: float) -> Iterator[None]:
        """Answer remembered calls for the model at ``alpha`` between the ends."""
        ends_a, ends_b = self._ends

        def forward(layer: nn.Module, inputs: Tensor) -> Tensor:
            call = _call(layer, inputs)
            if call in ends_a and call in ends_b:
                return torch.lerp(ends_a[call], ends_b[call], alpha)
            outputs: Tensor = type(layer).forward(layer, inputs)
            return outputs

        with self._replaced(forward):
            yield

    @contextmanager
    def _replaced(self, forward: Forward) -> Iterator[None]:
        for layer in self._layers:
            layer.__dict__["forward"] = partial(forward, layer)  # an instance's attribute hides the method
        try:
            yield
        finally:
            for layer in self._layers:
                del layer.__dict__["forward"]


def _call(layer: nn.Module, inputs: Tensor) -> object:
    """What identifies a call on resident data: the layer, and which elements in which order."""
    return id(layer), inputs.data_ptr(), inputs.dtype, inputs.shape, inputs.stride()


def _is_affine(layer: nn.Module) -> bool:
    """Whether the outputs of ``layer`` are affine in parameters of at least 32 bits, at a fan-in worth sharing."""
    if type(layer) not in AFFINE or "forward" in layer.__dict__ or layer._forward_pre_hooks:  # hooks may make weights
        return False
    parameters = dict(layer.named_parameters(recurse=False))
    weight = parameters.get("weight")
    return (
        weight is not None
        and parameters.keys() <= {"weight", "bias"}
        and weight.dtype in (torch.float32, torch.float64)
        and weight[0].numel() >= MIN_FAN_IN
    )
