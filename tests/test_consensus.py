"""Consensus by hand, against an oracle in plain Python, and equal to the bit on every backend."""

from __future__ import annotations

import itertools
import math
import os
import random
import subprocess
import sys
import textwrap
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from isthmus import _dispatch, _library, _native, ops, reference
from isthmus.errors import InputError, IsthmusWarning
from isthmus.testing import FLOATS, awkward, contested, finite, same_bits

NO_INDEX = torch.iinfo(torch.int64).max
LENGTHS = [0, 1, 511, 512, 513, 4095, 4096, 4097, 70001]
CHOICES = {
    "sparsify": ["magnitude", "none", "random", "magnitude_random", "outliers"],
    "rescale": ["none", "inverse_density", "l1"],
    "majority_sign_method": ["total", "frequency", "weighted_total", "none"],
    "zero_sign": ["majority", "positive", "negative", "zero"],
    "merge_func": ["mean", "sum", "max"],
    "divisor": ["count", "weight"],
    "scope": ["global", "tensor", "row"],
    "ties": ["exact", "inclusive"],
}


def t(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)


def quietly(function, *args, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IsthmusWarning)
        return function(*args, **options)


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_task_arithmetic(backend):
    base, a, b = t(1.0, 2.0, 3.0), t(2.0, 2.0, 1.0), t(1.0, 4.0, 2.0)
    result = ops.consensus(
        [a, b], [0.5, 2.0], base=base, scaling_factor=0.5, majority_sign_method="none", merge_func="sum",
        sparsify="none", backend=backend,
    )  # fmt: skip
    assert result.tolist() == [1.25, 4.0, 1.5]


def test_weights_of_a_model_with_itself(backend):
    x = t(0.1, -2.0, 3.3)
    options = {"sparsify": "none", "majority_sign_method": "none", "backend": backend}
    assert torch.allclose(ops.consensus([x, x], [0.1, 1.0], merge_func="sum", **options), 1.1 * x)
    y = t(1.0, 1.0, 1.0)
    assert same_bits(ops.consensus([x, y], [1.0, -1.0], merge_func="sum", **options), x - y)


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({}, 0.6),  # +3 - 1 > 0; .2 * 3 over one model
        ({"divisor": "weight"}, 3.0),
        ({"majority_sign_method": "weighted_total"}, -0.8),
        ({"majority_sign_method": "weighted_total", "divisor": "weight"}, -1.0),
        ({"majority_sign_method": "none", "merge_func": "sum"}, -0.2),
        ({"majority_sign_method": "none"}, -0.1),
        ({"majority_sign_method": "none", "merge_func": "max"}, -0.8),
        ({"merge_func": "max"}, 0.6),
        ({"majority_sign_method": "frequency", "zero_sign": "positive"}, 0.6),
        ({"majority_sign_method": "frequency", "zero_sign": "negative"}, -0.8),
        ({"majority_sign_method": "frequency", "zero_sign": "zero"}, 0.0),
        ({"majority_sign_method": "frequency", "zero_sign": "majority"}, -0.8),  # nothing else elected: negative
    ],
)
def test_votes_on_plus_three_and_minus_one(backend, options, value):
    result = ops.consensus([t(3.0), t(-1.0)], [0.2, 0.8], backend=backend, **options)
    assert result.item() == pytest.approx(value, rel=1e-6, abs=0)


def test_published_tools_on_two_weights(backend):
    deltas = [t(1.0), t(3.0)]
    mergekit = ops.consensus(
        deltas, [0.2, 0.8], majority_sign_method="weighted_total", zero_sign="positive", divisor="weight",
        backend=backend,
    )  # fmt: skip
    assert mergekit.item() == pytest.approx(2.6, rel=1e-6)
    assert ops.consensus(deltas, [0.2, 0.8], backend=backend).item() == pytest.approx(1.3, rel=1e-6)
    deltas = [t(1.0), t(-3.0)]
    weighted = {"majority_sign_method": "weighted_total", "divisor": "weight", "backend": backend}
    assert ops.consensus(deltas, [0.9, 0.1], **weighted).item() == 1.0
    assert ops.consensus(deltas, [0.9, 0.1], backend=backend).item() == pytest.approx(-0.3, rel=1e-6)


def test_a_cancelled_vote_follows_the_majority(backend):
    a = [t(1.0, 2.0, 3.0, -4.0), t(5.0, -1.0)]
    b = [t(-1.0, 2.0, 3.0, -4.0), t(-5.0, -1.0)]
    # Elected: + + - in the first, - in the second; in all a draw, which counts as negative.
    first, second = ops.consensus([a, b], backend=backend)
    assert first.tolist() == [-1.0, 2.0, 3.0, -4.0]
    assert second.tolist() == [-5.0, -1.0]
    first, second = ops.consensus([a, b], scope="tensor", backend=backend)
    assert first.tolist() == [1.0, 2.0, 3.0, -4.0]
    assert second.tolist() == [-5.0, -1.0]


def test_zeros_never_agree(backend):
    base = t(-0.0, 1.0)
    assert same_bits(ops.consensus([base, base], base=base, backend=backend), base)
    deltas = [t(0.0, -0.0, 2.0), t(-0.0, 0.0, 0.0)]
    for method in ("total", "frequency", "weighted_total", "none"):
        result = ops.consensus(deltas, majority_sign_method=method, zero_sign="positive", backend=backend)
        assert same_bits(result, t(0.0, 0.0, 2.0))  # the mean over one model


def test_no_agreement_gives_the_base_to_the_bit(backend):
    base = t(-0.0, 1e-45, 3.0)
    models = [base + t(1.0, 1.0, 1.0), base - t(1.0, 1.0, 1.0)]
    assert same_bits(ops.consensus(models, base=base, zero_sign="zero", density=0.0, backend=backend), base)
    zeros = ops.consensus([t(1.0, -0.0), t(-1.0, -0.0)], zero_sign="zero", backend=backend)
    assert same_bits(zeros, t(0.0, 0.0))


def test_weights_that_sum_to_zero_divide_by_one(backend):
    result = ops.consensus([t(3.0), t(5.0)], [1.0, -1.0], divisor="weight", backend=backend)
    assert result.item() == -2.0


