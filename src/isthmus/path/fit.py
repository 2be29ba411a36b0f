"""Train the point between of a curve through weight space."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from isthmus import merging, ops
from isthmus.errors import InputError
from isthmus.flat import FlatState
from isthmus.merging.sources import Source, load_source
from isthmus.preserve import preserved_model, preserved_random_states

from .curve import Curve, check_kind, combine, point_weights
from .directions import canonical_parameters
from .evaluate import Data, materialise
from .progress import telling
from .tasks import Metric, cross_entropy
from .walk import Progress

WINDOW = 50  # steps between two looks at the loss


@torch.inference_mode(False)
@torch.enable_grad()
def fit_curve(
    model: nn.Module,
    a: Source,
    b: Source,
    train: Data,
    kind: str = "bezier",
    *,
    loss: Metric = cross_entropy,
    steps: int = 1000,
    batch_size: int = 128,
    lr: float = 0.05,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    seed: int = 0,
    backend: str = "auto",
    progress: Progress | None = None,
) -> Curve:
    r"""Train a curve from A to B on which the loss is low.

    Minimises :math:`\mathbb E_{t \sim U(0, 1)} L(\phi_\theta(t))` over the point :math:`\theta` between the ends, which
    stay as they are; see ``Curve`` for :math:`\phi_\theta`. Each step draws one t and one batch; the t of all steps are
    stratified, one from each of ``steps`` equal parts of [0, 1], in random order. The gradient in :math:`\theta` is
    that in the weights :math:`\phi_\theta(t)` times :math:`2 t (1 - t)` for a Bezier curve, and times
    :math:`2 \min(t, 1 - t)` for a polygonal chain. :math:`\theta` starts in the middle of A and B.

    The optimiser is SGD with momentum. Its learning rate is constant for the first half of the steps, falls linearly
    until nine tenths of them, and stays at a hundredth from there. Layers run in training mode. BatchNorm's running
    statistics are not trained: those of the curve are interpolated, and ``scan_curve`` re-estimates them.

    All draws come from ``seed``: the same arguments give the same curve, as far as the model's own operations are
    reproducible. ``model``, ``a``, ``b`` and the global random states come back untouched. 16-bit parameters are
    trained in float32 and rounded at the end.

    Source: Garipov et al., "Loss Surfaces, Mode Connectivity, and Fast Ensembling of DNNs", arXiv 1802.10026, section 3
    and equation 2; the schedule is that of the authors' code.

    Args:
        model: the architecture; its own weights are not used. Parameters that do not require gradients are not trained.
        a: model A: a module, a state dict, a ``FlatState``, or the path of a safetensors file.
        b: model B.
        train: the training data. ``(inputs, targets)`` tensors, or a map-style ``Dataset`` that is read once, of which
            batches are drawn without replacement; or a ``DataLoader``, which is run through again and again, with its
            own batch size, order and augmentation.
        kind: "bezier" or "polygon".
        loss: a function like the metrics of an ``Evaluator``, of a batch's outputs (of Hugging Face models their
            ``logits``) and targets, whose values are averaged.
        steps: the number of steps.
        batch_size: examples in a batch; all of them if there are fewer.
        lr: the learning rate at the start.
        momentum: of SGD.
        weight_decay: :math:`\lambda` of a penalty :math:`\tfrac\lambda2 \lVert \phi_\theta(t) \rVert^2`.
        seed: of order, t, dropout and whatever else draws from the global generators.
        backend: as for ``isthmus.ops.lerp``.
        progress: True for a bar in the terminal; or a function, called every 50 steps with the number of steps done,
            that of all, and their mean loss as ``{"train": {"loss": value}}``.

    Raises:
        InputError: A or B do not have the model's tensors, an argument is out of range, no parameter requires a
            gradient, or the loss did not stay finite.
        FileError: a file is missing or not a safetensors file.
    """
    check_kind(kind)
    _check_settings(steps=steps, batch_size=batch_size, lr=lr, momentum=momentum, weight_decay=weight_decay)
    bend = _Bend(model, a, b, kind, backend)
    optimizer = torch.optim.SGD(bend.anchors, lr=lr, momentum=momentum)
    generator = torch.Generator().manual_seed(seed)
    ts = ((torch.randperm(steps, generator=generator) + torch.rand(steps, generator=generator)) / steps).tolist()
    batches = _batches(train, batch_size, generator, bend.work.device)
    recent: list[Tensor] = []
    mean = math.nan
    with telling(progress, "steps") as tell, preserved_random_states(), bend.bound(model):
        _seed_global_generators(seed)
        model.train()
        for step, (t, (inputs, targets)) in enumerate(zip(ts, batches, strict=False), start=1):
            bend.go_to(t)
            outputs = model(inputs)
            value = _mean(loss(getattr(outputs, "logits", outputs), targets))
            torch.autograd.backward(value)
            bend.pull_back(t, weight_decay)
            optimizer.param_groups[0]["lr"] = lr * _schedule((step - 1) / steps)
            optimizer.step()
            recent.append(value.detach())
            if step % WINDOW == 0 or step == steps:
                mean = float(torch.stack(recent).double().mean())
                recent.clear()
                if not math.isfinite(mean):
                    raise InputError(f"the loss on the curve is {mean} by step {step}; choose a lower lr than {lr}.")
                tell(step, steps, {"train": {"loss": mean}})
    training: dict[str, Any] = {
        "steps": steps,
        "batch_size": None if isinstance(train, DataLoader) else batch_size,
        "lr": lr,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "seed": seed,
        "loss": mean,
    }
    return Curve(kind, bend.a, bend.theta(), bend.b, bend.parameters, training)


class _Bend:
    """The point between while it is trained, and a model that goes along the curve.

    Attributes:
        a: model A.
        b: model B.
        anchors: the point between, one flat buffer for each dtype that is averaged, of at least 32 bits.
        work: the weights at the place where the model is.
        parameters: the canonical keys of the model's parameters.
    """

    def __init__(self, model: nn.Module, a: Source, b: Source, kind: str, backend: str) -> None:
        """Load the ends and start in their middle."""
        self.work = FlatState.from_module(model)
        self.a, self.b = (
            load_source(source, self.work.layout, name, self.work.device) for source, name in ((a, "a"), (b, "b"))
        )
        self._theta = merging.lerp_states(self.a, self.b, 0.5, backend=backend)
        self.anchors = [
            nn.Parameter(x.to(torch.promote_types(x.dtype, torch.float32), copy=True)) for x in self._theta.averaged
        ]
        self._kind, self._backend = kind, backend
        self._gradient = FlatState.zeros(self.work.layout, device=self.work.device)
        named = canonical_parameters(model)
        self.parameters = tuple(named)
        self._trained = {key: parameter for key, parameter in named.items() if parameter.requires_grad}
        if not self._trained:
            raise InputError(f"the model {type(model).__name__} has no parameters that require gradients.")

    @contextmanager
    def bound(self, model: nn.Module) -> Iterator[None]:
        """While it lasts, the model's tensors are views of ``work``, and its gradients views of one flat buffer."""
        with preserved_model(model), self.work.bind(model):
            for key, parameter in self._trained.items():
                parameter.grad = self._gradient[key]
            yield

    @torch.no_grad()
    def go_to(self, t: float) -> None:
        """Move the model to t, with gradients of zero."""
        combine(self._kind, self.a.averaged, self.anchors, self.b.averaged, t, self.work.averaged, self._backend)
        for buffer in self._gradient.averaged:
            buffer.zero_()

    @torch.no_grad()
    def pull_back(self, t: float, weight_decay: float) -> None:
        """Turn the gradient in the weights, which are at t, into that in the point between."""
        if weight_decay:
            gradients = [self._gradient[key] for key in self._trained]
            torch._foreach_add_(gradients, list(self._trained.values()), alpha=weight_decay)
        for anchor, gradient in zip(self.anchors, self._gradient.averaged, strict=True):
            anchor.grad = gradient.to(anchor.dtype).mul_(point_weights(self._kind, t)[1])

    @torch.no_grad()
    def theta(self) -> FlatState:
        """The point between, rounded once to the model's dtypes."""
        ops.weighted_sum([self.anchors], [1.0], out=self._theta.averaged, backend=self._backend)
        return self._theta


