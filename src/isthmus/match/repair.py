r"""REPAIR: give the layers of a merged model back the statistics that interpolation takes from them.

Units of an interpolated network vary less than those of either end, layer after layer, even where the ends are aligned.
Jordan, Sedghi, Saukh, Entezari and Neyshabur, "REPAIR: REnormalizing Permuted Activations for Interpolation Repair",
ICLR 2023, arXiv 2211.08403, rescale each unit so that over training data

.. math::

    E[z_\alpha] = (1 - \alpha) E[z_a] + \alpha E[z_b], \qquad
    \mathrm{sd}[z_\alpha] = (1 - \alpha) \mathrm{sd}[z_a] + \alpha \, \mathrm{sd}[z_b].
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from isthmus import norms
from isthmus.batches import Inputs, run, size_of
from isthmus.errors import InputError, warn
from isthmus.flat import FlatState, canonical_keys
from isthmus.merging.sources import Source, load_source
from isthmus.norms import preserved_modes
from isthmus.preserve import preserved_random_states

from .moments import Moments

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
FOLDED = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)  # and no others: subclasses may compute something else


class Repaired(nn.Module):
    """A layer whose outputs are scaled and shifted, unit by unit: where this cannot be folded into its weights.

    Attributes:
        layer: the layer as it was.
        scale: shape (units,).
        shift: shape (units,).
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, layer: nn.Module, axis: int, scale: Tensor, shift: Tensor) -> None:
        """Wrap ``layer``, whose units lie on the ``axis`` of its outputs, counted from the end."""
        super().__init__()
        self.layer = layer
        self._shape = (-1, *[1] * (-axis - 1))
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The outputs of the layer, corrected."""
        outputs: Tensor = self.layer(*args, **kwargs)
        return outputs * self.scale.view(self._shape) + self.shift.view(self._shape)


@dataclass
class _Calls:
    """How a model calls its layers in one forward pass, by name.

    Attributes:
        order: every call of a linear layer, a convolution or a BatchNorm layer.
        normalised: layers whose outputs go straight into a BatchNorm layer.
        last: layers whose outputs the model returns.
    """

    order: list[str] = field(default_factory=list)
    normalised: set[str] = field(default_factory=set)
    last: set[str] = field(default_factory=set)


class _Stop(BaseException):
    """Ends a forward pass after the layer that was looked at."""


def repair(
    merged: Source,
    a: Source,
    b: Source,
    data: Tensor | Iterable[object],
    *,
    alpha: float = 0.5,
    outputs: bool = False,
    batch_size: int = 256,
) -> nn.Module:
    """A merged model whose layers have the means and deviations between those of its ends.

    Each hidden unit of a linear layer and each channel of a convolution is corrected by z ← (z − m) · s' / s + m', with
    its own mean m and standard deviation s over the data, before the activation function, and the goals m' and s'
    interpolated between the ends'. The correction goes into weights and bias.
    Layers are measured and corrected one after the other in the order of the forward pass, each with those before it
    corrected already, so that at the end all have their goals, whatever the batch size. That takes one pass over the
    data up to each layer, and a whole one for each end. A unit that is constant in the merged model is only shifted.

    *BatchNorm* layers with running statistics do by themselves what this does, once their statistics are those of the
    merged model: their outputs then have the mean and deviation that bias and weight say, which are interpolated. So
    statistics are re-estimated (``isthmus.norms.reset_statistics``), before the first layer is corrected and again
    where a correction changed what comes after it, and layers whose outputs go straight into BatchNorm are left alone.

    Corrected are ``nn.Linear``, convolutions, transposed ones too, and the ``Conv1D`` of transformers. Those without a
    bias have one afterwards, another key of the state dict. Where the correction cannot be folded, because weights are
    shared or made by something else (tied embeddings, parametrisations) or a hook changes outputs, the layer is wrapped
    in a ``Repaired`` module. A layer that is called several times in a forward pass has one correction, by the
    statistics over all calls; if one of them depends on another, these are not quite the goals.

    Args:
        merged: the merged model: a module; or its weights, as ``isthmus.merge`` returns them (a state dict, a
            ``FlatState`` or the path of a safetensors file), if ``a`` or ``b`` is a module, which says what else there
            is to a model.
        a: the end at alpha = 0, in the order of units that was merged: a module or weights, likewise.
        b: the end at alpha = 1.
        data: training inputs, some thousand of them; unaugmented: one tensor of shape (n, ...), on the device of the
            model, or an iterable of batches (a ``DataLoader``), each a tensor of inputs, a mapping of the model's
            arguments by name, or a sequence that begins with one of these. Batches are kept in memory.
        alpha: where the merged model lies between the ends, from 0 to 1.
        outputs: whether layers whose outputs the model returns, and the one that is called last, are corrected too.
            They are no hidden units, and the classes that they tell apart need not be as frequent in what a merged
            model says as in what its ends say.
        batch_size: examples per forward pass where ``data`` is one tensor; only BatchNorm statistics depend on it.

    Returns:
        A corrected copy, of ``a`` or else ``b`` where ``merged`` is weights. The models, their modes and the global
        random states are as before.

    Raises:
        InputError: none of the models is a module, an end does not have the tensors of the merged model, ``alpha`` is
            not within [0, 1], there are fewer than two examples, the model has nothing to correct, or the outputs of a
            layer are not finite.
        FileError: a file is missing or not a safetensors file.

    Warns:
        IsthmusWarning: linear layers or convolutions are not called as modules (those within
            ``nn.MultiheadAttention``, for instance), and are left as they are.
    """
    if not 0 <= alpha <= 1:
        raise InputError(
            f"alpha is {alpha}, expected a number from 0 to 1: beyond the ends no deviation lies between theirs."
        )
    with preserved_random_states(), torch.no_grad():
        result = _module(merged, a, b)
        batches = list(norms.batches(data, batch_size))
        if sum(map(size_of, batches)) < 2:
            raise InputError("data for REPAIR holds fewer than two examples; pass training inputs.")
        with preserved_modes(result):
            result.eval()
            calls = _calls(result, batches[0])
            left = calls.normalised if outputs else calls.normalised | calls.last
            names = [name for name in dict.fromkeys(calls.order) if _is_affine(result.get_submodule(name))]
            if not norms.batch_norms(result) and left.issuperset(names):
                raise InputError(
                    f"{type(result).__name__} has no hidden linear layer or convolution, called as a module, and no "
                    "BatchNorm layer: there is nothing to repair. outputs=True corrects what it returns."
                )
            goals = _goals(result, a, b, alpha, batches, [name for name in names if name not in left])
            result = _correct(result, goals, calls, batches)
    for module in result.modules():
        if isinstance(module, Repaired):
            module.training = module.layer.training
    return result


def _module(merged: Source, a: Source, b: Source) -> nn.Module:
    """A copy of the merged model, which is a module or the weights of one like ``a`` or ``b``."""
    if isinstance(merged, nn.Module):
        return copy.deepcopy(merged)
    architecture = next((end for end in (a, b) if isinstance(end, nn.Module)), None)
    if architecture is None:
        raise InputError(
            "none of merged, a and b is a module, and weights alone cannot be run; put them into one first: "
            "model.load_state_dict(merged), then repair(model, a, b, data)."
        )
    module = copy.deepcopy(architecture)
    own = FlatState.from_module(module)
    weights = load_source(merged, own.layout, "merged", own.device)
    tensors = module.state_dict(keep_vars=True)
    for key, canonical in canonical_keys(tensors).items():
        tensors[key].copy_(weights[canonical])
    return module


def _calls(model: nn.Module, inputs: Inputs) -> _Calls:
    """How ``model`` calls its layers, by one forward pass."""
    calls = _Calls()
    producers: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # id of an output -> the output, and whose it is
    handles = []

    def producer(value: object) -> set[str]:
        reference, name = producers.get(id(value), (None, ""))
        return {name} if reference is not None and reference() is value else set()

    def normalises(_layer: nn.Module, args: tuple[Any, ...]) -> None:
        for value in args:
            calls.normalised |= producer(value)

    def called(name: str) -> Any:
        def hook(layer: nn.Module, _args: object, output: object) -> None:
            calls.order.append(name)
            if isinstance(output, Tensor) and not _is_norm(layer):
                producers[id(output)] = weakref.ref(output), name

        return hook

    for name, layer in model.named_modules():
        if isinstance(layer, _BatchNorm):
            handles.append(layer.register_forward_pre_hook(normalises))
        if _is_norm(layer) or _is_affine(layer):
            handles.append(layer.register_forward_hook(called(name)))
    try:
        returned = run(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    layers = [name for name, layer in model.named_modules() if _is_affine(layer)]
    calls.last.update(*map(producer, tree_leaves(returned)), [name for name in calls.order if name in layers][-1:])
    if missing := [name for name in layers if name not in calls.order]:
        warn(f"{', '.join(map(repr, missing))} are not called as modules; they are left as they are.")
    return calls


def _goals(
    merged: nn.Module, a: Source, b: Source, alpha: float, batches: Sequence[Inputs], names: Sequence[str]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Name of a layer -> goal mean and goal deviation."""
    twin = copy.deepcopy(merged).eval()
    own = FlatState.from_module(twin)
    found = []
    for source, title in ((a, "a"), (b, "b")):
        with load_source(source, own.layout, title, own.device).bind(twin), _measuring(twin, names) as moments:
            for inputs in batches:
                run(twin, inputs)
        found.append({name: _statistics(moments[name], name, f"model {title}") for name in names})
    return {
        name: (
            (1 - alpha) * found[0][name][0] + alpha * found[1][name][0],
            (1 - alpha) * found[0][name][1] + alpha * found[1][name][1],
        )
        for name in names
    }