def test_sums_are_left_folds_from_the_first_that_agrees(backend):
    terms = [t(-1.0), t(2.0**24), t(1.0), t(1.0)]
    assert ops.consensus(terms, merge_func="sum", backend=backend).item() == 2.0**24
    assert ops.consensus(terms[::-1], merge_func="sum", backend=backend).item() == 2.0**24 + 2
    # The vote is a fold, too: (2^24 + 1) - 2^24 is 0 in float32, and nothing else elects a sign.
    assert ops.consensus([t(2.0**24), t(1.0), t(-(2.0**24))], merge_func="sum", backend=backend).item() == -(2.0**24)


def test_the_scaled_change_is_rounded_before_it_is_added(backend):
    base = t(-(1 + 2**-11))
    x = base + t(1 + 2**-12)
    result = ops.consensus([x], base=base, scaling_factor=1 + 2**-12, backend=backend)
    assert result.item() == 0.0  # (1 + 2^-12)^2 rounds to 1 + 2^-11


def test_max_takes_the_first_of_equals_and_the_elected_sign(backend):
    options = {"merge_func": "max", "backend": backend}
    assert ops.consensus([t(2.0), t(-2.0), t(1.0)], majority_sign_method="none", **options).item() == 2.0
    assert ops.consensus([t(-2.0), t(2.0), t(1.0)], majority_sign_method="none", **options).item() == -2.0
    assert ops.consensus([t(2.0), t(-5.0), t(4.0)], **options).item() == 4.0
    assert ops.consensus([t(2.0), t(4.0)], [-3.0, 1.0], **options).item() == 6.0


def test_trimming_by_scope(backend):
    tensors = [[torch.ones(4), torch.full((4,), 100.0)]]
    options = {"density": 0.5, "ties": "exact", "backend": backend}
    first, second = ops.consensus(tensors, scope="tensor", **options)
    assert first.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert second.tolist() == [100.0, 100.0, 0.0, 0.0]
    first, second = ops.consensus(tensors, **options)
    assert first.tolist() == [0.0] * 4
    assert second.tolist() == [100.0] * 4
    rows = ops.consensus([t(1.0, 2.0, 30.0, 40.0).view(2, 2)], scope="row", **options)
    assert rows.tolist() == [[0.0, 2.0], [0.0, 40.0]]


def test_rescaling(backend):
    x = t(1.0, -2.0, 3.0, -4.0)
    options = {"density": 0.5, "ties": "exact", "backend": backend}
    assert ops.consensus([x], rescale="inverse_density", **options).tolist() == [0.0, 0.0, 6.0, -8.0]
    scaled = ops.consensus([x], rescale="l1", **options)
    assert torch.allclose(scaled, t(0.0, 0.0, 3.0, -4.0) * 10 / 7)
    tiny = 1e-9 * x
    assert torch.equal(ops.consensus([tiny], rescale="l1", **options), tiny * t(0.0, 0.0, 1.0, 1.0))
    both = ops.consensus([x, x], rescale="inverse_density", **(options | {"density": [0.5, 1.0]}))
    assert both.tolist() == [1.0, -2.0, 4.5, -6.0]
    nothing = ops.consensus([x, x], rescale="inverse_density", **(options | {"density": [0.0, 1.0]}))
    assert nothing.tolist() == x.tolist()


def test_outliers_are_dropped(backend):
    x = t(5.0, -1, 4, 2, -9, 3, 8, 7, -6, 10)
    result = ops.consensus([x], density=0.3, gamma=0.2, sparsify="outliers", ties="exact", backend=backend)
    assert result.tolist() == [0, 0, 0, 0, 0, 0, 8.0, 7.0, -6.0, 0]


def test_stats_count_entries(backend):
    a, b = t(1.0, 2.0, -3.0, 0.0, 5.0), t(-1.0, 3.0, -4.0, 0.0, -1.0)
    _, stats = ops.consensus([[a, a], [b, a]], stats=True, backend=backend)
    assert stats.kept.tolist() == [[4, 4], [4, 4]]  # zeros are not counted
    assert stats.positive.tolist() == [2, 3]
    assert stats.negative.tolist() == [1, 1]
    assert stats.cancelled.tolist() == [1, 0]
    assert stats.conflicts.tolist() == [2, 0]
    _, stats = ops.consensus(
        [a, b], density=0.4, ties="exact", majority_sign_method="none", stats=True, backend=backend
    )
    assert stats.kept.tolist() == [[2, 2]]
    assert stats.positive.tolist() == stats.cancelled.tolist() == [0]


def test_weights_densities_and_factors_of_each_tensor(backend):
    a, b = [t(1.0, 2.0), t(3.0, 4.0)], [t(10.0, 20.0), t(30.0, 40.0)]
    result = ops.consensus(
        [a, b], [[1.0, 2.0], 0.5], [[1.0, 0.5], [0.5, 0.0]], scope="tensor", ties="exact", merge_func="sum",
        scaling_factor=[1.0, 10.0], backend=backend,
    )  # fmt: skip
    assert result[0].tolist() == [1.0, 12.0]
    assert result[1].tolist() == [0.0, 80.0]
    tables = [[1.0, 2.0], [0.5, 0.5]]
    for weights in (torch.tensor(tables), np.array(tables), [torch.tensor([1.0, 2.0]), np.float32(0.5)]):
        again = ops.consensus([a, b], weights, merge_func="sum", scaling_factor=torch.tensor([1.0, 10.0]))
        assert again[0].tolist() == [6.0, 12.0]
        assert again[1].tolist() == [210.0, 280.0]


def test_dtypes(backend):
    base, delta = t(1.0, dtype=torch.bfloat16), t(2**-9 + 2**-20)
    merged = ops.consensus([base.float() + delta], base=base, backend=backend)
    assert merged.dtype == torch.bfloat16
    assert merged.item() == 1.0
    wide = ops.consensus([base.float() + delta], base=base, out=torch.empty(1), backend=backend)
    assert wide.item() == 1 + 2**-9 + 2**-20
    # One rounding, not two: just above the middle of two bfloat16 values, by less than float32 resolves.
    value = t(1 + 2**-8 + 2**-40, dtype=torch.float64)
    out = torch.empty(1, dtype=torch.bfloat16)
    assert ops.consensus([value], out=out, backend=backend).item() == 1 + 2**-7


