r"""Capture in a graph what a device does to evaluate a model, and do it again for other weights.

A graph does at once what Python would ask for kernel by kernel. It keeps the addresses it was captured with, so it
serves one set of weights in memory; what changes from point to point besides these is read from a tensor on the device.
It runs no Python: what a forward pass does besides computing (it counts its calls, say) is left out. A model that
decides by values, draws random numbers or writes into its weights or buffers is not captured, or found out:

- Whatever makes the capture fail, reading a value on the host above all, leaves the pass as it is.
- So does a forward pass that changes a parameter, a buffer or the data.
- Before it serves, it is replayed at points far from each other, of which one at least is far from where it was
  captured, and compared with what Python computes there: each mean m must satisfy
  :math:`\lvert m_\text{replayed} - m_\text{computed} \rvert \le u \max(1, \lvert m_\text{computed} \rvert)`, where
  u is 128 times the spacing of the dtype at 1, and :math:`2^{-8}` at most; for accuracies, which move in steps, two
  targets at least. The mean norm of a sample's outputs is compared too, since all that is measured may move in steps,
  or be the same at both points.

Capturing takes as long as some passes do, so it is left where a graph would be replayed few times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from isthmus._capture import CaptureError
from isthmus.preserve import preserved_buffers

from .calibrate import is_compiled
from .device import InOrder, Replay
from .evaluate import Evaluator
from .tasks import accuracy, token_accuracy

ROUNDINGS = 128
MOST = 2.0**-8  # for dtypes of 16 bits
STEPS = (accuracy, token_accuracy)
FEWEST = 30  # times that a graph must be of use: capturing and comparing it take about eight passes


class Pass:
    """A computation that is done once for each point, from a graph where it can be captured.

    The first time it is computed and captured; once it was compared elsewhere, it is replayed.

    Attributes:
        compute: computes float64 means for the numbers of a point, and the mean size of outputs.
        why_not: why it is not replayed, if it is not.
    """

    def __init__(
        self,
        device: InOrder,
        compute: Callable[[Sequence[float]], Tensor],
        capturable: Callable[[Tensor], Tensor],
        *,
        models: Sequence[nn.Module],
        read: Sequence[Tensor],
        bounds: Sequence[float],
        times: float,
        why_not: str | None,
    ) -> None:
        """Describe the computation.

        Args:
            device: where it is done.
            compute: see above.
            capturable: computes the same, which may differ by rounding, for a tensor of these numbers.
            models: the models that run.
            read: further tensors that must not change.
            bounds: by how much each mean may differ, see above.
            times: how often it is to be done, as far as is known.
            why_not: a reason not to capture it that is known beforehand.
        """
        self.compute = compute
        self.why_not = why_not
        if why_not is None and times < FEWEST:
            self.why_not = f"a graph would be replayed {times:.0f} times at most, and pays from {FEWEST} times on"
        self._device = device
        self._capturable = capturable
        self._numbers = torch.empty(0, dtype=torch.float64)
        self._models, self._read = models, read
        self._bounds = bounds
        self._replay: Replay | None = None
        self._compared = False

    def __call__(self, numbers: Sequence[float]) -> Tensor:
        """The means at a point; nothing waits for them."""
        if self._replay is not None and self._compared:
            return self._replayed(self._replay, numbers)
        computed = self.compute(numbers)
        if self._replay is None and self.why_not is None:
            self._capture(numbers)
        return computed

    @property
    def replayed(self) -> bool:
        """Whether a graph is in use that was found to be right."""
        return self._replay is not None and self._compared

    @property
    def doubtful(self) -> bool:
        """Whether there is a graph that was not compared yet."""
        return self._replay is not None and not self._compared

    def compare(self, numbers: Sequence[float], expected: Sequence[float]) -> None:
        """Replay the graph, if there is one, where the model gives ``expected``; drop it if it gives something else."""
        if self._replay is None:
            return
        self._compared = True
        found = self._replayed(self._replay, numbers).flatten().tolist()
        if not agree(found, expected, self._bounds):
            self._drop("replayed, its graph gave other values than the model, by more than rounding")

    def _replayed(self, replay: Replay, numbers: Sequence[float]) -> Tensor:
        if numbers:
            self._numbers.copy_(self._device.upload(numbers))
        return replay()

    def _capture(self, numbers: Sequence[float]) -> None:
        self._numbers = self._device.upload(numbers)
        before = self._state()
        with ExitStack() as preserved:
            for model in self._models:
                preserved.enter_context(preserved_buffers(model))
            try:
                self._replay = self._device.capture(lambda: self._capturable(self._numbers))
            except CaptureError as error:
                self._drop(f"it cannot be captured: {error}")
            if self._state() != before:
                self._drop("the forward pass writes into parameters, buffers or its input")

    def _drop(self, why_not: str) -> None:
        self.why_not = why_not
        self._replay = None

    def _state(self) -> list[object]:
        """What stays equal only if nothing is written into a parameter, a buffer or what is read."""
        tensors = [*self._read]
        for model in self._models:
            tensors += [*model.parameters(), *(buffer for buffer in model.buffers() if buffer is not None)]
        return [(id(tensor), None if tensor.is_inference() else tensor._version) for tensor in tensors]


def bounds(evaluator: Evaluator, model: nn.Module) -> list[float]:
    """By how much the means of one evaluation, and the size of outputs, may differ in two ways of computing them."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    spacings = [torch.finfo(dtype).eps for dtype in (dtypes if evaluator.dtype is None else {evaluator.dtype})]
    rounding = min(ROUNDINGS * max(spacings, default=torch.finfo(torch.float32).eps), MOST)
    step = 2 / max(1, evaluator.targets.numel())
    return [*(max(rounding, step) if metric in STEPS else rounding for metric in evaluator.metrics.values()), rounding]


def agree(found: Sequence[float], expected: Sequence[float], bounds: Sequence[float]) -> bool:
    """Whether numbers are equal up to ``bounds``, which are relative where numbers are above 1; NaN equals NaN."""
    return all(
        one == other
        or (math.isnan(one) and math.isnan(other))
        or (math.isfinite(other) and abs(one - other) <= bound * max(1, abs(other)))
        for one, other, bound in zip(found, expected, bounds, strict=True)
    )


def why_not_replayed(model: nn.Module) -> str | None:
    """Why a model cannot be captured or copied, if that is known beforehand."""
    if is_compiled(model):
        return "the model is compiled"
    return "the model has hooks" if has_hooks(model) else None


def has_hooks(model: nn.Module) -> bool:
    """Whether a forward pass runs hooks, which may be bound to one module or do more than compute."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def told(error: Exception) -> str:
    """The kind of an error, and the first line of what it says."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__
