"""Evaluate the models on the straight line between two models."""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isthmus import merging, norms, ops
from isthmus.errors import InputError, IsthmusWarning
from isthmus.flat import FlatState, canonical_keys
from isthmus.merging.sources import Source
from isthmus.preserve import preserved_model, preserved_random_states

from . import metrics
from .evaluate import Data, materialise
from .result import PathResult
from .scan import MIDPOINT, A, B, Evaluate, Scan
from .sources import load_source

Progress = Callable[[int, int, dict[str, dict[str, float]]], None]

SINGLE_SPLIT = "data"  # the split's name where only one evaluator is given


def scan_line(
    model: nn.Module,
    a: Source,
    b: Source,
    evaluate: Evaluate | Mapping[str, Evaluate],
    alphas: int | Sequence[float] = 21,
    *,
    base: Source | None = None,
    bn: str = "auto",
    bn_data: Data | Tensor | None = None,
    bn_batch_size: int = 256,
    representation: str | None = None,
    higher_is_better: Sequence[str] = ("accuracy",),
    backend: str = "auto",
    progress: Progress | None = None,
) -> PathResult:
    r"""Evaluate :math:`\theta(\alpha) = (1 - \alpha) A + \alpha B` at many :math:`\alpha`.

    The model's parameters and buffers become views of one flat buffer, into which each :math:`\theta(\alpha)` is
    written in one pass (``isthmus.merging.lerp_states``); at 0 and 1 they equal A and B to the bit. The ends and the
    midpoint are always points of the scan, because barriers and gains are measured by them, and are evaluated first,
    under the same BatchNorm policy as all others. Evaluation is in evaluation mode.

    ``model``, ``a``, ``b``, ``base`` and the global random states come back untouched, also after an error or an
    interrupt; the exception's attribute ``partial`` then holds the ``PathResult`` of the points that were finished. A
    NaN loss is a value like any other, and makes the barrier NaN.

    Args:
        model: the architecture; its own weights are not used. A, B and the data must fit its device.
        a: model A: a module, a state dict, a ``FlatState``, or the path of a safetensors file.
        b: model B.
        evaluate: an ``Evaluator``; or a function from the model to a number, called "loss", or to several by name; or
            a mapping from the names of splits to such. A single one is the split "data". With an ``Evaluator`` whose
            accuracy is the built-in one, ends and midpoint also yield correctness per sample, disagreement and
            ensemble.
        alphas: the number of points, equally spaced from 0 to 1; or the points themselves, also beyond the ends. They
            are sorted, and 0, 1/2 and 1 are added where they are missing (an even number of points grows by one).
        base: the model from which the task vectors of A and B are measured, for their cosine.
        bn: what happens to running statistics of BatchNorm layers: "keep" interpolates them like weights; "reset"
            re-estimates them at every point (``isthmus.norms.reset_statistics``); "auto" resets where the model has
            such layers and ``bn_data`` is given, else keeps, with a warning if it has such layers.
        bn_data: training data for that, unaugmented: a tensor of inputs, or data as for ``Evaluator``.
        bn_batch_size: examples per forward pass of the re-estimation, part of what is measured: leave it alone.
        representation: name of a submodule whose outputs at both ends are compared by CKA, on at most the first 4096
            samples of each split that has an ``Evaluator``.
        higher_is_better: the metrics that are scores rather than losses.
        backend: as for ``isthmus.ops.lerp``.
        progress: called after each point with the number of points done, of all points, and the point's metrics by
            split.

    Raises:
        InputError: A, B or the base do not have the model's tensors, or an argument is out of range.
        FileError: a file is missing or not a safetensors file.
        EvaluationError: an evaluator raised; ``partial`` has the points before.
    """
    points = _points(alphas)
    splits = dict(evaluate) if isinstance(evaluate, Mapping) else {SINGLE_SPLIT: evaluate}
    if not splits:
        raise InputError("evaluate is an empty mapping; give at least one evaluator.")
    policy = _bn_policy(model, bn, bn_data)
    work = FlatState.from_module(model)
    end_a = load_source(a, work.layout, "a", work.device)
    end_b = load_source(b, work.layout, "b", work.device)
    origin = None if base is None else load_source(base, work.layout, "base", work.device)
    bn_inputs = _bn_inputs(bn_data, work.device) if policy == "reset" and bn_data is not None else None
    scan = Scan(model, splits, representation)
    facts: dict[str, Any] = {
        "distances": _distances(model, end_a, end_b, origin),
        "higher_is_better": tuple(higher_is_better),
        "versions": _versions(),
        "choices": {
            "bn": policy,
            "bn_batch_size": None if bn_inputs is None else bn_batch_size,
            "bn_samples": None if bn_inputs is None else len(bn_inputs),
            "backend": ops.choose_backend(backend, work.device),
            "representation": representation,
            "device": str(work.device),
            "dtypes": sorted(str(dtype).removeprefix("torch.") for dtype in work.buffers),
        },
    }
    order = [A, B, MIDPOINT, *(alpha for alpha in points if alpha not in (A, B, MIDPOINT))]
    try:
        with preserved_random_states(), preserved_model(model), work.bind(model):
            for done, alpha in enumerate(order, start=1):
                start = time.perf_counter()
                merging.lerp_states(end_a, end_b, alpha, out=work, backend=backend)
                if bn_inputs is not None:
                    norms.reset_statistics(model, bn_inputs, bn_batch_size)
                values = scan.evaluate(alpha)
                scan.record(alpha, values, time.perf_counter() - start)
                if progress is not None:
                    progress(done, len(order), values)
    except BaseException as error:
        error.partial = scan.result(complete=False, **facts)  # type: ignore[attr-defined]
        raise
    return scan.result(complete=True, **facts)