def test_many_half_precision_models(backend):
    models = [torch.full((1000,), 500.0, dtype=torch.float16)] * (30 if backend == "triton" else 300)
    assert ops.consensus(models, backend=backend).tolist() == [500.0] * 1000
    assert ops.consensus(models, density=0.5, ties="exact", backend=backend).tolist() == [500.0] * 500 + [0.0] * 500


@pytest.mark.parametrize("rescale", ["none", "l1"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scope", ["tensor", "row"])
def test_nan_survives_a_cut_that_keeps_everything(backend, rescale, dtype, scope):
    x = torch.arange(10.0).to(dtype)
    x[0] = math.nan
    options = {"majority_sign_method": "none", "scope": scope, "rescale": rescale, "backend": backend}
    result = ops.consensus([x, torch.ones(10, dtype=dtype)], density=0.9, **options)
    assert result[0].isnan()
    assert not result[1:].isnan().any() or rescale == "l1"  # Σ|τ| is then NaN, and everything with it
    clean = ops.consensus([torch.nan_to_num(x, 2.0), torch.ones(10, dtype=dtype)], density=0.9, **options)
    assert rescale == "l1" or same_bits(result[1:], clean[1:])


# Of a keeping and a dropping cut each value and index: whether NaN at place 1 survives.
NAN_AND_CUTS = [
    ((2.0, 0), None, True),
    ((0.0, NO_INDEX), None, True),
    ((math.inf, 0), None, False),
    ((0.0, NO_INDEX), (3.0, 0), False),
    ((0.0, NO_INDEX), (3.0, NO_INDEX), False),
    ((0.0, NO_INDEX), (math.inf, 0), True),
    ((math.inf, 0), (math.inf, 0), False),
]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scope", ["tensor", "row"])
@pytest.mark.parametrize(("keep", "drop", "survives"), NAN_AND_CUTS)
def test_nan_stands_above_infinity(backend, keep, drop, survives, scope, dtype):
    x = torch.tensor([1.0, math.nan, math.inf, 4.0], dtype=dtype)
    cuts = [
        None if cut is None else reference.Cuts(torch.tensor([[cut[0]]]).double(), torch.tensor([[cut[1]]]))
        for cut in (keep, drop)
    ]
    trims = ops.Thresholds(*cuts, scope, [4] if scope == "row" else None, torch.zeros(1, 1, dtype=torch.int64))
    result = ops.consensus(
        [x], thresholds=trims, majority_sign_method="none", scope=scope, backend=backend,
        sparsify="magnitude" if drop is None else "outliers",
    )  # fmt: skip
    expected = 0.0 if not survives else math.nan
    assert str(result[1].item()) == str(expected)
    assert result[2].item() == (math.inf if survives else 0.0)


def test_nan_and_infinity_propagate(backend):
    inf, nan = float("inf"), float("nan")
    a, b = t(nan, inf, inf, 1.0), t(1.0, 1.0, -inf, 1.0)
    for method in ("total", "weighted_total"):
        result = ops.consensus([a, b], majority_sign_method=method, backend=backend)
        assert str(result.tolist()) == "[nan, inf, nan, 1.0]"
    result = ops.consensus([a, b], majority_sign_method="frequency", zero_sign="positive", backend=backend)
    assert str(result.tolist()) == "[nan, inf, inf, 1.0]"
    result = ops.consensus([a, b], majority_sign_method="none", merge_func="max", backend=backend)
    assert str(result.tolist()) == "[nan, inf, inf, 1.0]"
    result = ops.consensus([b, a], majority_sign_method="none", merge_func="max", backend=backend)
    assert str(result.tolist()) == "[nan, inf, -inf, 1.0]"


def test_complex_tensors_without_trimming_and_vote(backend):
    base, a = torch.tensor([1 + 1j, 2.0]), torch.tensor([2 + 3j, 2 - 1j])
    options = {"sparsify": "none", "majority_sign_method": "none", "merge_func": "sum", "backend": backend}
    assert ops.consensus([a, a], [1.0, 0.5], base=base, **options).tolist() == [2.5 + 4j, 2 - 1.5j]
    assert ops.consensus([a.conj()], base=base.conj(), **options).tolist() == a.conj().tolist()


def test_models_may_come_from_any_iterable(backend):
    models = {"a": t(1.0, 2.0), "b": t(3.0, 4.0)}
    for tensors in (models.values(), iter(models.values()), torch.stack(list(models.values()))):
        assert ops.consensus(tensors, backend=backend).tolist() == [2.0, 3.0]


def test_empty_inputs(backend):
    assert ops.consensus([[], []], density=0.5, backend=backend) == []
    result, stats = ops.consensus([[], []], stats=True, backend=backend)
    assert result == []
    assert stats.kept.shape == (0, 2)
    empty = torch.empty(0, 3)
    for scope in CHOICES["scope"]:
        first, second = ops.consensus([[empty, t(1.0, 2.0)]], density=0.5, ties="exact", scope=scope, backend=backend)
        assert first.shape == (0, 3)
        assert second.tolist() == [0.0, 2.0]


def test_any_strides_and_in_place_outputs(backend):
    x, y, base = (torch.randn(6, 10, generator=torch.Generator().manual_seed(k)) for k in range(3))
    options = {"density": 0.4, "backend": backend}
    expected = ops.consensus([x, y], base=base, **options)
    mixed = ops.consensus([x.t().contiguous().t(), y], base=base, **options)
    assert same_bits(mixed, expected)
    turned = ops.consensus([z.t() for z in (x, y)], base=base.t(), scope="row", **options)
    straight = ops.consensus([z.t().contiguous() for z in (x, y)], base=base.t().contiguous(), scope="row", **options)
    assert same_bits(turned.contiguous(), straight)
    out = torch.zeros(6, 10, 2)[..., 0]
    assert ops.consensus([x, y], base=base, out=out, **options) is out
    assert same_bits(out, expected)
    for target in range(3):
        tensors = [x.clone(), y.clone(), base.clone()]
        got = ops.consensus(tensors[:2], base=tensors[2], out=tensors[target], **options)
        assert got is tensors[target]
        assert same_bits(got, expected)
        assert all(same_bits(z, w) for k, (z, w) in enumerate(zip(tensors, (x, y, base), strict=True)) if k != target)


# --- against an oracle ------------------------------------------------------------------------------------------------


def elected(votes, method):
    """The sum that is voted with, and whether any term of it is not zero."""
    total = 0.0
    for place, vote in enumerate(votes):
        total = vote if place == 0 else total + vote
    return total, any(votes)


def oracle(models, weights, base, masks, factors, *, method, zero_sign, merge_func, divisor, scaling):
    """Consensus of lists of floats, entry by entry, as the documentation says; masks[i][j] says what survives."""
    n = len(models[0])
    entries = []
    for j in range(n):
        rows = [
            (w, factors[i] * (x[j] - base[j] if base else x[j]))
            for i, (w, x) in enumerate(zip(weights, models, strict=True))
            if masks[i][j]
        ]
        if method == "weighted_total":
            votes = [w * rho for w, rho in rows]
        elif method == "frequency":
            votes = [math.copysign(1.0, rho) if rho else 0.0 for _, rho in rows]
        else:
            votes = [rho for _, rho in rows]
        entries.append((rows, votes, *elected(votes, method)))
    tally = sum((total > 0) - (total < 0) for *_, total, _ in entries)
    results = []
    for j, (rows, votes, total, disputed) in enumerate(entries):
        sign = (total > 0) - (total < 0)
        if sign == 0 and disputed:
            by = {"positive": 1, "negative": -1, "zero": 0, "majority": 1 if tally > 0 else -1}
            sign = by[zero_sign]
        if method == "none":
            agree = [row for row in rows if row[1]]
        else:
            agree = [row for row, vote in zip(rows, votes, strict=True) if vote * sign > 0]
        start = base[j] if base else 0.0
        if not agree:
            results.append(start)
            continue
        terms = [w * rho for w, rho in agree]
        if merge_func == "max":
            merged = max(terms, key=abs) if method == "none" else sign * max(map(abs, terms))
        else:
            merged, share = terms[0], agree[0][0]
            for term, (w, _) in zip(terms[1:], agree[1:], strict=True):
                merged, share = merged + term, share + w
            if merge_func == "mean":
                merged /= len(agree) if divisor == "count" else (share or 1.0)
        results.append(start + scaling * merged if base else scaling * merged)
    return results


small = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.1, -0.3, 1e-300, 7.0])


