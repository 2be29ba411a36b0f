"""RegMean: merge each linear layer so that its outputs are, by least squares, those of the models on their own inputs.

Jin, Ren, Preoţiuc-Pietro and Cheng, "Dataless Knowledge Fusion by Merging Weights of Language Models", ICLR 2023,
arXiv 2212.09849.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from isthmus import ops
from isthmus.errors import InputError, IsthmusWarning
from isthmus.norms import preserved_modes
from isthmus.preserve import preserved_random_states

from .companions import aligned, average, batches_of, proportions, state_keys, to_compute

SINGULAR = 1e-10  # directions whose share of the inputs' variance is below this count as directions without inputs
BLOCK = 2**22  # elements of a layer's input that are widened to float64 at a time

Convolution = nn.Conv1d | nn.Conv2d
Layer = nn.Linear | Convolution


@torch.no_grad()
def regmean(
    models: Sequence[Mapping[str, Tensor]],
    grams: Sequence[Mapping[str, Tensor]] | None,
    weights: Mapping[str, Sequence[float]],
    out: Mapping[str, Tensor],
    *,
    off_diagonal: float,
    keys: Collection[str],
) -> list[str]:
    r"""Merge the linear layers that have Gram matrices by regression.

    With weights :math:`W_i` of shape (out, in), Gram matrices :math:`G_i = X_i^\top X_i` of the layer's inputs and
    :math:`\tilde G_i = \alpha G_i + (1 - \alpha) \operatorname{diag} G_i` (section 3.2 of the paper, which takes
    :math:`\alpha = 0.9`, and 0.1 for T5),

    .. math:: W^\top = \Bigl(\sum_i w_i \tilde G_i\Bigr)^{-1} \sum_i w_i \tilde G_i W_i^\top,

    which at :math:`\alpha = 1` minimises :math:`\sum_i w_i \lVert X_i W^\top - X_i W_i^\top \rVert^2`. It is computed
    in float64 as a step away from the mean :math:`\bar W = \sum_i w_i W_i / \sum_i w_i`, and rounded once to the
    output's dtype:

    .. math:: W^\top = \bar W^\top + H^{+} \sum_i w_i \tilde G_i (W_i - \bar W)^\top, \qquad H = \sum_i w_i \tilde G_i.

    Equal models thus give themselves exactly. Directions in which no model had inputs keep the mean of the models:
    there :math:`H` is singular, and of all minimisers the one nearest to the mean is taken, with each input feature
    measured in units of its root mean square. For :math:`\alpha < 1` only features that are always zero are such.

    Args:
        models: canonical key -> floating-point tensor, for each model; equal keys and shapes.
        grams: key -> Gram matrix, symmetric and positive semidefinite, of shape (n, n), for each model. The weights of
            that key are read as a matrix of shape (rows, n); a convolution's (out, in, h, w) has n = in · h · w.
            Prefixes that all keys share are stripped. Keys are those of ``keys``; what is not in ``models`` is left
            out. A Gram matrix is a sum over examples: models that saw more of them count more.
        weights: key -> a weight for each model, not negative.
        out: key -> where to write; it may be exactly one model's tensor.
        off_diagonal: :math:`\alpha`, from 0 (each input feature by itself) to 1 (least squares).
        keys: all canonical keys of the models, merged or not.

    Returns:
        The keys that are in ``models`` and in ``grams``, in the order of the models: what was written.

    Raises:
        InputError: the Gram matrices do not fit the models, or are not finite, symmetric or positive semidefinite; a
            layer's weights are complex, infinite or NaN; a weight is negative; or ``off_diagonal`` is not in [0, 1].
    """
    if not 0 <= off_diagonal <= 1:
        raise InputError(f"off_diagonal is {off_diagonal}, expected a number from 0 to 1.")
    matrices = aligned(grams, len(models), keys, "grams", "isthmus.collect_grams")
    covered = [key for key in models[0] if key in matrices[0]]
    for key in covered:
        for index, (model, matrix) in enumerate(zip(models, matrices, strict=True)):
            _check(model[key], matrix[key], f"models[{index}][{key!r}]", f"grams[{index}][{key!r}]")
    shares = {key: proportions(weights[key], key) for key in covered}
    for key in covered:
        target = out[key]
        size = len(matrices[0][key])
        layers = [to_compute(model[key]).flatten(1) for model in models]
        mean = average(layers, shares[key])
        system = torch.zeros(size, size, dtype=torch.float64, device=target.device)
        right = torch.zeros_like(mean.T)
        for layer, matrix, share in zip(layers, matrices, shares[key], strict=True):
            gram = to_compute(matrix[key]).to(target.device)
            gram = share * (off_diagonal * gram + (1 - off_diagonal) * torch.diag(gram.diagonal()))
            system += gram
            right += gram @ (layer - mean).T
        tolerance = max(SINGULAR, size * max(torch.finfo(matrix[key].dtype).eps for matrix in matrices))
        mean += _solve(system, right, tolerance, key).T
        ops.weighted_sum([mean.view(target.shape)], [1.0], out=target)  # rounds once
    return covered


def _check(weights: Tensor, gram: Tensor, weights_name: str, gram_name: str) -> None:
    """Check one model's weights and Gram matrix against each other."""
    if gram.dim() != 2 or len(gram) != gram.shape[1] or weights.dim() < 2 or weights.shape[1:].numel() != len(gram):
        raise InputError(
            f"{gram_name} has shape {tuple(gram.shape)}, expected a square matrix as wide as the rows of "
            f"{weights_name}, whose shape is {tuple(weights.shape)}."
        )
    if weights.is_complex() or not bool(torch.isfinite(weights).all()):
        raise InputError(f"{weights_name} is complex, or has an infinite or NaN element; leave its Gram matrices out.")
    if not bool(torch.isfinite(gram).all()):
        raise InputError(
            f"{gram_name} has an infinite or NaN element; collect it anew, on a model with finite outputs."
        )
    tolerance = torch.finfo(gram.dtype).eps ** 0.5  # sums over many examples in a narrow dtype are far from exact
    smallest = torch.finfo(gram.dtype).smallest_normal  # a square may have underflown
    gram = to_compute(gram)
    scale = gram.diagonal().clamp(min=smallest).sqrt()
    bound = scale[:, None] * scale  # of |Gᵢⱼ|, by Cauchy and Schwarz
    if bool(((gram - gram.T).abs() > tolerance * bound).any() or (gram.abs() > (1 + tolerance) * bound).any()):
        raise InputError(f"{gram_name} is not a Gram matrix, expected XᵀX of the layer's inputs X.")


