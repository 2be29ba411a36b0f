"""What comes along with the models of a merge, one mapping per model: Fishers, Gram matrices."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from isthmus.errors import InputError
from isthmus.flat import canonical_keys
from isthmus.spherical import normalised


def aligned(
    given: Sequence[Mapping[str, Tensor]] | None, count: int, keys: Collection[str], name: str, maker: str
) -> list[dict[str, Tensor]]:
    """One mapping per model by canonical key, all with the same keys, of which the models know every one.

    Args:
        given: what the user passed as ``name``.
        count: number of models.
        keys: the canonical keys of the models.
        name: of the argument, for error messages.
        maker: the function that makes such mappings, for error messages.

    Raises:
        InputError: there is not one mapping per model, one has a key that the models or the others lack, or a value is
            not a real floating-point tensor.
    """
    advice = f"{maker} makes one for each model."
    if isinstance(given, Mapping) or not isinstance(given, Sequence):
        raise InputError(f"{name} is a {type(given).__name__}, expected a list of one mapping per model; {advice}")
    if len(given) != count:
        raise InputError(f"{name} has {len(given)} mappings and there are {count} models; {advice}")
    mappings = []
    for index, mapping in enumerate(given):
        if not isinstance(mapping, Mapping):
            raise InputError(f"{name}[{index}] is a {type(mapping).__name__}, expected a mapping; {advice}")
        canonical = canonical_keys(mapping)
        mappings.append({canonical[key]: value for key, value in mapping.items()})
        for key, value in mappings[-1].items():
            if key not in keys:
                raise InputError(f"{name}[{index}] has the key {key!r}, which the models do not have; remove it.")
            if not isinstance(value, Tensor) or not value.is_floating_point():
                kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
                raise InputError(f"{name}[{index}][{key!r}] is a {kind}, expected a real floating-point tensor.")
        if mismatch := mappings[0].keys() ^ mappings[-1].keys():
            key = min(mismatch)
            lacking = index if key in mappings[0] else 0
            raise InputError(
                f"{name}[{lacking}] lacks the key {key!r}, which {name}[{index - lacking}] has; "
                "give it for all models or for none."
            )
    return mappings


def proportions(weights: Sequence[float], key: str) -> list[float]:
    """The weights divided by their sum.

    Raises:
        InputError: a weight is negative or not finite, or their sum is zero.
    """
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise InputError(f"the weights for {key!r} are {list(weights)}, expected finite numbers of at least 0.")
    return normalised(weights)


def average(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The mean x₁ + Σ wᵢ (xᵢ − x₁) in the tensors' dtype, for weights that sum to one: of equal tensors that tensor."""
    mean = tensors[0].clone()
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        mean += weight * (tensor - tensors[0])
    return mean


def batches_of(batches: Iterable[object], *, targets: bool = False) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The inputs of each batch, and its targets where they are asked for.

    Raises:
        InputError: ``batches`` is a tensor, or a batch has no inputs or not the targets asked for.
    """
    if isinstance(batches, Tensor):
        raise InputError("batches is a tensor, expected an iterable of batches; pass batches.split(batch_size).")
    for index, batch in enumerate(batches):
        parts = [batch] if isinstance(batch, Tensor) else list(batch) if isinstance(batch, Sequence) else []
        if not parts or not all(isinstance(part, Tensor) for part in parts[: 2 if targets else 1]):
            raise InputError(
                f"batch {index} is a {type(batch).__name__}, expected a tensor of inputs, or a sequence that begins "
                "with one and goes on with the tensor of targets."
            )
        if targets and (len(parts) < 2 or len(parts[0]) != len(parts[1])):
            raise InputError(
                f"batch {index} does not have one target for each of its {len(parts[0])} inputs; "
                "pass batches of (inputs, targets)."
            )
        yield parts[0], parts[1] if targets else None


def state_keys(module: nn.Module) -> dict[int, list[str]]:
    """The id of each parameter of ``module`` -> its canonical keys in the state dict: several where it is tied."""
    state = module.state_dict(keep_vars=True)
    canonical = canonical_keys(state)
    keys: dict[int, list[str]] = {}
    for key, value in state.items():
        if isinstance(value, nn.Parameter):
            keys.setdefault(id(value), []).append(canonical[key])
    return keys


def to_compute(tensor: Tensor) -> Tensor:
    """``tensor`` in float64, or complex128 if it is complex."""
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)