@given(st.data())
@settings(deadline=None, max_examples=300)
def test_property_consensus_is_that_of_the_oracle(data):
    count, n = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    rows = [data.draw(st.lists(small, min_size=n, max_size=n)) for _ in range(count)]
    base = data.draw(st.one_of(st.none(), st.lists(small, min_size=n, max_size=n)))
    weights = data.draw(st.lists(st.sampled_from([1.0, 0.3, -0.5, 0.0, 2.0]), min_size=count, max_size=count))
    options = {
        name: data.draw(st.sampled_from(CHOICES[name]))
        for name in ("majority_sign_method", "zero_sign", "merge_func", "divisor")
    }
    density = data.draw(st.sampled_from([0.0, 0.3, 0.5, 1.0]))
    scaling = data.draw(st.sampled_from([1.0, 0.7, -2.0]))
    inverse = data.draw(st.booleans())
    masks = []
    for row in rows:
        tau = [x - b for x, b in zip(row, base, strict=True)] if base else row
        order = sorted(range(n), key=lambda i, tau=tau: (-abs(tau[i]), i))
        kept = set(order[: int(density * n)])
        masks.append([i in kept for i in range(n)])
    expected = oracle(
        rows, weights, base, masks, [1 / density if inverse and density else 1.0] * count,
        method=options["majority_sign_method"], zero_sign=options["zero_sign"], merge_func=options["merge_func"],
        divisor=options["divisor"], scaling=scaling,
    )  # fmt: skip
    for backend in ("reference", "cpp"):
        got = ops.consensus(
            [torch.tensor(row, dtype=torch.float64) for row in rows],
            weights,
            density,
            base=None if base is None else torch.tensor(base, dtype=torch.float64),
            ties="exact",
            rescale="inverse_density" if inverse else "none",
            scaling_factor=scaling,
            backend=backend,
            **options,
        )
        assert got.tolist() == expected


# --- equality to the bit ----------------------------------------------------------------------------------------------


def settings_of(count, seed):
    """Combinations of all options: each value occurs, most pairs of values do."""
    everything = [dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())]
    return random.Random(seed).sample(everything, count)


EXPECTED = {}  # what the reference gives, by test: it is slow, and the same for all instruction sets and thread counts


def sample(everything, backend, one_in, seed=0):
    """All of it, or on the slow interpreter of Triton's kernels one in so many, others for another seed."""
    return [x for place, x in enumerate(everything) if backend != "triton" or place % one_in == seed % one_in]


def assert_sums_of_triton(got, expected, columns):
    """Sums of magnitudes are those of the reference up to the bound that ``isthmus.kernels.reductions`` states."""
    length = torch.tensor([[[max(1, x.numel())]] for x in columns[0]], dtype=torch.float64)
    near = (got - expected).abs() <= 2**-53 * (length / 2048 + 600) * expected
    assert (near | (got == expected) | (got.isnan() & expected.isnan())).all()


def check(test, models, base, backend, *, dtypes=None, **options):
    """Run an op on a backend and on the reference, with the same arguments, and compare bits and counts."""
    if options["sparsify"] == "none":
        options["density"] = 1.0
    if options["sparsify"] == "magnitude_random":
        options["epsilon"] = 0.1
    names = [f"layer.{row}" for row in range(len(models[0]))]

    def run(name):
        out = None if dtypes is None else [torch.empty_like(x, dtype=d) for x, d in zip(models[0], dtypes, strict=True)]
        return quietly(
            ops.consensus, models, base=base, names=names, out=out, stats=True, backend=name, gamma=0.05, **options
        )

    def sums_of_triton(columns, plan, **_):
        sums = l1(columns, plan, backend="triton")
        assert_sums_of_triton(sums, reference.l1(columns, plan), columns)
        return sums

    key, l1 = (test, repr(options)), _dispatch.l1
    with pytest.MonkeyPatch.context() as patch:
        if backend == "triton" and options["rescale"] == "l1":  # the same factors for the reference
            key = (*key, backend)
            patch.setattr(_dispatch, "l1", sums_of_triton)
        if key not in EXPECTED:
            EXPECTED[key] = run("reference")
    (got, counts), (expected, expected_counts) = run(backend), EXPECTED[key]
    assert all(same_bits(x, y) for x, y in zip(got, expected, strict=True)), options
    assert all(torch.equal(x, y) for x, y in zip(counts, expected_counts, strict=True)), options


