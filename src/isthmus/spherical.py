"""Coefficients of spherical merges, from norms and dots alone, in float64.

Every rule here gives a combination Σ cᵢ xᵢ of its vectors, and its cᵢ depend only on the Gram matrix G, Gᵢⱼ = xᵢ·xⱼ, of
finite numbers. So a merge reads the vectors once for G and once for the sum, whatever the rule does in between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from .errors import InputError

Gram = Sequence[Sequence[float]]

PARALLEL = 0.9995  # slerp: pairs of a larger |cosine| are interpolated linearly
COLINEAR = 1e-8  # nuslerp: pairs of a smaller |sine| are interpolated linearly
SINGULAR = 1e-6  # model_stock: a smaller |denominator| leaves the base
RESOLUTION = 2.0**-24  # a norm taken from a sum of float64 squares that cancel is known to this fraction of its terms


class Combination(NamedTuple):
    """The coefficients of Σ cᵢ xᵢ."""

    coefficients: list[float]
    linear: bool = False  # they are 1 - t and t: a linear interpolation of a pair


def slerp(gram: Gram, t: float) -> Combination:
    """Spherical linear interpolation of a pair: sin((1 − t) θ) / sin θ and sin(t θ) / sin θ, θ the angle between them.

    The coefficients are those of the unit vectors, applied to the vectors as they are, so that norms are interpolated
    along. Where |cos θ| > 0.9995, opposite vectors included, and where a vector is zero and has no direction, the
    interpolation is linear. At t = 0 and t = 1 the coefficients are 0 and 1 exactly.

    Source: Shoemake, "Animating rotation with quaternion curves", SIGGRAPH 1985, the formula of Slerp.
    """
    cosine = _cosine(gram)
    if cosine is None or abs(cosine) > PARALLEL:
        return _linear(t)
    return _on_the_arc(cosine, t)


def nuslerp(gram: Gram, weights: Sequence[float]) -> Combination:
    """Spherical linear interpolation of a pair by weights: ``slerp`` at t = w₂ / (w₁ + w₂).

    It keeps to the arc as long as the sine of the angle is at least 1e-8, so that nearly opposite vectors get large
    coefficients; colinear pairs, and pairs with a zero vector, are interpolated linearly.

    Source: mergekit's method of this name.

    Raises:
        InputError: the weights sum to zero.
    """
    t = normalised(weights)[1]
    cosine = _cosine(gram)
    if cosine is None or (1 - cosine) * (1 + cosine) <= COLINEAR**2:
        return _linear(t)
    return _on_the_arc(cosine, t)


def multislerp(gram: Gram, weights: Sequence[float], *, normalize: bool, epsilon: float, name: str) -> Combination:
    """Barycentric interpolation on the sphere, in one step from the normalised weighted mean.

    With uᵢ = xᵢ / (‖xᵢ‖ + ε) and m = Σ wᵢuᵢ / ‖Σ wᵢuᵢ‖ the rule is exp_m(Σ wᵢ (uᵢ − (uᵢ·m) m)) · Σ wᵢ‖xᵢ‖. The weighted
    tangent vectors sum to Σ wᵢuᵢ less its own projection on m, which is zero, so the exponential map stays at m and
    cᵢ = wᵢ / (‖xᵢ‖ + ε) · Σ wⱼ‖xⱼ‖ / ‖Σ wⱼuⱼ‖.

    A single vector stays itself. If all vectors are zero, so is the result. Two vectors that cancel are interpolated
    linearly.

    Source: Goddard, "Multi-SLERP" (the definition in mergekit).

    Raises:
        InputError: the weights are to be normalised and sum to zero, or more than two directions cancel; ``name`` says
            whose.
    """
    if len(weights) == 1:
        return Combination([1.0])
    shares = normalised(weights) if normalize else list(weights)
    norms = _norms(gram)
    if not any(norms):
        return Combination([0.0] * len(norms))
    mean = [w / (norm + epsilon) for w, norm in zip(shares, norms, strict=True)]
    length = _length(gram, mean)
    if length <= max(epsilon, RESOLUTION * sum(map(abs, shares))):
        if len(weights) == 2:
            return Combination(shares, linear=normalize)
        raise InputError(
            f"multislerp of {name}: the weighted directions of the {len(weights)} models cancel, expected a mean with "
            "a direction. Change the weights."
        )
    scale = math.fsum(w * norm for w, norm in zip(shares, norms, strict=True)) / length
    return Combination([scale * c for c in mean])


def karcher(gram: Gram, weights: Sequence[float], *, iterations: int, tolerance: float) -> Combination:
    """The Riemannian (Karcher) mean of the directions, with the weighted mean of the norms.

    On unit vectors uᵢ, from the normalised weighted mean m: step along T = Σ wᵢ log_m(uᵢ), log_m(u) = θ / sin θ ·
    (u − cos θ m), cos θ = u·m, by m ← cos‖T‖ m + sin‖T‖ T / ‖T‖, until ‖T‖ < ``tolerance`` or ``iterations`` are done.

    Zero vectors have no direction and count in the mean norm only; all zero, so is the result. Where the directions
    cancel, the iteration starts from the first; a direction opposite to m has no logarithm and is left out of that
    step. Two opposite vectors thus give the first direction.

    Source: Karcher, "Riemannian center of mass and mollifier smoothing", 1977; the iteration is its
    gradient descent with step 1.

    Raises:
        InputError: the weights, or those of the vectors that have a direction, sum to zero.
    """
    norms = _norms(gram)
    directed = [i for i, norm in enumerate(norms) if norm > 0]
    coefficients = [0.0] * len(norms)
    shares = normalised(weights)
    if not directed:
        return Combination(coefficients)
    if len(weights) == 1:
        return Combination([1.0])
    scale = math.fsum(w * norm for w, norm in zip(shares, norms, strict=True))
    cosines = [[_clamp(gram[i][j] / (norms[i] * norms[j])) for j in directed] for i in directed]
    mean = _karcher_mean(cosines, normalised([weights[i] for i in directed]), iterations, tolerance)
    for place, i in enumerate(directed):
        coefficients[i] = scale * mean[place] / norms[i]
    return Combination(coefficients)


def model_stock(gram: Gram) -> Combination:
    """Model Stock: θ₀ + t (mean − θ₀) with t = N c / (1 + (N − 1) c), c the mean cosine of all pairs of task vectors.

    The task vector of every model gets t / N. Pairs with a zero vector count with cosine 0. Where the denominator is
    under 1e-6 no finite ratio exists, and t = 0.

    Source: Jang et al., "Model Stock: All we need is just a few fine-tuned models", ECCV 2024, arXiv 2403.19522, the
    interpolation ratio for N models.
    """
    norms = _norms(gram)
    count = len(norms)
    pairs = [(i, j) for i in range(count) for j in range(i)]
    dots = (_clamp(gram[i][j] / (norms[i] * norms[j])) if norms[i] and norms[j] else 0.0 for i, j in pairs)
    c = math.fsum(dots) / len(pairs)
    denominator = 1 + (count - 1) * c
    return Combination([0.0 if abs(denominator) < SINGULAR else c / denominator] * count)


def normalised(weights: Sequence[float]) -> list[float]:
    """The weights divided by their sum.

    Raises:
        InputError: they sum to zero, to within their rounding.
    """
    total = math.fsum(weights)
    if abs(total) <= 1e-15 * math.fsum(map(abs, weights)):
        raise InputError(
            f"the weights {', '.join(map(str, weights))} sum to zero, expected weights that can be normalised. "
            "Change them, or pass normalize=False where the rule has it."
        )
    return [w / total for w in weights]


def _linear(t: float) -> Combination:
    return Combination([1 - t, t], linear=True)


def _on_the_arc(cosine: float, t: float) -> Combination:
    angle = math.acos(cosine)
    return Combination([math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)])


def _cosine(gram: Gram) -> float | None:
    """The cosine of a pair's angle; ``None`` if one of them is zero."""
    first, second = _norms(gram)
    return _clamp(gram[0][1] / first / second) if first and second else None