def _check_settings(*, steps: int, batch_size: int, lr: float, momentum: float, weight_decay: float) -> None:
    for name, value in (("steps", steps), ("batch_size", batch_size)):
        if not (hasattr(value, "__index__") and value >= 1):
            raise InputError(f"{name}={value!r}, expected an integer of at least 1.")
    for name, number, high in (
        ("lr", lr, math.inf),
        ("momentum", momentum, 1),
        ("weight_decay", weight_decay, math.inf),
    ):
        if not 0 <= number < high:
            raise InputError(
                f"{name}={number!r}, expected a number of at least 0{' and below 1' if high == 1 else ''}."
            )


def _mean(values: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """The mean of a metric's values, weighted if it gives weights."""
    if isinstance(values, tuple):
        return (values[0] * values[1]).sum() / values[1].sum()
    return values.mean()


def _schedule(done: float) -> float:
    """The factor of the learning rate when this share of the steps is done."""
    return 1.0 - 0.99 * min(max((done - 0.5) / 0.4, 0.0), 1.0)


def _seed_global_generators(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _batches(
    train: Data, batch_size: int, generator: torch.Generator, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches without end: those of a loader, or permutations of the data whose remainder under a batch is left out."""
    if isinstance(train, DataLoader):
        while True:
            batch = None
            for batch in train:
                inputs, targets = materialise(batch)
                yield inputs.to(device), targets.to(device)
            if batch is None:
                raise InputError("train is a DataLoader without batches; pass training data.")
    inputs, targets = (tensor.to(device) for tensor in materialise(train))
    size = min(batch_size, len(inputs))
    while True:
        for rows in torch.randperm(len(inputs), generator=generator).to(device).split(size):
            if len(rows) == size:
                yield inputs[rows], targets[rows]
