"""Every op on the card against the CPU, on small tensors of awkward lengths."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from isthmus import ops
from isthmus.errors import BackendError, IsthmusWarning

from .card import Card

LENGTH = 70_001
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# An op's call on some models with a backend, and the bound on how far results of two devices are apart, relative to the
# largest: None where they are equal to the bit.
Check = tuple[str, Callable[[list[Tensor], str], Any], float | None]


def checks() -> Iterator[Check]:
    """Of every op."""
    density = {"density": 0.3, "names": "weight"}
    yield "lerp", lambda xs, backend: ops.lerp(xs[0], xs[1], 0.3, backend=backend), None
    yield "weighted_sum", lambda xs, backend: ops.weighted_sum(xs, [0.4, 0.3, 0.2, 0.1, 0.1], backend=backend), None
    for sparsify in ("none", "magnitude", "outliers", "random"):
        given = {"sparsify": sparsify} | ({} if sparsify == "none" else density)
        for vote in ("total", "frequency", "none"):
            options = given | {"majority_sign_method": vote}
            yield (
                f"consensus, {sparsify}, vote {vote}",
                lambda xs, backend, options=options: ops.consensus(xs[1:], base=xs[0], backend=backend, **options),
                None,
            )
    yield (
        "consensus, magnitude_random",
        lambda xs, backend: ops.consensus(
            xs[1:], base=xs[0], sparsify="magnitude_random", epsilon=0.1, backend=backend, **density
        ),
        1e-6,
    )
    yield (
        "consensus, rescaled by l1",
        lambda xs, backend: ops.consensus(xs[1:], base=xs[0], rescale="l1", density=0.3, backend=backend),
        1e-6,
    )
    for ties in ("inclusive", "exact"):
        yield f"thresholds, {ties}", lambda xs, backend, ties=ties: _cuts(xs, backend, ties=ties), None
    yield "gram", lambda xs, backend: ops.gram(xs, backend=backend), 1e-11
    yield "slerp", lambda xs, backend: ops.slerp(xs[0], xs[1], 0.3, backend=backend), 1e-6
    yield "permute", lambda xs, backend: ops.permute(*_matrix(xs[0]), backend=backend), None
    yield (
        "lerp_permuted",
        lambda xs, backend: ops.lerp_permuted(
            _matrix(xs[0])[0], _matrix(xs[1])[0], 0.3, _matrix(xs[0])[1], backend=backend
        ),
        None,
    )
    yield "add_product", _product, 1e-5
    yield (
        "multi_linear",
        lambda xs, backend: ops.multi_linear(
            *(_matrix(x)[0][:, :35].contiguous() for x in xs[:3]), [0.0, 0.3, 0.7], backend=backend
        ),
        1e-6,
    )


def _product(xs: list[Tensor], backend: str) -> Tensor:
    (a, index), (b, _) = _matrix(xs[0]), _matrix(xs[1])
    out = torch.zeros(a.shape[1], b.shape[1], device=a.device)
    ops.add_product(out, a.float()[:, None], b.float()[:, None], index[0].cpu(), backend=backend)
    return out


def _matrix(x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    matrix = x[: len(x) // 37 * 37].view(-1, 37)
    order = torch.randperm(len(matrix), generator=torch.Generator().manual_seed(0))
    return matrix, [order.to(x.device), None]


def _cuts(xs: list[Tensor], backend: str, *, ties: str) -> list[Tensor]:
    found: Any = ops.thresholds(xs[1:], 0.3, base=xs[0], ties=ties, backend=backend)
    return [found.keep.value, found.keep.index]


def differing(
    card: Card, backends: Sequence[str], dtypes: Sequence[torch.dtype] = DTYPES, *, length: int = LENGTH
) -> dict[str, Any]:
    """How many comparisons were made, what is wrong in which, how many came too late, and what backends do not have."""
    made, late, wrong = 0, 0, []
    missing: set[str] = set()
    for dtype in dtypes:
        generator = torch.Generator().manual_seed(0)
        models = [torch.randn(length, generator=generator).to(dtype) for _ in range(5)]
        there = [model.to(card.device) for model in models]
        for name, call, bound in checks():
            if card.left <= 0:
                late += len(backends)
                continue
            expected = _quietly(call, models, "auto")
            for backend in backends:
                made += 1
                try:
                    fault = _fault(expected, _quietly(call, there, backend), _bound(bound, dtype))
                except BackendError:
                    fault = "" if backend == "cuda" else "has no kernel"
                    missing.add(f"{name}, {backend}")
                except Exception as error:  # an op that fails is told among the others
                    fault = f"{type(error).__name__}: {error}"
                if fault:
                    wrong.append(f"{name}, {dtype}, {backend}: {fault}")
    return {"made": made, "wrong": wrong, "late": late, "missing": sorted(missing)}


def _quietly(call: Callable[[list[Tensor], str], Any], models: list[Tensor], backend: str) -> Any:
    """Inclusive cuts keep more than was asked for of magnitudes in 16 bits, of which many are equal: it is known."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IsthmusWarning)
        return call(models, backend)


def _bound(bound: float | None, dtype: torch.dtype) -> float | None:
    """Results that may differ are rounded to their dtype, and may fall to either side there."""
    return None if bound is None else max(bound, 2 * torch.finfo(dtype).eps if dtype.itemsize == 2 else 0.0)


def _fault(expected: Any, found: Any, bound: float | None) -> str:
    if isinstance(expected, list):
        return next(filter(None, (_fault(a, b, bound) for a, b in zip(expected, found, strict=True))), "")
    found = found.cpu()
    if bound is None:
        count = int((_bits(expected) != _bits(found)).sum())
        return f"{count} of {expected.numel()} elements differ" if count else ""
    distance = ((found.double() - expected.double()).abs().max() / expected.double().abs().max()).item()
    return "" if distance <= bound else f"relative distance {distance:.2e}, allowed {bound:.0e}"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()])
