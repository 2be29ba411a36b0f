r"""Directions in weight space: random ones with the scale of a model, and the principal ones of a training run.

A direction is a ``FlatState`` of the model's layout. It moves parameters alone: buffers are no directions of training,
so their floating-point entries are zero in it, and integer and boolean entries, which nothing moves, are the model's.
Norms and products are over the parameters, each counted once, in float64.

A *filter* (Li et al., "Visualizing the Loss Landscape of Neural Nets", arXiv 1712.09913, section 4) is the weights that
make one output: a row of a linear layer's weight, an output channel of a convolution (transposed or not), the vector of
one entry of an embedding; one index of the first axis wherever no layer is known to be laid out otherwise. A tensor of
at most one dimension (a bias, the scale of a normalisation layer) is one filter as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from isthmus.errors import InputError
from isthmus.flat import FlatState, canonical_keys
from isthmus.merging.companions import to_compute

from .metrics import inner_products

NORMALIZATIONS = ("filter", "layer", "model", "none")
VECTORS = "1d"  # the word for biases and norm parameters among what is excluded
ROUNDS = 30  # of making directions orthogonal while their filters keep their norms
CHUNK = 2**20  # elements of each checkpoint that products are computed from at a time
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def canonical_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of ``model`` by their canonical keys, tied ones once, in its own order."""
    own = canonical_keys(model.state_dict(keep_vars=True))
    return {own[key]: parameter for key, parameter in model.named_parameters() if key in own}


def parameter_keys(model: nn.Module) -> list[str]:
    """The canonical keys of the parameters of ``model``, tied ones once, in its own order."""
    return list(canonical_parameters(model))


def dot(a: FlatState, b: FlatState, keys: Sequence[str]) -> float:
    """The real inner product of two states over ``keys``, in float64."""
    return sum(inner_products((a[key], b[key]) for key in keys))


def norm(state: FlatState, keys: Sequence[str]) -> float:
    """The Euclidean norm of a state over ``keys``, in float64."""
    return math.sqrt(dot(state, state, keys))


def random_directions(
    model: nn.Module,
    count: int = 1,
    *,
    seed: int = 0,
    normalization: str = "filter",
    exclude: str | Sequence[str] = (),
    orthogonal: bool = True,
) -> list[FlatState]:
    r"""Gaussian random directions at the weights of ``model``, on its device.

    Every parameter's entries are drawn from :math:`N(0, 1)`, then scaled:

    - ``"filter"``: every filter f of the direction to the norm of the model's, :math:`d_f \leftarrow
      \frac{\lVert \theta_f \rVert}{\lVert d_f \rVert} d_f`, so that networks whose weights differ in scale can be
      compared (Li et al., arXiv 1712.09913, section 4);
    - ``"layer"``: the same for every tensor;
    - ``"model"``: the same for the whole direction;
    - ``"none"``: not at all.

    A filter, tensor or model of norm 0 gets a direction of 0. The numbers come from the CPU's generator for ``seed``:
    they are the same on every device, no global random state is touched, and neither the number of directions nor what
    is excluded changes the draws of the others.

    Args:
        model: the model; it is read only.
        count: number of directions.
        seed: decides the draws.
        normalization: "filter", "layer", "model" or "none".
        exclude: parameters that do not move: patterns of canonical keys (``"head.*"``), or ``"1d"`` for all of at most
            one dimension, biases and norm parameters, as Li et al. leave them out; or a sequence of these.
        orthogonal: whether later directions are made orthogonal to earlier ones (Gram-Schmidt) under the scaling asked
            for. Where both cannot be had, as with filters of one element, the scaling is kept and the angle gives way.

    Raises:
        InputError: an argument is out of range, a pattern matches no parameter, or a direction is zero everywhere,
            because nothing that is not excluded has a norm or, after the first, a second dimension.
    """
    if normalization not in NORMALIZATIONS:
        raise InputError(f"normalization={normalization!r} is unknown; it is one of {', '.join(NORMALIZATIONS)}.")
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**63:
        raise InputError(f"seed={seed!r} cannot be used; give an integer from 0 to 2**63 - 1.")
    state = FlatState.from_module(model)
    keys = parameter_keys(model)
    moving = _moving(state, keys, exclude)
    scale = _Scale(model, state, moving, normalization)
    generator = torch.Generator().manual_seed(int(seed))
    directions: list[FlatState] = []
    for index in range(count):
        direction = unmoved(state)
        for key in keys:
            drawn = _draw(state[key], generator)
            if key in moving:
                direction[key].copy_(drawn)
        scale.apply(direction)
        if orthogonal and directions:
            _orthogonalise(direction, directions, scale)
        if not norm(direction, moving) > 0:
            raise InputError(
                f"random direction {index + 1} is zero everywhere: of the parameters that move, none has a norm, or "
                "there are not as many elements as directions. Exclude less, or use normalization='none'."
            )
        directions.append(direction)
    return directions