def _solve(system: Tensor, right: Tensor, tolerance: float, key: str) -> Tensor:
    """The solution of a positive semidefinite system that is least in norm once its diagonal is scaled to 1."""
    diagonal = system.diagonal()
    scale = torch.where(diagonal > 0, diagonal, 1).rsqrt()[:, None]
    unit = system * scale * scale.T
    unit.diagonal().fill_(1)  # where it was 0, so is the right side
    right = right * scale
    factor, failed = torch.linalg.cholesky_ex(unit)
    if not failed and bool((factor.diagonal().square() > tolerance).all()):
        right = torch.cholesky_solve(right, factor)
        return right * scale
    values, vectors = torch.linalg.eigh(unit)
    cut = tolerance * float(values[-1])
    if float(values[0]) < -cut:
        raise InputError(f"the Gram matrices for {key!r} are not positive semidefinite; expected XᵀX of inputs X.")
    inverse = torch.where(values > cut, 1 / values, 0)
    solution: Tensor = vectors @ (inverse[:, None] * (vectors.T @ right))
    return solution * scale


def collect_grams(module: nn.Module, batches: Iterable[object]) -> dict[str, Tensor]:
    r"""Gram matrices :math:`X^\top X` of the inputs of a model's linear layers.

    The rows of :math:`X` are all vectors that a layer multiplies with its weights: each position of each example
    (padding too), and for a convolution each patch. Layers are ``nn.Linear``, ``nn.Conv1d`` and ``nn.Conv2d`` without
    groups. A layer that is called several times, or layers that share their weights, have the sum.

    The model runs in evaluation mode without gradients; its weights, buffers, hooks and modes and the global random
    states are not changed.

    Args:
        module: called with one batch of inputs at a time.
        batches: tensors of inputs, or sequences that begin with one (a ``DataLoader``), on the module's device. Their
            size changes nothing but rounding. A few hundred examples of the task that the model was trained for are
            enough for most layers; pass equally many for each model, or the one with more counts more.

    Returns:
        Key of the layer's weights in the state dict, prefixes stripped -> float64 tensor of shape (n, n), accumulated
        in float64, n = in_features, or in_channels · height · width of a convolution's kernel; tied weights have the
        same tensor under each of their keys. Not among the keys, and averaged by a merge: weights that another kind of
        layer shares (an embedding), reparametrised ones, and those of layers that were never called (a warning names
        them; ``nn.MultiheadAttention`` calls none of its own).

    Raises:
        InputError: the module has no such layer, there is no sample, a batch cannot be understood, or a layer's inputs
            are not finite.
    """
    layers = _layers(module)
    if not layers:
        raise InputError(
            f"the module {type(module).__name__} has no linear layer or convolution that RegMean can merge."
        )
    names = state_keys(module)
    grams: dict[int, Tensor] = {}

    def record(layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = args[0] if args else kwargs["input"]
        for rows in _rows(layer, inputs.detach()):
            rows = rows.double()
            weight = id(layer.weight)
            grams[weight] = grams[weight].addmm_(rows.T, rows) if weight in grams else rows.T @ rows

    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    handles = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
    count = 0
    try:
        with preserved_modes(module), preserved_random_states(), torch.no_grad():
            module.eval()
            for inputs, _ in batches_of(batches):
                count += len(inputs)
                torch.func.functional_call(module, buffers, (inputs,))
    finally:
        for handle in handles:
            handle.remove()
    if count == 0:
        raise InputError("batches for Gram matrices hold no sample; pass inputs.")
    missing = sorted({names[id(layer.weight)][0] for layer in layers if id(layer.weight) not in grams})
    if missing:
        warnings.warn(
            f"{', '.join(map(repr, missing))} have no Gram matrix: their layers were not called. Merges average them.",
            IsthmusWarning,
            stacklevel=2,
        )
    for weight, gram in grams.items():
        if not bool(torch.isfinite(gram).all()):
            raise InputError(f"the inputs of the layer of {names[weight][0]!r} are not finite; check model and data.")
    return {key: gram for weight, gram in grams.items() for key in names[weight]}


def _layers(module: nn.Module) -> list[Layer]:
    """The layers of ``module`` whose weights are used by nothing but such layers."""
    layers: list[Layer] = []
    others = set()
    for layer in module.modules():
        for name, parameter in layer.named_parameters(recurse=False, remove_duplicate=False):
            if name == "weight" and (
                isinstance(layer, nn.Linear) or (isinstance(layer, Convolution) and layer.groups == 1)
            ):
                layers.append(layer)
            else:
                others.add(id(parameter))
    return [layer for layer in layers if id(layer.weight) not in others]


def _rows(layer: Layer, inputs: Tensor) -> Iterable[Tensor]:
    """The vectors that ``layer`` multiplies with its weights, in blocks of shape (rows, n)."""
    if isinstance(layer, nn.Linear):
        rows = inputs.reshape(-1, layer.in_features)
        yield from rows.split(max(1, BLOCK // max(1, layer.in_features)))
        return
    if inputs.dim() == layer.weight.dim() - 1:  # a single example
        inputs = inputs[None]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    inputs = functional.pad(inputs, layer._reversed_padding_repeated_twice, mode)
    sizes: list[tuple[int, ...]] = [layer.kernel_size, layer.dilation, layer.stride]
    if isinstance(layer, nn.Conv1d):  # unfold takes images alone
        inputs, sizes = inputs[:, :, None], [(1, *size) for size in sizes]
    kernel, dilation, stride = sizes
    width = layer.weight.shape[1:].numel()
    for part in inputs.split(max(1, BLOCK // max(1, width * inputs.shape[2:].numel()))):
        patches = functional.unfold(part, kernel, dilation=dilation, stride=stride)
        yield patches.transpose(1, 2).reshape(-1, width)