def _correct(
    model: nn.Module, goals: dict[str, tuple[Tensor, Tensor]], calls: _Calls, batches: Sequence[Inputs]
) -> nn.Module:
    """Correct the layers of ``model`` one after the other; returns the model, a new one if it was itself one layer."""
    stale = True  # whether BatchNorm statistics are not those of the layers in front
    for name in calls.order:
        layer = model.get_submodule(name)
        if _is_norm(layer):
            if stale:
                norms.reset_statistics(model, batches)
                stale = False
        elif name in goals:
            with _measuring(model, [name], stop_after=calls.order.count(name)) as moments:
                for inputs in batches:
                    with suppress(_Stop):
                        run(model, inputs)
            mean, deviation = _statistics(moments[name], name, "the merged model")
            goal_mean, goal_deviation = goals.pop(name)
            varies = deviation > mean.abs() * torch.finfo(_weight(layer).dtype).eps  # more than rounding does
            scale = torch.where(varies, goal_deviation / deviation, 1.0)
            model = _apply(model, layer, scale, goal_mean - scale * mean)
            stale = True
    return model


@contextmanager
def _measuring(
    model: nn.Module, names: Sequence[str], *, stop_after: int | None = None
) -> Iterator[dict[str, Moments]]:
    """The moments of the outputs of layers in the forward passes of the block, each of which may stop after a call."""
    moments: dict[str, Moments] = {}
    calls = 0

    def record(name: str) -> Any:
        def hook(layer: nn.Module, _args: object, output: Tensor) -> None:
            nonlocal calls
            rows = output.movedim(_axis(layer), -1).flatten(0, -2)
            if name not in moments:
                moments[name] = Moments(rows.shape[1], device=rows.device)
            moments[name].update(rows)
            calls += 1
            if stop_after is not None and calls % stop_after == 0:
                raise _Stop

        return hook

    handles = [model.get_submodule(name).register_forward_hook(record(name)) for name in names]
    try:
        yield moments
    finally:
        for handle in handles:
            handle.remove()