def _norms(gram: Gram) -> list[float]:
    return [math.sqrt(row[i]) for i, row in enumerate(gram)]


def _clamp(cosine: float) -> float:
    return max(-1.0, min(1.0, cosine))


def _length(gram: Gram, coefficients: Sequence[float]) -> float:
    """The norm of a combination; 0 where rounding made the square negative."""
    square = math.fsum(
        p * q * gram[i][j] for i, p in enumerate(coefficients) for j, q in enumerate(coefficients) if p and q
    )
    return math.sqrt(max(square, 0.0))


def _karcher_mean(cosines: Gram, weights: Sequence[float], iterations: int, tolerance: float) -> list[float]:
    """Coefficients of the mean of unit vectors that have these cosines."""
    count = len(weights)
    mean = list(weights)
    length = _length(cosines, mean)
    mean = [c / length for c in mean] if length >= tolerance else [1.0] + [0.0] * (count - 1)
    for _ in range(iterations):
        tangent = [0.0] * count
        for i, weight in enumerate(weights):
            cosine = _clamp(math.fsum(c * row for c, row in zip(mean, cosines[i], strict=True)))
            angle = math.acos(cosine)
            if tolerance <= angle <= math.pi - tolerance:
                step = weight * angle / math.sin(angle)
                tangent[i] += step
                tangent = [x - step * cosine * c for x, c in zip(tangent, mean, strict=True)]
        length = _length(cosines, tangent)
        if length < tolerance:
            break
        mean = [math.cos(length) * c + math.sin(length) / length * x for c, x in zip(mean, tangent, strict=True)]
        unit = _length(cosines, mean)
        mean = [c / unit for c in mean]
    return mean