def unmoved(state: FlatState) -> FlatState:
    """The zero direction at ``state``, of the same layout."""
    direction = state.clone()
    for buffer in direction.averaged:
        buffer.zero_()
    return direction


class _Scale:
    """The norms that the parts of a direction have, by a normalization."""

    def __init__(self, model: nn.Module, state: FlatState, keys: list[str], normalization: str) -> None:
        self.keys = keys
        self._state = state
        self._normalization = normalization
        self._groups = _transposed_groups(model)

    def apply(self, direction: FlatState) -> None:
        """Scale ``direction`` in place."""
        if self._normalization == "none":
            return
        if self._normalization == "model":
            own = norm(direction, self.keys)
            factor = norm(self._state, self.keys) / own if own else 0.0
            for key in self.keys:
                direction[key].copy_(to_compute(direction[key]) * factor)
            return
        for key in self.keys:
            target, axes = self._parts(key, self._state[key])
            drawn, _ = self._parts(key, direction[key])
            wide = to_compute(drawn)
            wanted = torch.linalg.vector_norm(to_compute(target), dim=axes, keepdim=True)
            own = torch.linalg.vector_norm(wide, dim=axes, keepdim=True)
            drawn.copy_(wide * torch.where(own > 0, wanted / own, 0.0))

    def _parts(self, key: str, tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """A view of a tensor, and the axes of it that run within one part."""
        if self._normalization == "layer" or tensor.dim() <= 1:
            return tensor.view(1, -1), (1,)
        if key in self._groups:
            view = tensor.view(self._groups[key], -1, *tensor.shape[1:])  # groups, inputs of one, outputs of one, ...
            return view, (1, *range(3, view.dim()))
        return tensor, tuple(range(1, tensor.dim()))


def _transposed_groups(model: nn.Module) -> dict[str, int]:
    """Canonical key -> groups, for weights of shape (inputs, outputs of one group, ...)."""
    own = canonical_keys(model.state_dict(keep_vars=True))
    groups = {}
    for name, module in model.named_modules():
        key = own.get(f"{name}.weight" if name else "weight")
        if key is not None and isinstance(module, TRANSPOSED):
            groups[key] = module.groups
        elif (
            key is not None
            and f"{type(module).__module__}.{type(module).__name__}" == "transformers.pytorch_utils.Conv1D"
        ):
            groups[key] = 1
    return groups


def _moving(state: FlatState, keys: list[str], exclude: str | Sequence[str]) -> list[str]:
    """The keys that are not excluded."""
    patterns = [exclude] if isinstance(exclude, str) else list(exclude)
    excluded: set[str] = set()
    for pattern in patterns:
        if pattern == VECTORS:
            excluded |= {key for key in keys if state[key].dim() <= 1}
            continue
        matched = {key for key in keys if fnmatchcase(key, pattern)}
        if not matched:
            raise InputError(
                f"exclude={pattern!r} matches no parameter of the model, which has {', '.join(keys)[:500]}; "
                f"{VECTORS!r} stands for all of at most one dimension."
            )
        excluded |= matched
    return [key for key in keys if key not in excluded]


def _draw(like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers, at least in float32."""
    return torch.randn(like.shape, generator=generator, dtype=torch.promote_types(like.dtype, torch.float32))


def _orthogonalise(direction: FlatState, earlier: list[FlatState], scale: _Scale) -> None:
    """Remove from ``direction``, in place, its parts along ``earlier``, and scale it again, until both hold.

    Scaling parts by their own factors turns a direction a little. If it was at right angles before, what comes back is
    the mean square cosine of the parts of the angle that was removed: it vanishes within a few rounds.
    """
    tolerance = 4 * max((torch.finfo(direction[key].dtype).eps for key in scale.keys), default=0.0)
    squares = [dot(other, other, scale.keys) for other in earlier]
    for _ in range(ROUNDS):
        own = norm(direction, scale.keys)
        products = [dot(other, direction, scale.keys) for other in earlier]
        cosines = [abs(p) / (own * math.sqrt(s)) for p, s in zip(products, squares, strict=True) if own]
        if max(cosines, default=0.0) <= tolerance:
            return
        for other, square in zip(earlier, squares, strict=True):
            along = dot(other, direction, scale.keys) / square
            for key in scale.keys:
                direction[key].copy_(to_compute(direction[key]) - along * to_compute(other[key]))
        scale.apply(direction)


@dataclass(frozen=True, eq=False)
class PrincipalDirections:
    """The principal directions of a trajectory of checkpoints.

    Attributes:
        directions: orthogonal unit vectors, by decreasing explained variance.
        coordinates: where the checkpoints, the last of which is the origin, are projected to, shape (checkpoints,
            directions).
        off: the distances of the checkpoints from their projections, shape (checkpoints,).
        explained: the fraction of the variance along each direction, shape (directions,).
    """

    directions: tuple[FlatState, ...]
    coordinates: NDArray[np.float64]
    off: NDArray[np.float64]
    explained: NDArray[np.float64]


def principal_directions(
    checkpoints: Sequence[FlatState], keys: Sequence[str], count: int = 2, *, center: bool = True
) -> PrincipalDirections:
    r"""Principal component analysis of a trajectory :math:`\theta_0, \dots, \theta_n`.

    The rows of M are :math:`\theta_i - \theta_n` for :math:`i < n`, over the parameters. With :math:`\bar M = H M`, H
    the matrix that takes off the mean of the rows (or the identity), the directions are the right singular vectors of
    :math:`\bar M`. They are found by the n by n Gram matrix :math:`H M M^\top H = U \Sigma^2 U^\top` as
    :math:`v_k = M^\top H u_k / \sigma_k`, so that nothing of the size of the model squared is made. The sign of each is
    such that the coordinate farthest from the origin is positive.

    Source: Li et al., "Visualizing the Loss Landscape of Neural Nets", arXiv 1712.09913, section 7.2.

    Args:
        checkpoints: the trajectory, flat states of one layout, the last of which is the origin.
        keys: of the parameters.
        count: number of directions.
        center: whether the mean is taken off, as principal component analysis does. If not, the plane of the
            directions is the one through the last checkpoint that lies nearest to all others.

    Raises:
        InputError: the checkpoints do not span as many dimensions.
    """
    last = checkpoints[-1]
    gram = _gram(checkpoints, keys)
    n = len(gram)
    mean_off = np.eye(n) - (1 / n if center else 0.0)
    variances, vectors = np.linalg.eigh(mean_off @ gram @ mean_off)
    variances, vectors = variances[::-1], vectors[:, ::-1]
    if n < count or not variances[count - 1] > 1e-12 * variances[0]:
        raise InputError(
            f"the checkpoints do not span {count} dimensions (there are {n} besides the last"
            + (", and taking off their mean costs one" if center else "")
            + "); give more of them, or some that do not lie on a line."
        )
    # of the rows of M, (n, count); H leaves these vectors as they are, because their eigenvalues are not 0
    combinations = vectors[:, :count] / np.sqrt(variances[:count])
    coordinates = gram @ combinations
    signs = np.sign(coordinates[np.abs(coordinates).argmax(axis=0), range(count)])
    combinations, coordinates = combinations * signs, coordinates * signs
    directions = []
    for coefficients in combinations.T.tolist():
        direction = unmoved(last)
        for key in keys:
            origin = to_compute(last[key])
            terms = (c * (to_compute(s[key]) - origin) for c, s in zip(coefficients, checkpoints[:-1], strict=True))
            direction[key].copy_(sum(terms, torch.zeros_like(origin)))
        directions.append(direction)
    squares = np.maximum(0.0, np.diag(gram) - np.square(coordinates).sum(axis=1))
    return PrincipalDirections(
        directions=tuple(directions),
        coordinates=np.vstack([coordinates, np.zeros(count)]),
        off=np.append(np.sqrt(squares), 0.0),
        explained=variances[:count] / np.maximum(variances, 0.0).sum(),
    )


def _gram(checkpoints: Sequence[FlatState], keys: Sequence[str]) -> NDArray[np.float64]:
    """The products of the differences to the last checkpoint, (n, n)."""
    *others, last = checkpoints
    gram = torch.zeros(len(others), len(others), dtype=torch.float64, device=last.device)
    for key in keys:
        flat = [state[key].flatten() for state in checkpoints]
        for start in range(0, flat[0].numel(), CHUNK):
            *rows, origin = (to_compute(tensor[start : start + CHUNK]) for tensor in flat)
            stacked = torch.stack([row - origin for row in rows])
            gram += (stacked @ stacked.mH).real
    return gram.cpu().numpy()
