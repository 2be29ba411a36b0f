r"""Refining a permutation by the loss of the midpoint, through a straight-through estimator.

Ainsworth, Hayase and Srinivasa, "Git Re-Basin: merging models modulo permutation symmetries", ICLR 2023, arXiv
2209.04836, section 3.3.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from isthmus.batches import Inputs, run, size_of, with_targets
from isthmus.errors import InputError
from isthmus.flat import FlatState
from isthmus.merging.sources import Source, load_source, read_model
from isthmus.merging.states import lerp_states
from isthmus.norms import batch_norms
from isthmus.preserve import preserved_random_states

from .apply import apply_permutation
from .inputs import check_counts, chosen_groups, read_models
from .permutation import check_permutation
from .report import Matching
from .similarity import moving_tensors
from .spec import Permutation, PermutationSpec
from .weight_matching import Ascent

Loss = Callable[[Any, Any], Tensor]  # of outputs and targets


def straight_through(
    spec: PermutationSpec,
    model: nn.Module,
    a: Source,
    b: Source,
    data: Iterable[object],
    *,
    loss: Loss = nn.functional.cross_entropy,
    epochs: int = 1,
    learning_rate: float = 0.01,
    momentum: float = 0.9,
    initial: Permutation | Matching | None = None,
    only: str | Sequence[str] | None = None,
    seed: int = 0,
    backend: str = "auto",
) -> Matching:
    r"""The order of b's units whose midpoint with a has the lowest loss on the way of a projected descent.

    Weights :math:`\tilde\theta`, at first a's, are descended. For each batch they are projected on b's permutations,

    .. math:: P = \arg\max_P \langle \tilde\theta, P b \rangle,

    by coordinate ascent from the P before; the gradient of the loss at :math:`\tfrac12 (a + P b)` with respect to Pb is
    taken as that with respect to :math:`\tilde\theta` (the straight-through estimator), which moves by stochastic
    gradient descent. Every P is scored by its loss on all of ``data`` at the end of an epoch, and the first by its loss
    before: the best is kept, so that the result is no worse than ``initial``, on these data.

    The model computes in evaluation mode, except for BatchNorm layers with running statistics, which normalise by each
    batch, as the statistics of neither end hold in the middle.

    Args:
        spec: which axes move together.
        model: a module of the architecture; it is not modified.
        a: the weights whose order stays: a module, a state dict, a ``FlatState`` or the path of a safetensors file.
        b: the weights whose units are to be permuted.
        data: batches (inputs, targets), on the device of the model, iterated over again and again: a list or a
            ``DataLoader``. Inputs are a tensor, or a mapping of arguments.
        loss: function of outputs and targets whose result is a scalar, the mean over the batch.
        epochs: passes over the data.
        learning_rate: of the descent.
        momentum: of the descent.
        initial: where to begin, the result of another matching or its permutation; by default a matching by weights.
        only: patterns (``fnmatch``) of the groups to match; others keep their ``initial`` order.
        seed: of the order in which groups are visited.
        backend: as for ``isthmus.ops``.

    Returns:
        The permutation and its report, whose objective is that of ``weight_matching``.

    Raises:
        InputError: a model does not have the tensors of the spec or of the module, there are no data or none that can
            be iterated over again, the loss is not finite, weights are NaN or infinite, or ``initial`` or ``only`` do
            not fit the spec.
    """
    began = time.perf_counter()
    check_counts(epochs=epochs)
    if isinstance(data, Tensor | Mapping | Iterator):
        raise InputError(
            f"data is a {type(data).__name__}, expected batches (inputs, targets) that can be iterated over again and "
            "again: a list or a DataLoader."
        )
    free = chosen_groups(spec, only)
    generator = torch.Generator().manual_seed(seed)
    permutation = check_permutation(spec, {} if initial is None else initial)
    models = read_models(spec, {"a": a, "b": b}, free, backend=backend)
    if initial is None:
        ascent = Ascent(spec, models.tensors, free, models.unit, backend=backend)
        permutation = ascent.run(permutation, generator).permutation
    middle = _Middle(spec, model, a, b, loss, backend)
    optimizer = torch.optim.SGD(middle.latent.parameters(), lr=learning_rate, momentum=momentum)
    best, lowest, steps = permutation, middle.loss(permutation, data), 0
    gaps: Mapping[str, float] = {}
    for _ in range(epochs):
        for inputs, targets in map(with_targets, data):
            middle.backward(permutation, inputs, targets)
            optimizer.step()
            ascent = Ascent(spec, models.scaled(middle.pairs()), free, models.unit, backend=backend)
            found = ascent.run(permutation, generator)
            permutation, steps = found.permutation, steps + 1
        reached = middle.loss(permutation, data)
        if reached < lowest:
            best, lowest, gaps = permutation, reached, found.gaps
    objective = models.objective(best)
    report = models.report(
        "straight-through estimation",
        best,
        objective,
        sweeps=steps,
        starts=[objective],
        gaps=gaps,
        by=dict.fromkeys(free, "loss"),
        began=began,
    )
    return Matching(best, report)


class _Middle:
    """The midpoint between a and a permuted b, as a module, and the weights that are descended.

    Attributes:
        latent: a module with these weights, a's at first.
    """

    def __init__(self, spec: PermutationSpec, model: nn.Module, a: Source, b: Source, loss: Loss, backend: str) -> None:
        self._spec, self._loss, self._backend = spec, loss, backend
        layout = FlatState.from_module(model).layout
        self._a, self._b = (
            load_source(source, layout, name, next(model.parameters()).device) for source, name in ((a, "a"), (b, "b"))
        )
        self.latent, self._module = copy.deepcopy(model), copy.deepcopy(model).eval()
        self._a.clone().bind(self.latent)
        self._middle = self._a.clone()
        self._middle.bind(self._module)
        for parameter in self._module.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        for layer in batch_norms(self._module):
            layer.train()

    def pairs(self) -> dict[str, tuple[Tensor, ...]]:
        """What is matched: b against the weights that are descended."""
        return moving_tensors(self._spec, read_model(self.latent, "a").tensors, self._b.to_state_dict())

    def loss(self, permutation: Permutation, data: Iterable[object]) -> float:
        """The mean loss over all batches, weighted by their size."""
        self._place(permutation)
        summed, examples = 0.0, 0
        with torch.no_grad(), preserved_random_states():
            for inputs, targets in map(with_targets, data):
                size = size_of(inputs)
                summed += float(self._loss(run(self._module, inputs), targets)) * size
                examples += size
        if not examples:
            raise InputError("data for straight-through estimation holds no batch; pass inputs with their targets.")
        if not math.isfinite(summed):
            raise InputError("the loss of the midpoint is NaN or infinite; look for such values in data and weights.")
        return summed / examples

    def backward(self, permutation: Permutation, inputs: Inputs, targets: Any) -> None:
        """Give the latent weights the gradient of a batch's loss with respect to the permuted b."""
        self._place(permutation)
        parameters = list(self._module.parameters())
        with preserved_random_states(), torch.enable_grad():
            value = self._loss(run(self._module, inputs), targets)
            gradients = torch.autograd.grad(value, parameters, allow_unused=True)
        for parameter, gradient in zip(self.latent.parameters(), gradients, strict=True):
            parameter.grad = None if gradient is None else gradient / 2

    def _place(self, permutation: Permutation) -> None:
        """Give the module the weights of the midpoint."""
        moved = apply_permutation(self._spec, permutation, self._b, backend=self._backend)
        lerp_states(self._a, moved, 0.5, out=self._middle, backend=self._backend)
