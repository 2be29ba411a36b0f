"""The loss of a training batch: of one model, or of several models at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from isthmus import norms
from isthmus.errors import InputError

from .config import Precision
from .host_state import HostState
from .parameters import FlatParameters

# far above the relative rounding of a pass through a deep network, TF32 included, and far below another computation's
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-2, torch.bfloat16: 1e-1}


def rounding(dtype: torch.dtype, precision: Precision) -> float:
    """A bound on how far rounding may move what comes of a pass, as a part of its size."""
    return _ROUNDING[torch.bfloat16 if precision == "bfloat16" else dtype]


class StackError(Exception):
    """Models cannot be trained at once; the message says why. They are trained one by one instead."""


def batch_logits(forward: Callable[[Tensor], Tensor], inputs: Tensor, precision: Precision) -> Tensor:
    """What a model makes of a batch; with ``bfloat16`` under autocast, and widened to float32 afterwards.

    An autocast around the call has no part in it.
    """
    if precision == "float32":
        with torch.autocast(inputs.device.type, enabled=False):
            return forward(inputs)
    # one inside another would keep its copies of weights until the outer one ends: those of the first step
    with torch.autocast(inputs.device.type, torch.bfloat16, cache_enabled=False):
        logits = forward(inputs)
    return logits.float()


class Network:
    """Models of one architecture that are trained side by side.

    One model runs as it is. Several run as one: ``torch.vmap`` maps the first model's ``forward`` over the stacked
    parameters, buffers and inputs of all, and a step launches as many operations as a step of one model. What BatchNorm
    normalises by, and its running statistics, are each model's own.

    Args:
        models: their parameters and, of several, their buffers become views of stacked ones.
        precision: see ``TrainConfig``.
        channels_last: see ``FlatParameters``; only with one model.

    Attributes:
        models: the models.
        parameters: their parameters.

    Raises:
        InputError: one model has nothing to train.
        StackError: several have nothing to train, their parameters or buffers differ in name, shape or dtype, or
            tensors that are attributes of their modules differ: the stack has the first model's.
    """

    def __init__(self, models: Sequence[nn.Module], precision: Precision, *, channels_last: bool = False) -> None:
        self.models = list(models)
        try:
            self.parameters = FlatParameters(models, channels_last=channels_last)
        except InputError as error:
            if len(models) > 1:
                raise StackError(str(error)) from error
            raise
        self._precision = precision
        self._frozen: dict[str, Tensor] = {}  # of several models: parameters that are not trained, (models, ...)
        self._buffers: dict[str, Tensor] = {}
        self._cumulative: list[nn.modules.batchnorm._BatchNorm] = []
        self._batches = 0
        if len(models) > 1:
            _check_attributes(models)
            self._frozen = _stacked([{k: v for k, v in m.named_parameters() if not v.requires_grad} for m in models])
            self._buffers = _stacked([dict(model.named_buffers()) for model in models])
            self._cumulative = [layer for layer in norms.batch_norms(models[0]) if layer.momentum is None]
            weights = list((self.parameters.stacked | self._frozen).values())
        else:
            weights = [parameter[None] for parameter in models[0].parameters()]
        self._weights = [weight.detach() for weight in weights if weight.ndim > 2]

    @property
    def counts_batches(self) -> bool:
        """Whether the host sets a factor before every step: BatchNorm's of several models, with ``momentum=None``."""
        return bool(self._cumulative)

    def train(self) -> None:
        """Put all models into training mode."""
        for model in self.models:
            model.train()
        if self._cumulative:
            self._batches = max(int(layer.num_batches_tracked or 0) for layer in self._cumulative)

    def backward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of each model on its own batch, and its gradient into the flat gradients.

        Args:
            inputs: (batch, ...) for one model, (models, batch, ...) for several.
            labels: (batch,) or (models, batch).

        Returns:
            The cross-entropy averaged over the batch: () for one model, (models,) for several.

        Raises:
            RuntimeError: of several models, ``forward`` draws random numbers, looks at values, or does something else
                that ``torch.vmap`` cannot map.
        """
        if len(self.models) == 1:
            self.parameters.zero_grad()
            loss = functional.cross_entropy(batch_logits(self.models[0], inputs, self._precision), labels)
            torch.autograd.backward(loss)
            return loss.detach()
        stacked = self.parameters.stacked
        with self._cumulative_average():
            # drawn for all models at once, random numbers would not be those that each draws alone
            logits = torch.vmap(self._forward, randomness="error")(stacked, self._frozen, self._buffers, inputs)
        losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        losses = losses.view(labels.shape).mean(1)
        gradients = torch.autograd.grad(losses, [*stacked.values()], torch.ones_like(losses), materialize_grads=True)
        torch._foreach_copy_([*self.parameters.stacked_gradients.values()], gradients)
        return losses.detach()

    def check(self, inputs: Tensor, labels: Tensor) -> None:
        """Compare losses, gradients and buffers after one batch of several models with those of each model alone.

        The models' buffers and attributes come back as they were; the gradients are left as they come.

        Raises:
            StackError: the models cannot be mapped, differ by more than rounding, or change what is not in the stack.
        """
        host = HostState(self.models)
        before = {name: buffer.clone() for name, buffer in self._buffers.items()}

        def results(losses: Tensor) -> list[Tensor]:
            tensors = [losses, *self.parameters.gradients, *self._buffers.values()]
            wide = [tensor.double() if tensor.dtype == torch.float64 else tensor.float() for tensor in tensors]
            rows = [tensor.detach().reshape(len(self.models), -1).clone() for tensor in wide]
            for name, buffer in self._buffers.items():
                buffer.copy_(before[name])
            return rows

        try:
            try:
                together = results(self.backward(inputs, labels))
            except Exception as error:
                raise StackError(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from error
            change = host.change()
            host.restore()
            self.parameters.zero_grad()
            logits = [batch_logits(m, x, self._precision) for m, x in zip(self.models, inputs, strict=True)]
            losses = torch.stack([functional.cross_entropy(y, z) for y, z in zip(logits, labels, strict=True)])
            losses.sum().backward()
            change = change or host.change()
        finally:
            host.restore()
        if change:
            raise StackError(f"in a forward pass {change}, which a stack would not notice")
        apart = results(losses)
        self.train()
        names = ["losses", *("gradients" for _ in self.parameters.gradients), *self._buffers]
        for name, ours, theirs in zip(names, together, apart, strict=True):
            bound = rounding(theirs.dtype, self._precision)
            difference, size = (ours - theirs).norm(dim=1), theirs.norm(dim=1)
            if name != "gradients":  # means of what cancels are as exact as what they are means of, not as themselves
                size = size + 1
            if not (torch.equal(ours, theirs) or bool((difference <= bound * size).all())):
                raise StackError(f"stacked models gave other {name} than each alone")

    def weight_norms_squared(self) -> Tensor:
        """‖θ‖² of each model over its parameters of two or more dimensions, (models,)."""
        start = torch.zeros(len(self.models), device=self.parameters.gradients[0].device)
        return sum((weight.square().flatten(1).sum(1) for weight in self._weights), start=start)

    def _forward(
        self, trained: dict[str, Tensor], frozen: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor
    ) -> Tensor:
        tensors = trained | frozen | buffers
        return batch_logits(lambda x: functional_call(self.models[0], tensors, (x,)), inputs, self._precision)

    @contextmanager
    def _cumulative_average(self) -> Iterator[None]:
        """Give BatchNorm that averages all batches alike its factor: it would count them in a stacked tensor."""
        self._batches += 1
        for layer in self._cumulative:
            layer.momentum = 1 / self._batches
        try:
            yield
        finally:
            for layer in self._cumulative:
                layer.momentum = None


def _stacked(models: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors of several models as (models, ...), of which they become views.

    Raises:
        StackError: the models' tensors differ in name, shape or dtype.
    """
    names = models[0].keys()
    kinds = [{name: (value.shape, value.dtype) for name, value in tensors.items()} for tensors in models]
    if any(kind != kinds[0] for kind in kinds):
        raise StackError("the models' buffers differ in name, shape or dtype")
    stacked = {name: torch.stack([tensors[name].detach() for tensors in models]) for name in names}
    for index, tensors in enumerate(models):
        for name, tensor in tensors.items():
            tensor.data = stacked[name][index]
    return stacked


def _check_attributes(models: Sequence[nn.Module]) -> None:
    """Raise a ``StackError`` where tensors that are attributes of modules differ between models."""
    first, *others = (
        {
            f"{prefix}.{name}".lstrip("."): value
            for prefix, module in model.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, Tensor)
        }
        for model in models
    )
    for other in others:
        for name in first.keys() | other.keys():
            ours, theirs = first.get(name), other.get(name)
            if ours is None or theirs is None or ours.dtype != theirs.dtype or not torch.equal(ours, theirs):
                raise StackError(f"the models' attributes {name} are different tensors, of which a stack has the first")
