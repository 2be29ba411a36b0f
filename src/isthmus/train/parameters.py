"""The trainable parameters of one or several models, flat; and averages of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from isthmus.errors import InputError
from isthmus.flat import Entry, FlatState


class FlatParameters:
    """The trainable parameters of models of one architecture, and their gradients, as views of flat buffers.

    There is one buffer of each kind per dtype, of shape (models, size), with one model in each row.

    Args:
        models: their parameters become views of the buffers.
        channels_last: keep the kernels of two-dimensional convolutions in the order (out, height, width, in), which
            convolutions of channels-last images take as it is.

    Attributes:
        values: of each model the flat parameters, one per dtype, for the optimiser; their ``grad`` are the flat
            gradients.
        gradients: the flat gradients of all models, (models, size), one per dtype.
        stacked: name -> the parameter of all models, (models, ...), a leaf of automatic differentiation.
        stacked_gradients: name -> its gradient, a view of the flat gradients.

    Raises:
        InputError: a model has nothing to train, or the models' parameters differ in name, shape or dtype.
    """

    def __init__(self, models: Sequence[nn.Module], *, channels_last: bool = False) -> None:
        parameters = [
            {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
            for model in models
        ]
        if not parameters[0]:
            raise InputError(f"the model {type(models[0]).__name__} has no parameters that require gradients.")
        flats = [FlatState.from_state_dict(named) for named in parameters]
        for flat in flats[1:]:
            flats[0].layout.check(flat.layout, name="a model", expected="the first model")
        buffers = {dtype: torch.stack([flat.buffers[dtype] for flat in flats]) for dtype in flats[0].buffers}
        gradients = {dtype: torch.zeros_like(buffer) for dtype, buffer in buffers.items()}
        self.stacked: dict[str, Tensor] = {}
        self.stacked_gradients: dict[str, Tensor] = {}
        for name, entry in zip(parameters[0], flats[0].layout.entries.values(), strict=True):
            values, gradient = (_view(kind[entry.dtype], entry, channels_last) for kind in (buffers, gradients))
            for named, row, slope in zip(parameters, values, gradient, strict=True):
                row.copy_(named[name].detach())  # its memory may be in another order
                named[name].data = row
                named[name].grad = slope
            self.stacked[name] = values.requires_grad_()
            self.stacked_gradients[name] = gradient
        self.gradients = list(gradients.values())
        self.values = [[nn.Parameter(buffer[index]) for buffer in buffers.values()] for index in range(len(models))]
        for index, own in enumerate(self.values):
            for value, gradient in zip(own, self.gradients, strict=True):
                value.grad = gradient[index]

    def zero_grad(self) -> None:
        """Set all gradients to zero, in place."""
        for gradient in self.gradients:
            gradient.zero_()


def _view(buffer: Tensor, entry: Entry, channels_last: bool) -> Tensor:
    """One tensor of every row of a buffer, (models, ...)."""
    flat = buffer.detach().narrow(1, entry.offset, entry.numel)
    if channels_last and len(entry.shape) == 4:
        out, channels, height, width = entry.shape
        return flat.view(len(flat), out, height, width, channels).movedim(-1, 2)
    return flat.view(len(flat), *entry.shape)


class MovingAverage:
    """Exponential moving average of a module's parameters and floating-point buffers, from its present state on.

    BatchNorm's running statistics are averaged like weights; integer buffers are the module's own.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._module = module
        self._decay = decay
        state = {key: value for key, value in module.state_dict().items() if value.is_floating_point()}
        self._averages = {key: value.clone() for key, value in state.items()}
        held = {
            f"{prefix}.{name}".lstrip("."): (tensors, name)
            for prefix, part in module.named_modules(remove_duplicate=False)
            for tensors in (part._parameters, part._buffers)
            for name in tensors
        }
        # where each is looked up, since a forward pass may put another tensor there
        self._places = [held.get(key, ({key: value}, key)) for key, value in state.items()]

    @torch.no_grad()
    def update(self) -> None:
        """Set average = decay · average + (1 − decay) · value."""
        values = [tensors[name] for tensors, name in self._places]
        torch._foreach_lerp_(list(self._averages.values()), values, 1 - self._decay)

    def state_dict(self) -> dict[str, Tensor]:
        """The averaged state of the module."""
        return self._module.state_dict() | self._averages