def _points(alphas: int | Sequence[float]) -> list[float]:
    """The points of a scan, increasing, ends and midpoint among them."""
    if isinstance(alphas, int | np.integer):
        if alphas < 2:
            raise InputError(f"alphas={alphas} points do not reach from end to end; give at least 2.")
        given = np.arange(alphas, dtype=np.float64) / (alphas - 1)
    else:
        given = np.asarray(alphas, dtype=np.float64)
        if given.ndim != 1 or not np.isfinite(given).all():
            raise InputError("alphas must be a number of points or a sequence of finite numbers.")
    return sorted({*given.tolist(), A, MIDPOINT, B})


def _bn_policy(model: nn.Module, bn: str, bn_data: object) -> str:
    """Resolve what was asked to "keep" or "reset"."""
    if bn not in ("auto", "keep", "reset"):
        raise InputError(f"bn={bn!r} is unknown; it is 'auto', 'keep' or 'reset'.")
    has_norms = bool(norms.batch_norms(model))
    if bn == "reset" and not has_norms:
        raise InputError("bn='reset', but the model has no BatchNorm layer with running statistics; use bn='auto'.")
    if bn == "reset" and bn_data is None:
        raise InputError("bn='reset' needs training data to estimate statistics from; pass bn_data=.")
    if bn == "auto" and has_norms and bn_data is None:
        warnings.warn(
            "The model has BatchNorm layers and bn_data= is not given, so their running statistics are interpolated "
            "like weights; between the ends that can cost most of the accuracy. Pass training data as bn_data=, or "
            "bn='keep'.",
            IsthmusWarning,
            stacklevel=3,
        )
    return "reset" if has_norms and bn != "keep" and bn_data is not None else "keep"


def _bn_inputs(data: Data | Tensor, device: torch.device) -> Tensor:
    inputs = data if isinstance(data, Tensor) else materialise(data)[0]
    return inputs.to(device)


def _distances(model: nn.Module, a: FlatState, b: FlatState, base: FlatState | None) -> dict[str, float]:
    """Distances over the model's parameters; buffers are no directions of training."""
    own = canonical_keys(model.state_dict(keep_vars=True))
    keys = [own[key] for key, _ in model.named_parameters() if key in own]
    return metrics.distances(
        [a[key] for key in keys], [b[key] for key in keys], None if base is None else [base[key] for key in keys]
    )


def _versions() -> dict[str, str]:
    from isthmus import __version__

    return {
        "isthmus": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