@pytest.mark.parametrize("make", [finite, contested])
@pytest.mark.parametrize("dtype", FLOATS)
def test_bits_of_all_options_equal_the_reference(compiled, dtype, make):
    shapes = [(3, 171), (1,), (), (0, 4), (2, 3, 86), (4097,)]
    columns = [
        [make(torch.Size(shape).numel(), dtype, seed=10 * row + k).view(shape) for row, shape in enumerate(shapes)]
        for k in range(4)
    ]
    weights = [
        [0.37, 1.0, -0.2],
        [1.0, 1.0, 1.0],
        [0.0, 0.0, 2.0],
        [[0.1 * row + k for row in range(6)] for k in range(3)],
    ]
    densities = [0.3, [0.2, 0.0, 1.0], [0.2, 0.5, 0.4]]
    everything = list(enumerate(settings_of(48, seed=FLOATS.index(dtype))))
    for place, options in sample(everything, compiled, 12, seed=1 + (make is contested)):
        options |= {"weights": weights[place % 4], "density": densities[place % 3], "seed": place}
        options["scaling_factor"] = [1.0, 0.7, -0.5, 0.0, 2.0][place % 5]
        check(("all", dtype, make.__name__, place), columns[1:], columns[0] if place % 2 else None, compiled, **options)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_bits_at_all_lengths_and_threads(compiled, threads, dtype, length):
    columns = [[contested(length, dtype, seed=k)] for k in range(4)]
    cases = (
        {},
        {"sparsify": "none", "majority_sign_method": "none", "merge_func": "sum"},
        {"sparsify": "random", "rescale": "l1", "majority_sign_method": "frequency"},
        {"sparsify": "magnitude_random", "rescale": "inverse_density", "zero_sign": "zero", "merge_func": "max"},
        {"sparsify": "outliers", "ties": "exact", "rescale": "l1", "majority_sign_method": "weighted_total"},
    )
    for options in sample(cases, compiled, 3, seed=LENGTHS.index(length) + FLOATS.index(dtype)):
        everything = {name: values[0] for name, values in CHOICES.items()} | options
        everything |= {"density": 0.4, "weights": [1.0, 0.5, 0.3]}
        check(("lengths", dtype, length), columns[1:], columns[0], compiled, **everything)


@pytest.mark.parametrize("dtype", FLOATS)
def test_bits_of_nan_and_infinity(compiled, threads, dtype):
    columns = [[awkward(5003, dtype, seed=k), awkward(77, dtype, seed=10 + k)] for k in range(4)]
    for place, options in sample(enumerate(settings_of(24, seed=7)), compiled, 5, seed=FLOATS.index(dtype)):
        options |= {"sparsify": ["none", "random"][place % 2], "density": 0.6, "weights": [0.5, 0.0, -1.5]}
        check(("nan", dtype, place), columns[1:], columns[0] if place % 3 else None, compiled, **options)


@pytest.mark.parametrize(("first", "second", "third"), list(itertools.product(FLOATS, repeat=3)))
def test_bits_of_mixed_dtypes(compiled, first, second, third):
    dtypes = [first, second, third]
    columns = [[finite(1001, dtype, seed=k), contested(513, dtype, seed=k)] for k, dtype in enumerate(dtypes)]
    everything = list(enumerate(settings_of(4, seed=FLOATS.index(first) + 4 * FLOATS.index(second))))
    for place, options in sample(everything, compiled, 4, seed=sum(map(FLOATS.index, dtypes))):
        based = place % 2
        options |= {"density": 0.5, "weights": 0.7, "dtypes": [third, first] if place > 1 else None}
        check(("mixed", *dtypes, place), columns[based:], columns[0] if based else None, compiled, **options)


@pytest.mark.parametrize("count", [*range(1, 11), 300])
def test_bits_of_many_models(compiled, count):
    count = min(count, 20) if compiled == "triton" else count
    models = [[contested(1037, torch.float32, seed=k)] for k in range(count)]
    base = [contested(1037, torch.float32, seed=1000)]
    for options in sample(settings_of(6 if count < 300 else 2, seed=count), compiled, 3):
        options |= {"density": 0.4, "weights": [0.37 * k - 1.1 for k in range(count)]}
        check(("models", count), models, base, compiled, **options)


@pytest.mark.parametrize("dtype", FLOATS)
def test_bits_of_outputs_that_bypass_the_caches(compiled, threads, dtype):
    count = (1 << 20 if compiled == "triton" else 16 << 20) // dtype.itemsize + 133
    models = [[torch.linspace(-1, s, count, dtype=torch.float64).to(dtype)] for s in (3, -2, 1)]
    options = {name: values[0] for name, values in CHOICES.items()} | {"density": 0.2, "weights": 1.0}
    check(("caches", dtype, count), models[1:], models[0], compiled, **options)


