"""Fisher-weighted averaging: each entry of each model counts by how much its predictions depend on it.

Matena and Raffel, "Merging Models with Fisher-Weighted Averaging", NeurIPS 2022, arXiv 2111.09832.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from isthmus import ops
from isthmus.errors import InputError
from isthmus.norms import preserved_modes
from isthmus.preserve import preserved_random_states

from .companions import aligned, average, batches_of, proportions, state_keys, to_compute

BLOCK = 2**18  # elements averaged at a time: the float64 copies of a block stay in a processor's cache
GRADIENTS = 2**24  # elements of the per-sample gradients held at a time
LABELS = ("sampled", "expected", "given")

Loss = Callable[[Tensor, Tensor], Tensor]


@torch.no_grad()
def fisher_average(
    models: Sequence[Mapping[str, Tensor]],
    fishers: Sequence[Mapping[str, Tensor]] | None,
    weights: Mapping[str, Sequence[float]],
    out: Mapping[str, Tensor],
    *,
    epsilon: float,
    normalize_fishers: bool,
    keys: Collection[str],
) -> list[str]:
    r"""The Fisher-weighted mean of the entries that have Fishers.

    .. math:: \theta = \frac{\sum_i c_i \theta_i}{\sum_i c_i}, \qquad c_i = w_i\, (F_i + \varepsilon)

    element by element (equation 4 of the paper), or with ``normalize_fishers``
    :math:`c_i = w_i\, (F_i + \varepsilon) / \lVert F_i \rVert_2`, the norm taken over all entries merged here, so that
    a model with larger gradients does not outweigh the others altogether.

    It is computed in float64 as :math:`\theta_k + \sum_i (c_i / \sum_j c_j)(\theta_i - \theta_k)` with :math:`k` the
    model of the largest :math:`c`, and rounded once to the output's dtype. So models that are equal in an element give
    that element exactly, and at :math:`\varepsilon = 0` a model whose Fisher alone is not zero gives its own (a
    negative zero may lose its sign). Where all :math:`c_i` are zero the result is the limit
    :math:`\varepsilon \to 0`: the mean by the weights. NaN and infinity in the models propagate. No gradients flow.

    Args:
        models: canonical key -> floating-point or complex tensor, for each model; equal keys and shapes.
        fishers: key -> diagonal of the Fisher information, real, not negative, of the shape of the model's tensor, for
            each model. Prefixes that all keys share are stripped. Keys are those of ``keys``; what is not in ``models``
            is left out.
        weights: key -> a weight for each model, not negative.
        out: key -> where to write; it may be exactly one model's tensor.
        epsilon: what is added to every Fisher, at least 0.
        normalize_fishers: whether to divide each model's Fishers by their norm.
        keys: all canonical keys of the models, merged or not.

    Returns:
        The keys that are in ``models`` and in ``fishers``, in the order of the models: what was written.

    Raises:
        InputError: the Fishers do not fit the models, are negative or not finite, or a model's are all zero where they
            are to be normalised; a weight is negative; or ``epsilon`` is.
    """
    if not 0 <= epsilon < float("inf"):
        raise InputError(f"epsilon is {epsilon}, expected a finite number of at least 0.")
    diagonals = aligned(fishers, len(models), keys, "fishers", "isthmus.fisher_diagonal")
    covered = [key for key in models[0] if key in diagonals[0]]
    _check(models, diagonals, covered)
    shares = {key: proportions(weights[key], key) for key in covered}
    scales = [_inverse_norm(diagonal, covered, i) if normalize_fishers else 1.0 for i, diagonal in enumerate(diagonals)]
    for key in covered:
        target = out[key]
        flat = target.view(-1) if target.is_contiguous() else torch.empty_like(target.flatten())
        tensors = [model[key].detach().reshape(-1) for model in models]
        fisher = [diagonal[key].detach().to(target.device).reshape(-1) for diagonal in diagonals]
        scaled = [share * scale for share, scale in zip(shares[key], scales, strict=True)]
        for start in range(0, len(flat), BLOCK):
            block = slice(start, start + BLOCK)
            mean = _mean(
                [to_compute(tensor[block]) for tensor in tensors],
                [to_compute(diagonal[block]) for diagonal in fisher],
                shares[key],
                scaled,
                epsilon,
            )
            ops.weighted_sum([mean], [1.0], out=flat[block])  # rounds once
        if not target.is_contiguous():
            target.copy_(flat.view(target.shape))
    return covered


def _mean(
    tensors: list[Tensor], fishers: list[Tensor], shares: list[float], scaled: list[float], epsilon: float
) -> Tensor:
    """The Fisher-weighted mean of 1-D tensors, everything in float64."""
    coefficients = torch.stack([scale * (fisher + epsilon) for scale, fisher in zip(scaled, fishers, strict=True)])
    total = functools.reduce(torch.add, coefficients)
    stacked = torch.stack(tensors)
    pivot = stacked.gather(0, coefficients.argmax(0, keepdim=True))[0]
    terms = (c / total * (tensor - pivot) for c, tensor in zip(coefficients, tensors, strict=True))
    return torch.where(total == 0, average(tensors, shares), functools.reduce(torch.add, terms) + pivot)


def _check(models: Sequence[Mapping[str, Tensor]], fishers: list[dict[str, Tensor]], keys: Iterable[str]) -> None:
    """Check shapes and values of all Fishers before any work."""
    for key in keys:
        for index, fisher in enumerate(fishers):
            expected, value = tuple(models[0][key].shape), fisher[key]
            if tuple(value.shape) != expected:
                raise InputError(
                    f"fishers[{index}][{key!r}] has shape {tuple(value.shape)}, expected {expected} as the weights."
                )
            if not bool((torch.isfinite(value) & (value >= 0)).all()):
                raise InputError(
                    f"fishers[{index}][{key!r}] has a negative, infinite or NaN element, expected squared gradients. "
                    "Estimate it anew, on a model whose loss is finite."
                )


def _inverse_norm(fisher: Mapping[str, Tensor], keys: Iterable[str], index: int) -> float:
    """1 / ‖F‖ over the given keys."""
    norms = [torch.linalg.vector_norm(fisher[key], dtype=torch.float64) for key in keys]
    norm = float(torch.linalg.vector_norm(torch.stack([norm.cpu() for norm in norms]))) if norms else 1.0
    if norm == 0:
        raise InputError(
            f"fishers[{index}] is zero in all entries that are merged, so it cannot be normalised; "
            "estimate it anew, or use normalize_fishers=False."
        )
    return 1 / norm


def fisher_diagonal(
    module: nn.Module, batches: Iterable[object], loss: Loss | None = None, *, labels: str = "sampled", seed: int = 0
) -> dict[str, Tensor]:
    r"""Estimate the diagonal of a model's Fisher information from examples.

    .. math:: F = \frac1n \sum_{s=1}^n \bigl(\nabla_\theta\, \ell(f_\theta(x_s), y_s)\bigr)^2

    with the gradient of each single sample squared element by element, never that of a batch. The model runs in
    evaluation mode; its weights, buffers, gradients and modes and the global random states are not changed.

    The labels :math:`y` decide what is estimated:

    - ``"sampled"``: one label for each input, drawn from the model's own softmax; :math:`\ell` is the cross-entropy.
      An unbiased estimate of the Fisher information (equation 3 of the paper).
    - ``"expected"``: the expectation over all classes under the model's softmax, without sampling; as many backward
      passes as there are classes.
    - ``"given"``: the labels of the data, with cross-entropy or your own ``loss``. This "empirical Fisher" is not the
      Fisher information: it vanishes where the data is fitted perfectly (Kunstner et al., arXiv 1905.12558).

    Args:
        module: called with inputs of shape (k, ...); for labels of its own it returns logits of shape (k, classes). It
            must run under ``torch.func.vmap``: no control flow by values, no writes into its input.
        batches: tensors of inputs, or sequences of inputs and targets (a ``DataLoader``), on the module's device.
            Their size changes nothing but rounding, and which labels are drawn.
        loss: with ``labels="given"``: function of the outputs and targets of a batch of one sample, whose values are
            added up; a negative log likelihood, for F to be one. Cross-entropy if None.
        labels: "sampled", "expected" or "given".
        seed: of the sampled labels.

    Returns:
        Key of the state dict, prefixes stripped -> float64 tensor of the shape of the parameter: all parameters, frozen
        ones too, those that no output depends on zero, tied ones the same tensor under each of their keys.

    Raises:
        InputError: there is no sample, a batch cannot be understood, outputs are not logits of shape (k, classes) or
            not finite, or a gradient is not finite.
    """
    if labels not in LABELS:
        raise InputError(f"labels is {labels!r}, expected one of {', '.join(map(repr, LABELS))}.")
    if loss is not None and labels != "given":
        raise InputError(f'a loss needs labels="given", got labels={labels!r}, whose loss is the cross-entropy.')
    loss = _cross_entropy if loss is None else loss
    learned = {name: parameter for name, parameter in module.named_parameters() if _is_differentiable(parameter)}
    parameters = {name: parameter.detach() for name, parameter in learned.items()}
    constants: dict[str, Tensor] = {
        name: parameter for name, parameter in module.named_parameters() if name not in learned
    }
    constants |= {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    totals = {name: torch.zeros(p.shape, dtype=torch.float64, device=p.device) for name, p in parameters.items()}

    def forward(values: dict[str, Tensor], inputs: Tensor) -> Tensor:
        outputs: Tensor = torch.func.functional_call(module, (values, constants), (inputs,))
        return outputs

    def sample_loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss(forward(values, x[None]), y[None]).sum()

    gradients = torch.func.vmap(torch.func.grad(sample_loss), in_dims=(None, 0, 0), randomness="different")
    step = max(1, GRADIENTS // max(1, sum(p.numel() for p in parameters.values())))
    draws: dict[torch.device, torch.Generator] = {}
    count = 0
    with preserved_modes(module), preserved_random_states():
        module.eval()
        for inputs, targets in batches_of(batches, targets=labels == "given"):
            count += len(inputs)
            if inputs.device not in draws:
                draws[inputs.device] = torch.Generator(inputs.device).manual_seed(seed)
            for start in range(0, len(inputs), step):
                part = inputs[start : start + step]
                if targets is not None:
                    labelled: Iterable[tuple[Tensor, Tensor]] = [(targets[start : start + step], _ones(part))]
                else:
                    with torch.no_grad():
                        logits = forward(parameters, part)
                    labelled = _own_labels(logits, labels, draws[inputs.device])
                for y, probability in labelled:
                    for name, gradient in gradients(parameters, part, y).items():
                        magnitude = gradient.abs() if gradient.is_complex() else gradient
                        totals[name] += torch.tensordot(probability, magnitude.double().square_(), dims=1)
    if count == 0:
        raise InputError("batches for the Fisher information hold no sample; pass inputs.")
    keys = state_keys(module)
    fisher: dict[str, Tensor] = {}
    for name, total in totals.items():
        if not bool(torch.isfinite(total).all()):
            raise InputError(f"the gradient of {name!r} is not finite for some sample; check the model and the data.")
        total /= count
        fisher |= dict.fromkeys(keys.get(id(learned[name]), ()), total)
    return fisher


def _own_labels(logits: Tensor, labels: str, draws: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Labels by the model's own distribution, each with the probability that it counts by."""
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        shape = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise InputError(
            f"the module's output is a tensor of {shape}, expected logits of shape (samples, classes). "
            'Wrap the module, or pass labels="given" and a loss.'
        )
    if not bool(torch.isfinite(logits).all()):
        raise InputError("the module's logits are not finite; check the model and the inputs.")
    probabilities = logits.double().softmax(1)
    if labels == "sampled":
        yield torch.multinomial(probabilities, 1, generator=draws)[:, 0], _ones(logits)
        return
    for label in range(logits.shape[1]):
        yield torch.full((len(logits),), label, device=logits.device), probabilities[:, label]


def _ones(samples: Tensor) -> Tensor:
    return torch.ones(len(samples), dtype=torch.float64, device=samples.device)


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="sum")