def _statistics(moments: Moments, name: str, model: str) -> tuple[Tensor, Tensor]:
    mean, deviation = moments.mean, moments.deviation
    if not bool((mean.isfinite() & deviation.isfinite()).all()):
        raise InputError(
            f"the outputs of the layer {name!r} of {model} are not finite; check its weights and the data."
        )
    return mean, deviation


def _apply(model: nn.Module, layer: nn.Module, scale: Tensor, shift: Tensor) -> nn.Module:
    """Scale and shift the outputs of ``layer`` within ``model``; returns the model."""
    if not _foldable(layer, model):
        dtype = _weight(layer).dtype
        wrapper = Repaired(layer, _axis(layer), scale.to(dtype), shift.to(dtype))
        for owner in list(model.modules()):
            for name, child in owner._modules.items():
                if child is layer and owner is not wrapper:
                    owner._modules[name] = wrapper
        return wrapper if layer is model else model
    weight = _weight(layer)
    rows = weight.double()
    if isinstance(layer, TRANSPOSED):  # (in, groups · out, ...), a group's inputs and outputs being rows and columns
        grouped = rows.unflatten(0, (layer.groups, -1)) * scale.view(layer.groups, 1, -1, *[1] * (rows.dim() - 2))
        weight.copy_(grouped.flatten(0, 1))
    elif _is_transposed(layer):
        weight.copy_(rows * scale)
    else:
        weight.copy_(rows * scale.view(-1, *[1] * (rows.dim() - 1)))
    bias: Tensor | None = layer.bias  # type: ignore[assignment]
    if bias is None:
        layer.bias = nn.Parameter(shift.to(weight.dtype), requires_grad=weight.requires_grad)
    else:
        bias.copy_(bias.double() * scale + shift)
    return model


def _foldable(layer: nn.Module, model: nn.Module) -> bool:
    """Whether ``layer`` computes W x + c with parameters of its own and nothing else."""
    known = type(layer) in FOLDED or _is_transposed(layer)
    if not known or layer._forward_hooks or layer._forward_pre_hooks or "forward" in layer.__dict__:
        return False
    own = {id(parameter) for parameter in layer.parameters(recurse=False)}
    others = (
        parameter for other in model.modules() if other is not layer for parameter in other.parameters(recurse=False)
    )
    return layer._parameters.get("weight") is not None and not any(id(parameter) in own for parameter in others)


def _is_norm(layer: nn.Module) -> bool:
    return isinstance(layer, _BatchNorm) and layer.running_mean is not None


def _is_affine(layer: nn.Module) -> bool:
    """Whether a layer is one of those that are corrected."""
    return (isinstance(layer, FOLDED) or _is_transposed(layer)) and _weight(layer).is_floating_point()


def _is_transposed(layer: nn.Module) -> bool:
    """Whether it is the linear layer of transformers whose weight has its units on the second axis."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers.")


def _axis(layer: nn.Module) -> int:
    """The axis of the outputs, counted from the end, on which the units of a layer lie."""
    return -1 if _weight(layer).dim() == 2 else 1 - _weight(layer).dim()


def _weight(layer: nn.Module) -> Tensor:
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return weight