@pytest.mark.parametrize("models", [3, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_majority_in_place_is_that_of_the_inputs(compiled, threads, sign, dtype, models):
    length = 5_003 if compiled == "triton" else 200_003
    columns = [sign * contested(length, dtype, seed=k).add(0.5 * (k == 1)) for k in range(models + 1)]
    options = {"density": 0.6, "ties": "exact", "backend": compiled, "stats": True}
    expected, counts = ops.consensus(columns[1:], base=columns[0], **options)
    assert counts.cancelled.item() > length // 200
    assert (counts.positive > counts.negative).item() == (sign > 0)
    for target in (0, 1, models):
        inputs = [x.clone() for x in columns]
        got, again = ops.consensus(inputs[1:], base=inputs[0], out=inputs[target], **options)
        assert got is inputs[target]
        assert same_bits(got, expected)
        assert all(torch.equal(x, y) for x, y in zip(counts, again, strict=True))
        assert all(same_bits(x, y) for k, (x, y) in enumerate(zip(inputs, columns, strict=True)) if k != target)


@pytest.mark.parametrize("ties", ["exact", "inclusive"])
def test_bits_of_a_model_whose_tensors_differ_in_dtype(compiled, threads, ties):
    # One threshold for all: that of a float64 tensor lies between two float32 values.
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    columns = [
        [contested(70_001, dtype, seed=10 * k + row).mul(1 + 2.0**-8 * row) for row, dtype in enumerate(dtypes)]
        for k in range(3)
    ]
    for column in columns:
        column[1] += torch.linspace(0, 2.0**-30, 70_001, dtype=torch.float64)
    for density in sample((0.1, 0.3, 0.35), compiled, 3, seed=ties == "exact"):
        everything = {name: values[0] for name, values in CHOICES.items()}
        everything |= {"density": density, "ties": ties, "weights": [1.0, 0.5]}
        check(("tensors of dtypes",), columns[1:], columns[0], compiled, **everything)
        check(("deltas of dtypes",), columns[1:], None, compiled, **everything)


@pytest.mark.parametrize("scope", ["row", "tensor"])
def test_bits_of_many_short_rows(compiled, threads, scope):
    columns = [
        [contested(210_000, torch.float32, seed=k).view(-1, 3), contested(64, torch.float32, seed=k).view(2, 32)]
        for k in range(3)
    ]
    everything = {name: values[0] for name, values in CHOICES.items()}
    everything |= {"density": 0.4, "scope": scope, "weights": [1.0, 0.5]}
    check(("short rows",), columns[1:], columns[0], compiled, **everything)
    everything |= {"sparsify": "outliers", "rescale": "l1"}
    check(("short rows", "outliers"), columns[1:], columns[0], compiled, **everything)


@pytest.mark.parametrize("scope", ["global", "tensor"])
@pytest.mark.parametrize("ties", ["exact", "inclusive"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_bits_do_not_depend_on_where_the_buffer_is_split(backend, threads, dtype, ties, scope):
    whole = [contested(20_011, dtype, seed=k) for k in range(4)]
    options = {"density": 0.3, "zero_sign": "positive", "ties": ties, "backend": backend}
    found = quietly(ops.thresholds, whole[1:], 0.3, base=whole[0], scope=scope, ties=ties, backend=backend)
    expected = ops.consensus(whole[1:], base=whole[0], thresholds=found, **options)
    assert same_bits(expected, quietly(ops.consensus, whole[1:], base=whole[0], scope=scope, **options))
    splits = ([1, 2, 4093, 15_915], [20_010, 1], [5000, 5000, 5000, 5011])
    for sizes in sample(splits, backend, 3, seed=FLOATS.index(dtype)):
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        parts = [list(x.split(sizes)) for x in whole]
        if scope == "global":  # the rows of a model follow each other
            merged = ops.consensus(parts[1:], base=parts[0], thresholds=found, **options)
            assert same_bits(torch.cat(merged), expected)
            again = quietly(ops.consensus, parts[1:], base=parts[0], **options)
            assert same_bits(torch.cat(again), expected)
        for place, start in enumerate(starts):
            shard = [x[place] for x in parts]
            merged = ops.consensus(shard[1:], base=shard[0], thresholds=found, starts=start, **options)
            assert same_bits(merged, expected[start : start + sizes[place]])


def test_thresholds_of_rows_are_used_again(backend):
    models = [[contested(600, torch.float32, seed=k).view(20, 30), contested(7, torch.float32, seed=k)] for k in (1, 2)]
    found = quietly(ops.thresholds, models, 0.3, scope="row", gamma=0.1, backend=backend)
    once = ops.consensus(models, density=0.3, sparsify="outliers", thresholds=found, backend=backend)
    both = quietly(ops.consensus, models, density=0.3, sparsify="outliers", scope="row", gamma=0.1, backend=backend)
    assert all(same_bits(x, y) for x, y in zip(once, both, strict=True))


@pytest.mark.parametrize("isa", ["base", "v3", "v4"])
def test_flushing_subnormals_in_one_thread_changes_nothing(isa):
    if not dict(_native.cpu().instruction_sets()).get(isa):
        pytest.skip(f"instruction set {isa} is not supported by this processor")
    code = """
        import torch
        from isthmus import ops
        from isthmus.testing import same_bits
        torch.set_num_threads(2)
        steps = (torch.arange(1_000_003) % 97).float()
        tiny = [1e-40 * (steps - 48), 1e-41 * (50 - steps)]

        def run():
            found = ops.thresholds(tiny, 0.4, ties="exact")
            options = dict(density=0.4, ties="exact", rescale="l1")
            return [found.keep.value, ops.consensus(tiny, **options), ops.consensus(tiny, base=tiny[1], **options)]

        expected = run()
        assert all(0 < x.abs().max() < 1e-37 for x in expected)
        assert torch.set_flush_denormal(True)
        assert (tiny[0][:9] * 0.5).count_nonzero() == 0  # this thread flushes
        got = run()
        torch.set_flush_denormal(False)
        assert all(same_bits(x, y) for x, y in zip(got, expected))
        print("same")
    """
    environment = {**os.environ, "ISTHMUS_ISA": isa}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.stdout == "same\n", done.stderr


# --- bad input --------------------------------------------------------------------------------------------------------

ONES = torch.ones(3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.consensus([]), "consensus got no tensors"),
        (lambda: ops.consensus(torch.tensor(1.0)), "consensus got no tensors"),
        (lambda: ops.consensus([ONES, torch.ones(4)]), r"tensors\[1\] has shape \(4,\)"),
        (lambda: ops.consensus([ONES], base=torch.ones(4)), r"tensors\[0\] has shape \(3,\), expected \(4,\) as base"),
        (lambda: ops.consensus([ONES], [1.0, 2.0]), "weights has 2 entries, expected a number or a list of 1"),
        (lambda: ops.consensus([ONES], float("nan")), "weights is nan, expected a finite number"),
        (lambda: ops.consensus([ONES], [None]), "weights holds a NoneType, expected numbers"),
        (lambda: ops.consensus([ONES], [ONES[0].clone().requires_grad_()]), "weights requires a gradient, which would"),
        (lambda: ops.consensus([ONES], torch.tensor([float("inf")])), r"weights is \[inf\]"),
        (lambda: ops.consensus([ONES], torch.ones(2)), r"weights is a tensor of shape \(2,\)"),
        (lambda: ops.consensus([[ONES, ONES]], [[1.0]]), r"weights\[0\] has 1 entries, expected 2"),
        (lambda: ops.consensus([ONES], density=-0.1), "density is -0.1, expected a number from 0 to 1"),
        (lambda: ops.consensus([ONES], density=0.5, sparsify="outliers", gamma=2), "gamma is 2"),
        (lambda: ops.consensus([ONES], density=0.5, sparsify="none"), "no meaning with sparsify='none'"),
        (lambda: ops.consensus([[ONES, ONES]], density=[[0.5, 0.1]]), "choose scope='tensor' or 'row'"),
        (lambda: ops.consensus([ONES], scaling_factor=float("inf")), "scaling_factor is inf"),
        (lambda: ops.consensus([ONES], scaling_factor=torch.ones(2)), r"scaling_factor is a tensor of shape \(2,\)"),
        (lambda: ops.consensus([ONES], scope="layer"), "scope='layer' is not known; the values are 'global', 'tensor'"),
        (lambda: ops.consensus([ONES], min_kept=-1), "min_kept is -1, expected an integer of at least 0"),
        (lambda: ops.consensus([ONES], sparsify="dare"), "sparsify='dare' is not known"),
        (lambda: ops.consensus([ONES], ties="first"), "ties='first'"),
        (lambda: ops.consensus([ONES], rescale="l2"), "rescale='l2'"),
        (lambda: ops.consensus([ONES], majority_sign_method="count"), "majority_sign_method='count'"),
        (lambda: ops.consensus([ONES], zero_sign="plus"), "zero_sign='plus'"),
        (lambda: ops.consensus([ONES], merge_func="avg"), "merge_func='avg'"),
        (lambda: ops.consensus([ONES], divisor="n"), "divisor='n'"),
        (lambda: ops.consensus([ONES], density=0.5, starts=3), "pass the thresholds= of the whole"),
        (lambda: ops.consensus([ONES.to(torch.complex64)]), "complex"),
        (
            lambda: ops.consensus([ONES.to(torch.complex64)], density=0.5, majority_sign_method="none"),
            "Use sparsify='none' with majority_sign_method='none'",
        ),
        (
            lambda: ops.consensus([ONES], sparsify="random", names="a", thresholds=ops.thresholds([ONES], 1.0)),
            "thresholds= trims by magnitude and sparsify='random' by chance",
        ),
        (lambda: ops.consensus([ONES, ONES], thresholds=ops.thresholds([ONES], 1.0)), "thresholds= is for 1 models"),
        (
            lambda: ops.consensus([[ONES, ONES]], thresholds=ops.thresholds([ONES], 1.0, scope="tensor")),
            "2 tensors do not fit",
        ),
        (
            lambda: ops.consensus([torch.ones(6)], thresholds=ops.thresholds([torch.ones(2, 3)], 1.0, scope="row")),
            "do not fit",
        ),
        (lambda: ops.consensus([ONES], out=ONES[:2]), r"out has shape \(2,\)"),
    ],
)
def test_bad_input_names_the_thing(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_partial_overlap_is_an_error(backend):
    memory = torch.randn(300)
    with pytest.raises(InputError, match="overlap in memory"):
        ops.consensus([memory[:100], torch.ones(100)], out=memory[50:150], backend=backend)


def test_entries_that_cannot_be_ranked_are_named(backend):
    x = t(1.0, float("nan"))
    for sparsify in ("magnitude", "outliers", "magnitude_random"):
        with pytest.raises(InputError, match=r"tensors\[1\] has NaN or infinite entries in 'layer.w'"):
            ops.consensus(
                [t(1.0, 2.0), x], density=0.6, sparsify=sparsify, ties="exact", names="layer.w", backend=backend
            )
    ops.consensus([x], density=1.0, backend=backend)


# --- gradients --------------------------------------------------------------------------------------------------------

GRADIENTS = [
    {},
    {"density": 0.5},
    {"density": 0.5, "rescale": "inverse_density", "merge_func": "sum"},
    {"merge_func": "max"},
    {"majority_sign_method": "weighted_total", "divisor": "weight"},
    {"majority_sign_method": "frequency", "zero_sign": "zero"},
    {"majority_sign_method": "none", "merge_func": "max"},
    {"majority_sign_method": "none", "merge_func": "sum", "sparsify": "none"},
    {"density": 0.5, "sparsify": "random", "rescale": "inverse_density"},
    {"density": 0.5, "sparsify": "magnitude_random", "rescale": "inverse_density", "epsilon": 0.2},
    {"density": 0.5, "sparsify": "outliers", "gamma": 0.1},
]

# Factors by norms are held fixed, so that differences do not measure their gradients.
COMPILED = [*GRADIENTS, {"density": 0.5, "rescale": "l1", "scope": "row", "ties": "exact"}]


def doubles(*shape, count):
    generator = torch.Generator().manual_seed(17)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(count)]


@pytest.mark.parametrize("options", GRADIENTS, ids=str)
@pytest.mark.parametrize("based", [False, True])
def test_gradients(based, options):
    x, y, z, base = doubles(3, 4, count=4)
    weights = torch.tensor([0.5, -1.0, 0.75], dtype=torch.float64, requires_grad=True)
    scaling = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    def function(x, y, z, weights, scaling, *base):
        base = base[0] if base else None
        return ops.consensus([x, y, z], weights, base=base, scaling_factor=scaling, names="w", **options)

    inputs = (x, y, z, weights, scaling, *([base] if based else []))
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


def test_gradients_of_lists_with_factors_of_each_tensor():
    tensors = doubles(5, count=4)
    weights = torch.tensor([[0.5, 0.2], [1.0, -0.3]], dtype=torch.float64, requires_grad=True)
    scaling = torch.tensor([1.0, 0.7], dtype=torch.float64, requires_grad=True)

    def function(a, b, c, d, weights, scaling):
        return ops.consensus([[a, b], [c, d]], weights, 0.6, scaling_factor=scaling)

    assert gradcheck(function, (*tensors, weights, scaling))


def test_gradients_where_a_vote_cancels_and_where_nothing_agrees():
    a = t(1.0, 2.0, -3.0, 0.0).requires_grad_()
    b = t(-1.0, 4.0, -3.0, 0.0).requires_grad_()
    base = torch.zeros(4, requires_grad=True)
    ops.consensus([a, b], base=base, zero_sign="positive").sum().backward()
    assert a.grad.tolist() == [1.0, 0.5, 0.5, 0.0]
    assert b.grad.tolist() == [0.0, 0.5, 0.5, 0.0]
    assert base.grad.tolist() == [0.0, 0.0, 0.0, 1.0]


def test_gradients_of_low_precision_and_of_what_is_asked_for():
    a, b = (torch.randn(100).bfloat16() for _ in range(2))
    weights = torch.tensor([1.0, 2.0], requires_grad=True)
    options = {"majority_sign_method": "none", "merge_func": "sum", "sparsify": "none"}
    ops.consensus([a, b], weights, **options).sum().backward()
    assert weights.grad.dtype == torch.float32
    assert torch.allclose(weights.grad, torch.stack([a.float().sum(), b.float().sum()]))
    assert a.grad is None


def test_gradients_of_complex_tensors():
    a, b, base = (torch.randn(3, dtype=torch.complex128, requires_grad=True) for _ in range(3))
    w = torch.tensor([0.3, 0.6], dtype=torch.float64, requires_grad=True)
    options = {"sparsify": "none", "majority_sign_method": "none", "merge_func": "sum"}
    assert gradcheck(lambda a, b, base, w: ops.consensus([a, b], w, base=base, **options), (a, b, base, w))


def test_results_and_counts_are_the_same_where_gradients_are_recorded():
    x, y = (contested(1000, torch.float32, seed=k) for k in range(2))
    plain, counts = quietly(ops.consensus, [x, y], [0.3, 0.7], 0.4, stats=True)
    recorded, again = quietly(ops.consensus, [x.clone().requires_grad_(), y], [0.3, 0.7], 0.4, stats=True)
    assert recorded.requires_grad
    assert same_bits(plain, recorded.detach())
    assert all(torch.equal(first, second) for first, second in zip(counts, again, strict=True))


def test_out_with_gradients_is_an_error():
    a = torch.ones(3, requires_grad=True)
    with pytest.raises(InputError, match="out= cannot be used"):
        ops.consensus([a, ONES], out=torch.empty(3))
    with torch.no_grad():
        assert ops.consensus([a, 3 * ONES], out=torch.empty(3)).tolist() == [2.0] * 3


@pytest.mark.parametrize("options", COMPILED, ids=str)
def test_compiled_as_one_graph_with_gradients(options):
    torch._dynamo.reset()

    def function(x, y, base, weights, scaling):
        merged = ops.consensus(
            [[x, y], [y, x]], weights, base=[base, base], scaling_factor=scaling, names=["a", "b"], **options
        )
        return merged[0] + 2 * merged[1]

    def run(function):
        inputs = [tensor.detach().clone().requires_grad_() for tensor in (*doubles(6, 10, count=3), factors, scale)]
        result = function(*inputs)
        result.square().sum().backward()
        return result.detach(), *(tensor.grad for tensor in inputs)

    factors, scale = torch.tensor([0.3, 0.7]).double(), torch.tensor(0.6).double()
    eager = run(function)
    compiled = run(torch.compile(function, fullgraph=True, backend="aot_eager"))
    assert all(same_bits(x, y) for x, y in zip(eager, compiled, strict=True))


def test_compiled_with_counts_and_out():
    torch._dynamo.reset()
    x, y, base = (contested(100, torch.float32, seed=k) for k in range(3))

    def function(x, y, base, out):
        return ops.consensus([x, y], base=base, density=0.4, ties="exact", stats=True, out=out)

    expected, counts = function(x, y, base, torch.empty(100))
    out = torch.empty(100)
    got, again = torch.compile(function, fullgraph=True, backend="aot_eager")(x, y, base, out)
    assert same_bits(got, expected)
    assert same_bits(out, expected)
    assert all(torch.equal(first, second) for first, second in zip(counts, again, strict=True))


def test_compiled_selection_refuses_what_is_not_finite():
    torch._dynamo.reset()
    function = torch.compile(lambda x: ops.consensus([x], density=0.4), fullgraph=True, backend="aot_eager")
    assert function(torch.arange(10.0)).count_nonzero() == 5
    with pytest.raises(InputError, match=r"tensors\[0\] has NaN or infinite entries in tensor 0"):
        function(torch.full((10,), float("nan")))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("options", [{}, {"density": 0.4, "sparsify": "magnitude_random", "rescale": "l1"}], ids=str)
def test_opcheck(monkeypatch, requires_grad, options):
    calls = []
    record = _library.consensus
    monkeypatch.setattr(_library, "consensus", lambda *args, **kwargs: calls.append(args) or record(*args, **kwargs))
    x, y, base = (tensor.detach() for tensor in doubles(5, 4, count=3))
    w = torch.tensor([0.3, 0.7], requires_grad=True)
    ops.consensus([x, y], w, base=base, names="w", **options)
    args = _library._flat_plan(*calls[0])
    if not requires_grad:
        args = (args[0], args[1].detach(), *args[2:])
        out = [torch.empty(5, 4)]
        torch.library.opcheck(torch.ops.isthmus.consensus_out, (*args, "auto"), {"out": out})
        torch.library.opcheck(torch.ops.isthmus.l1, (*args, "auto"))
        torch.library.opcheck(torch.ops.isthmus.consensus_backward, ([x], *args))
        ranks = torch.tensor([[[3, 5], [2, 20]]])
        torch.library.opcheck(torch.ops.isthmus.select, ([base, x, y], True, True, None, ranks, True, "auto"))
        torch.library.opcheck(torch.ops.isthmus.random_keys, (torch.ones(1, 2), "3", ["w"]))
    torch.library.opcheck(torch.ops.isthmus.consensus, (*args, "auto"))


def test_the_default_plan_is_that_of_the_reference_in_float64():
    x, y = doubles(50, count=2)
    expected = reference.consensus(
        [[x.detach()], [y.detach()]],
        reference.Plan(
            based=False, weights=torch.ones(1, 2).double(), scaling=torch.ones(1).double(), vote="total",
            zero_sign="majority", tally_rows=False, merge_func="mean", divisor="count", rescale=None, keep=None,
            drop=None, lengths=None, random=None,
        ),
    )[0][0]  # fmt: skip
    assert same_bits(ops.consensus([x.detach(), y.detach()]), expected)
