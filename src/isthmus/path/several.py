r"""Evaluate several models on a line at once, where all parameters belong to linear layers.

The weights of K models between A and B need not be written: ``isthmus.ops.multi_linear`` interpolates them on the way
and returns the outputs of K layers for the same inputs, or for inputs of their own. The first linear layer that a batch
of n examples comes to makes K n rows of them, model after model. From there on the batch axis holds all models, and
what acts on each row by itself (activations, flattening) needs to know nothing of that. Outputs are split by models for
the metrics.

A forward pass may as well mix rows, read the batch's size or compute with weights by other ways than its layers. So
models far from each other are evaluated first one by one, and then K of them together: each mean, and the size of the
outputs, must be the same up to rounding, as for graphs (``isthmus.path.graphs``), or all are evaluated one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from isthmus import ops
from isthmus.flat import FlatState, canonical_keys

from .calibrate import is_compiled
from .device import InOrder
from .evaluate import Evaluator
from .graphs import agree, bounds, has_hooks, told
from .shared import replaced

T = TypeVar("T")

AT_ONCE = 16  # with 64 MiB for the largest output of a submodule, 1 GiB
Ends = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # weights and biases at A and B


class SeveralModels:
    """The models at several places of the line from A to B, on all splits.

    Attributes:
        model: whose layers are replaced meanwhile.
        evaluators: split -> evaluator.
        number: of models that are evaluated at once.
        bounds: by how much each of the ``means`` may differ from that of a single model.
    """

    def __init__(
        self,
        model: nn.Module,
        a: FlatState,
        b: FlatState,
        evaluators: Mapping[str, Evaluator],
        device: InOrder,
        backend: str,
    ) -> None:
        """Find the weights of each layer.

        Args:
            model: a model for which ``why_not_several`` found no reason against it.
            a: the model at one end.
            b: the model at the other end.
            evaluators: split -> evaluator.
            device: where all are.
            backend: as for ``isthmus.ops.multi_linear``.
        """
        self.model = model
        self.evaluators = evaluators
        self.number = number_of(evaluators, device, backend)
        self.bounds = [bound for each in evaluators.values() for bound in bounds(each, model)] * self.number
        self._device, self._backend = device, backend
        keys = {id(tensor): key for key, tensor in model.state_dict(keep_vars=True).items()}
        canonical = canonical_keys(keys.values())
        self._layers: dict[nn.Module, Ends] = {}
        for layer in model.modules():
            if type(layer) is nn.Linear:
                weight = canonical[keys[id(layer.weight)]]
                bias = None if layer.bias is None else canonical[keys[id(layer.bias)]]
                biases = (None, None) if bias is None else (a[bias], b[bias])
                self._layers[layer] = (a[weight], b[weight], *biases)
        self._widened = False  # whether the current batch came to a linear layer

    def why_not(self, alphas: Sequence[float], expected: Sequence[Sequence[float]]) -> str | None:
        """Why ``means`` are not to be used, if at ``number`` places they are not those of single models."""
        try:
            found = self.compute(alphas).flatten().tolist()
        except Exception as error:
            return f"evaluated at once, the models fail: {told(error)}"
        if not agree(found, [value for row in expected for value in row], self.bounds):
            return "evaluated at once, the models give other values than one by one, by more than rounding"
        return None

    def compute(self, alphas: Sequence[float]) -> Tensor:
        """What ``means`` returns, for at least one and at most ``number`` places; rows beyond are those of the last."""
        return self.means(self._device.upload(self.filled(alphas)))

    def filled(self, places: Sequence[T]) -> list[T]:
        """``number`` places, or what belongs to them, the last again and again where there are fewer."""
        return [*places, *[places[-1]] * (self.number - len(places))]

    def means(self, alphas: Tensor) -> Tensor:
        """The means and sizes of all models, a row for each, split by split; places are read on the device."""
        self.model.eval()

        def forward(layer: nn.Module, inputs: Tensor) -> Tensor:
            weight_a, weight_b, bias_a, bias_b = self._layers[layer]
            each = inputs.reshape(-1, inputs.shape[-1])
            if self._widened and inputs.untyped_storage().data_ptr() not in resident:
                each = each.view(self.number, -1, inputs.shape[-1])
            self._widened = True
            outputs = ops.multi_linear(
                *(each, weight_a, weight_b, alphas), bias_a=bias_a, bias_b=bias_b, backend=self._backend
            )
            return outputs.view(-1, *inputs.shape[1:-1], len(weight_a))

        def model(inputs: Tensor) -> Any:
            self._widened = False
            return self.model(inputs)

        means = []
        for evaluator in self.evaluators.values():
            resident = {evaluator.inputs.untyped_storage().data_ptr()}
            with replaced(list(self._layers), forward):
                means.append(evaluator.bare_means(model, self.number))
        return torch.cat(means, dim=1)


def number_of(evaluators: Mapping[str, Evaluator], device: InOrder, backend: str) -> int:
    """How many models the evaluators let be evaluated at once; by default several where a GPU has a kernel for it."""
    default = AT_ONCE if device.background and ops.choose_backend(backend, device.device) != "reference" else 1
    asked = (default if each.alphas_at_once == "auto" else each.alphas_at_once for each in evaluators.values())
    return min(asked, default=1)


def why_not_several(model: nn.Module, evaluators: Mapping[str, Evaluator], device: InOrder, backend: str) -> str | None:
    """Why the models on a line cannot be evaluated several at once, if that is known beforehand."""
    if number_of(evaluators, device, backend) == 1:
        asked = any(each.alphas_at_once == 1 for each in evaluators.values())
        return "alphas_at_once=1 was asked for" if asked else f"it is slower on the device {str(device.device)!r}"
    if is_compiled(model):
        return "the model is compiled"
    if has_hooks(model):
        return "the model has hooks"
    if any(each.dtype is not None for each in evaluators.values()):
        return "the model runs under autocast"
    if next(iter(model.buffers()), None) is not None:
        return "the model has buffers"
    linear = [layer for layer in model.modules() if type(layer) is nn.Linear and "forward" not in layer.__dict__]
    owned = {id(tensor) for layer in linear for name, tensor in layer.named_parameters(recurse=False)}
    if not linear or any(id(parameter) not in owned for parameter in model.parameters()):
        return "not all parameters belong to linear layers"
    if len({parameter.dtype for parameter in model.parameters()}) > 1:
        return "the parameters are of several dtypes"
    return None
