"""Exact selection of the largest magnitudes: by hand, against a sort, on adversarial data, equal on every backend."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus import _dispatch, ops, reference
from isthmus.errors import InputError, IsthmusWarning
from isthmus.reference import NO_INDEX, Groups
from isthmus.testing import FLOATS, finite

LENGTHS = [0, 1, 511, 512, 513, 4095, 4096, 4097, 70001]


def top(values, k, *, exact=True):
    """The indices of the k largest magnitudes by a sort: the first of equals, or all equals of the last."""
    order = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))
    if exact or not 0 < k < len(values):
        return set(order[:k])
    return {i for i in range(len(values)) if abs(values[i]) >= abs(values[order[k - 1]])}


def inside(cuts, group, model, values):
    value, index = cuts.value[group, model].item(), cuts.index[group, model].item()
    return {i for i, x in enumerate(values) if abs(x) > value or (abs(x) == value and i < index)}


def surviving(found, model, values, group=0):
    kept = inside(found.keep, group, model, values)
    return kept if found.drop is None else kept - inside(found.drop, group, model, values)


def fewer(count, factor, backend):
    """A count, on Triton's slow interpreter that many times smaller."""
    return max(1, count // factor) if backend == "triton" else count


def spread(ranks, backend):
    """Ranks, on Triton's slow interpreter some of them."""
    return ranks[:: len(ranks) // fewer(len(ranks), 40, backend)]


def quietly(function, *args, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IsthmusWarning)
        return function(*args, **options)


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_exact_ties_keep_the_first(backend):
    x = torch.tensor([1.0, 2.0, -2.0, 2.0, 3.0])
    found = ops.thresholds([x], 0.6, ties="exact", backend=backend)
    assert surviving(found, 0, x.tolist()) == {4, 1, 2}
    assert found.keep.value.tolist() == [[2.0]]
    assert found.keep.index.tolist() == [[3]]
    assert found.kept.tolist() == [[3]]


def test_inclusive_ties_keep_all_at_the_threshold(backend):
    x = torch.tensor([1.0, 2.0, -2.0, 2.0, 3.0])
    with pytest.warns(IsthmusWarning, match=r"4 entries of tensors\[0\] survive where 3 were asked for.*ties='exact'"):
        found = ops.thresholds([x], 0.4, backend=backend)  # the third smallest of five, one more than int(.4 5)
    assert surviving(found, 0, x.tolist()) == {1, 2, 3, 4}
    assert found.keep.index.tolist() == [[NO_INDEX]]
    assert found.kept.tolist() == [[4]]


@pytest.mark.parametrize(
    ("options", "kept"),
    [({}, 3), ({"ties": "exact"}, 2), ({"ties": "exact", "min_kept": 4}, 4), ({"min_kept": 5}, 5)],
)
def test_counts_for_ten_entries_at_a_quarter(backend, options, kept):
    x = torch.tensor([5.0, -1, 4, 2, -9, 3, 8, 7, -6, 10])
    found = ops.thresholds([x], 0.25, backend=backend, **options)
    assert surviving(found, 0, x.tolist()) == top(x.tolist(), kept)
    assert found.kept.tolist() == [[kept]]


@pytest.mark.parametrize("ties", ["inclusive", "exact"])
def test_densities_zero_and_one_do_not_look_at_the_data(backend, ties):
    nan = torch.full((7,), float("nan"))
    for scope in ("global", "tensor", "row"):
        options = {"scope": scope, "ties": ties, "min_kept": 3, "backend": backend}
        nothing, everything = ops.thresholds([nan], densities=[0.0, 1.0], **options)
        assert nothing.keep.value.tolist() == [[float("inf")]]
        assert nothing.keep.index.tolist() == [[0]]
        assert nothing.kept.tolist() == [[0]]
        assert everything.keep.value.tolist() == [[0.0]]
        assert everything.keep.index.tolist() == [[NO_INDEX]]
        assert everything.kept.tolist() == [[7]]
        dropped = ops.thresholds([nan], 1.0, gamma=0.5, **options)
        assert dropped.kept.tolist() == [[7]]


def test_scopes(backend):
    ones, hundreds = torch.ones(2, 2), torch.full((2, 2), 100.0)
    tensors = [[ones, hundreds]]
    both = ops.thresholds(tensors, 0.5, scope="tensor", ties="exact", backend=backend)
    assert both.keep.value.tolist() == [[1.0], [100.0]]
    assert both.keep.index.tolist() == [[2], [2]]
    whole = ops.thresholds(tensors, 0.5, ties="exact", backend=backend)
    assert whole.keep.value.tolist() == [[100.0]]
    assert whole.keep.index.tolist() == [[NO_INDEX]]  # all of the hundreds
    assert ops.thresholds(tensors, 0.4, ties="exact", backend=backend).keep.index.tolist() == [[7]]  # in the model
    rows = ops.thresholds(tensors, 0.5, scope="row", ties="exact", backend=backend)
    assert rows.keep.value.tolist() == [[1.0], [1.0], [100.0], [100.0]]
    assert rows.keep.index.tolist() == [[1]] * 4
    assert rows.lengths == [2, 2]


def test_rows_of_vectors_and_scalars(backend):
    x = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor(4.0), torch.empty(0, 5), torch.empty(3, 0), torch.ones(2, 1, 2)]
    found = ops.thresholds([x], 0.5, scope="row", ties="exact", backend=backend)
    assert found.lengths == [3, 1, 5, 1, 2]
    assert found.kept.tolist() == [[1], [0], [1], [1]]


def test_rows_of_nothing_and_no_densities(backend):
    found = ops.thresholds([[torch.empty(0, 5), torch.empty(3, 0)]], 0.5, scope="row", backend=backend)
    assert found.kept.shape == (0, 1)
    assert ops.consensus([torch.empty(0, 5)], density=0.5, scope="row", backend=backend).shape == (0, 5)
    assert ops.thresholds([torch.ones(3)], densities=[], backend=backend) == []


def test_densities_of_each_model_and_tensor(backend):
    x, y = torch.arange(1.0, 11.0), torch.arange(1.0, 21.0)
    found = ops.thresholds([[x, y], [x, y]], [[0.5, 0.1], 0.2], scope="tensor", ties="exact", backend=backend)
    assert found.kept.tolist() == [[5, 2], [2, 4]]
    found = ops.thresholds([x, x], torch.tensor([0.5, 0.1]), ties="exact", backend=backend)
    assert found.kept.tolist() == [[5, 1]]


def test_outliers(backend):
    x = torch.tensor([5.0, -1, 4, 2, -9, 3, 8, 7, -6, 10])
    exact = ops.thresholds([x], 0.3, gamma=0.2, ties="exact", backend=backend)
    assert surviving(exact, 0, x.tolist()) == {6, 7, 8}  # 10 and 9 are dropped, then 8 7 6
    assert exact.kept.tolist() == [[3]]
    inclusive = ops.thresholds([x], 0.3, gamma=0.2, backend=backend)
    assert surviving(inclusive, 0, x.tolist()) == {0, 6, 7, 8}
    fewer = ops.thresholds([x], 0.9, gamma=0.5, ties="exact", backend=backend)
    assert surviving(fewer, 0, x.tolist()) == set(range(9))  # only one can be dropped
    none = ops.thresholds([x], 0.5, gamma=0.0, ties="exact", backend=backend)
    assert surviving(none, 0, x.tolist()) == top(x.tolist(), 5)
    assert ops.thresholds([x], 0.0, gamma=0.5, backend=backend).kept.tolist() == [[0]]


def test_equal_outliers(backend):
    x = torch.tensor([2.0, 2.0, 1.0, 2.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5])
    exact = ops.thresholds([x], 0.3, gamma=0.2, ties="exact", backend=backend)
    assert surviving(exact, 0, x.tolist()) == {3, 2, 4}
    with pytest.warns(IsthmusWarning):
        inclusive = ops.thresholds([x], 0.3, gamma=0.2, backend=backend)
    assert surviving(inclusive, 0, x.tolist()) == {0, 1, 3, 2, 4, 5, 6}  # from 1 to the third largest, 2
    assert inclusive.kept.tolist() == [[7]]


def test_a_warning_comes_only_where_it_matters(backend):
    distinct = torch.arange(1.0, 1001.0)
    ops.thresholds([distinct], 0.2, backend=backend)
    zeros = torch.zeros(1000)
    zeros[:10] = 1.0 + torch.arange(10)
    found = ops.thresholds([zeros], 0.2, backend=backend)  # 1000 survive, of which 990 zeros
    assert found.kept.tolist() == [[1000]]
    few = torch.cat([distinct, distinct[799:801]])  # under 1 % more
    ops.thresholds([few], 0.2, backend=backend)
    rounded = (torch.arange(1.0, 1001.0) / 10).round()
    with pytest.warns(IsthmusWarning, match=r"entries of tensors\[1\]"):
        ops.thresholds([distinct, rounded], 0.2, backend=backend)
    ops.thresholds([distinct, rounded], 0.2, ties="exact", backend=backend)


def test_task_vectors_are_rounded_as_they_are_merged(backend):
    # In float32 1 + 2^-12 loses what bfloat16 has no bits for; the differences are 2^-12 and 2^-11.
    base = torch.ones(2, dtype=torch.bfloat16)
    x = torch.tensor([1 + 2**-12, 1 - 2**-11])
    found = ops.thresholds([x], 0.5, base=base, ties="exact", backend=backend)
    assert found.keep.value.tolist() == [[2.0**-11]]
    wide = ops.thresholds([x, x.double() + 2.0**-40], 0.5, base=base, ties="exact", backend=backend)
    assert wide.keep.value.tolist() == [[2.0**-11, 2.0**-11 - 2.0**-40]]


# --- against a sort ---------------------------------------------------------------------------------------------------


CASE = (
    st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.5, 1e-45, 3e38]), max_size=30),
    st.floats(0, 1),
    st.floats(0, 1),
    st.booleans(),
    st.integers(0, 4),
)


@given(*CASE)
@settings(deadline=None, max_examples=200)
def test_property_survivors_are_those_of_a_sort(values, density, gamma, exact, min_kept):
    for name in ("reference", "cpp"):
        check_survivors(name, values, density, gamma, exact, min_kept)


@given(*CASE)
@settings(deadline=None, max_examples=25)
def test_property_survivors_on_a_gpu_are_those_of_a_sort(values, density, gamma, exact, min_kept):
    pytest.importorskip("triton")
    check_survivors("triton", values, density, gamma, exact, min_kept)


def check_survivors(backend, values, density, gamma, exact, min_kept):
    n = len(values)
    x = torch.tensor(values)
    values = x.tolist()  # as float32
    ties = "exact" if exact else "inclusive"
    options = {"ties": ties, "min_kept": min_kept, "backend": backend}
    k = 0 if density == 0 else max(min_kept, int(density * n) + (not exact)) if density < 1 else n
    found = quietly(ops.thresholds, [x], density, **options)
    expected = top(values, min(k, n), exact=exact)
    assert surviving(found, 0, values) == expected
    assert found.kept.item() == len(expected)
    trimmed = quietly(ops.thresholds, [x], density, gamma=gamma, **options)
    assert trimmed.kept.item() == len(surviving(trimmed, 0, values))
    if exact and 0 < density < 1:
        dropped = min(int(gamma * n), max(0, n - k))
        assert surviving(trimmed, 0, values) == top(values, min(dropped + k, n)) - top(values, dropped)


def adversarial(name, numel, dtype):
    generator = torch.Generator().manual_seed(5)
    info = torch.finfo(dtype)
    normal = torch.randn(numel, generator=generator, dtype=torch.float64)
    match name:
        case "all equal":
            x = torch.full((numel,), -0.37, dtype=torch.float64)
        case "two values":
            x = torch.where(normal > 1.3, 1.0, -0.5)
        case "ascending":
            x = torch.arange(numel, dtype=torch.float64)
        case "descending":
            x = -torch.arange(numel, 0, -1, dtype=torch.float64)
        case "many zeros":
            x = torch.where(normal.abs() > 1.6, normal, 0.0 * normal)
        case "a sixth at the threshold":
            x = torch.where(torch.arange(numel) % 6 == 1, torch.tensor(1.28).double(), normal)
        case "subnormals":
            x = (normal * 100).round() * info.smallest_normal * info.eps
        case "one outlier":
            x = normal * 1e-4
            x[numel // 3 : numel // 3 + 1] = info.max / 4
        case "every tenth one":
            x = torch.where(torch.arange(numel) % 10 == 0, 1.0, 0.5).double()
        case "awkward":
            return finite(numel, dtype, seed=11)
    return x.double().clamp(info.min, info.max).to(dtype)


ADVERSARIAL = [
    "all equal", "two values", "ascending", "descending", "many zeros", "a sixth at the threshold", "subnormals",
    "one outlier", "every tenth one", "awkward",
]  # fmt: skip


def same(first, second):
    assert first.nonfinite is second.nonfinite is None
    assert torch.equal(first.above, second.above)
    assert torch.equal(first.equal, second.equal)
    for mine, theirs in zip(first.cuts, second.cuts, strict=True):
        assert torch.equal(mine.value, theirs.value)
        assert torch.equal(mine.index, theirs.index)


def compare(columns, *, based, groups, ranks, exact, backend):
    options = {"based": based, "groups": groups, "ranks": ranks, "exact": exact}
    got = _dispatch.select(columns, backend=backend, **options)
    same(got, reference.select(columns, **options))
    return got


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_data(backend, name, dtype):
    n = 30_011
    x = adversarial(name, n, dtype)
    ranks = torch.tensor([[[1, 2, n // 10, n // 5, n // 2, n - 1, n]]])
    options = {"based": False, "groups": Groups(True, None), "backend": backend}
    compare([[x]], ranks=ranks[..., : fewer(7, 4, backend)], exact=False, **options)
    got = compare([[x]], ranks=ranks, exact=True, **options)
    magnitudes = x.double().abs().sort(descending=True).values
    for place, k in enumerate(ranks.flatten().tolist()[:-1]):
        assert got.cuts[place].value.item() == magnitudes[k - 1].item()
        assert got.above[0, 0, place].item() < k <= (got.above + got.equal)[0, 0, place].item()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_lengths_and_threads(backend, threads, dtype, length):
    base, x, y = (finite(length, dtype, seed=k) for k in range(3))
    ranks = torch.tensor([[[length // 5, length // 2 + 1], [1, length - 1]]]).clamp(min=0)
    for exact in (True, False):
        options = {"ranks": ranks, "exact": exact, "backend": backend}
        compare([[base], [x], [y]], based=True, groups=Groups(True, None), **options)
        compare([[x], [y]], based=False, groups=Groups(False, None), **options)


@pytest.mark.parametrize("count", [*range(1, 11), 300])
def test_numbers_of_models(backend, count):
    count = fewer(count, 20, backend)
    base = finite(1037, torch.float32, seed=99)
    models = [[finite(1037, torch.float32, seed=k).clamp(-9, 9).round(decimals=1)] for k in range(count)]
    ranks = torch.tensor([[[1 + (37 * model) % 1100] for model in range(count)]])
    compare([[base], *models], based=True, groups=Groups(True, None), ranks=ranks, exact=True, backend=backend)


def test_mixed_dtypes_and_rows_of_many_lengths(backend, threads):
    shapes = [(3, 7), (1,), (), (0, 4), (2, 3, 5), (513,), (17, 100)]
    columns = [
        [
            finite(torch.Size(shape).numel(), FLOATS[(row + k) % 4], seed=10 * row + k).view(shape)
            for row, shape in enumerate(shapes)
        ]
        for k in range(4)
    ]
    columns[2][6] = columns[2][6].t().contiguous().t()  # other strides
    lengths = [7, 1, 1, 4, 5, 513, 100]
    sizes = [x.numel() for x in columns[0]]
    pieces = sum(n // length for n, length in zip(sizes, lengths, strict=True))
    for groups, count in ((Groups(True, None), 1), (Groups(False, None), 7), (Groups(False, lengths), pieces)):
        generator = torch.Generator().manual_seed(count)
        options = [(True, True), (False, False), (True, False), (False, True)]
        for exact, based in options[: fewer(4, 2, backend)]:
            ranks = torch.randint(0, 9, (count, 4 - based, 3), generator=generator)
            compare(columns, based=based, groups=groups, ranks=ranks, exact=exact, backend=backend)


def test_several_ranks_at_once_equal_one_by_one(backend):
    x = adversarial("a sixth at the threshold", 5003, torch.bfloat16)
    densities = [0.1, 0.15, 0.2, 0.3]
    together = ops.thresholds([x], densities=densities, ties="exact", backend=backend)
    for density, found in zip(densities, together, strict=True):
        alone = ops.thresholds([x], density, ties="exact", backend=backend)
        assert found.keep.value.equal(alone.keep.value)
        assert found.keep.index.equal(alone.keep.index)
        assert found.kept.item() == int(density * 5003)


def test_seventeen_million_entries(backend):
    n = fewer(17_000_000, 10, backend)
    x = torch.full((n,), 0.5, dtype=torch.bfloat16)
    x[::10] = 1
    found = ops.thresholds([x], 0.1, ties="exact", backend=backend)
    assert found.kept.item() == n // 10
    assert found.keep.value.item() == 1
    y = ops.consensus([x], density=0.1, thresholds=found, backend=backend)
    assert y.count_nonzero().item() == n // 10


# --- where the sample of a compiled backend misleads, or memory for its brackets is short -----------------------------


def by_sorting(x, ranks, *, exact):
    """What selection finds for each rank from 1 to n - 1: value, index, how many are above and how many equal."""
    order = x.double().abs().argsort(descending=True, stable=True)
    falling = -x.double().abs()[order]
    value = falling[ranks - 1]
    above, through = (torch.searchsorted(falling, value, right=right) for right in (False, True))
    last = torch.where(through > ranks, order[ranks - 1] + 1, NO_INDEX)
    return -value, last if exact else torch.full_like(last, NO_INDEX), above, through - above


def check_by_sorting(models, ranks, backend, *, exact=(True, False)):
    ranks = torch.as_tensor(ranks).expand(1, len(models), -1)
    for each in exact:
        columns = [[x] for x in models]
        got = _dispatch.select(
            columns, based=False, groups=Groups(True, None), ranks=ranks, exact=each, backend=backend
        )
        assert got.nonfinite is None
        for k, x in enumerate(models):
            value, index, above, equal = by_sorting(x, ranks[0, k], exact=each)
            assert torch.equal(torch.stack([cut.value[0, k] for cut in got.cuts]), value)
            assert torch.equal(torch.stack([cut.index[0, k] for cut in got.cuts]), index)
            assert torch.equal(got.above[0, k], above)
            assert torch.equal(got.equal[0, k], equal)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_data_large_enough_to_be_sampled(compiled, name, dtype):
    n = fewer(300_007, 3, compiled)
    x = adversarial(name, n, dtype)
    ranks, exact = [1, 2, n // 100, n // 5, n // 2, 99 * n // 100, n - 1], (True, False)
    if compiled == "triton":  # with exact=False it does less, not more
        ranks, exact = ranks[3:6:2], (True,)
    check_by_sorting([x], ranks, compiled, exact=exact)


@pytest.mark.parametrize("period", [64, 128, 256, 512, 2048])
@pytest.mark.parametrize("share", [2, 4])
def test_blocks_that_fool_a_sample_of_runs(compiled, period, share):
    # The entries of a run are all large or all small, so that a sample is worth far less than its size: at some of the
    # phases, about every tenth, the rank lies above or below where the sample has it.
    n = 100_003
    noise = torch.rand(n, generator=torch.Generator().manual_seed(3)).mul(4096).round().div(4096)
    place = torch.arange(n)
    for phase in range(0, period, period // fewer(16, 16, compiled)):
        x = torch.where((place + phase) % period < period // share, 2 + noise, noise)
        k = int((x >= 2).sum())
        check_by_sorting([x], [k - 5, k, k + 5], compiled, exact=(True,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sampled", ["large", "small"])
def test_data_whose_sampled_entries_are_unlike_all_others(monkeypatch, dtype, sampled):
    # Where a GPU samples depends on the number of entries alone: they are found by looking on, then all brackets miss.
    pytest.importorskip("triton")
    from isthmus._gpu import select

    places, brackets = [], []

    def note_places(*args):
        places.append(found(*args))
        return places[-1]

    def note_brackets(*args):
        brackets.append(guess(*args))
        return brackets[-1]

    found, guess = select._sampled, select._brackets
    monkeypatch.setattr(select, "_sampled", note_places)
    monkeypatch.setattr(select, "_brackets", note_brackets)
    n = 40_013
    x = torch.randint(1, 200, (n,), generator=torch.Generator().manual_seed(4)).to(dtype)
    ranks = [2 * n // 5, n // 2, 3 * n // 5]
    check_by_sorting([x], ranks, "triton", exact=(True,))
    (_, begins, lengths), values = places[0], x.clone()
    for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True):
        values[begin : begin + length] *= 1024 if sampled == "large" else 1 / 1024
    check_by_sorting([values], ranks, "triton")
    low, high = select._values(brackets[-1], torch.int64 if dtype == torch.float64 else torch.int32)
    answers = by_sorting(values, torch.tensor(ranks), exact=True)[0]
    assert bool((answers < low).all() if sampled == "large" else (answers > high).all())


@pytest.mark.parametrize(("dtype", "based"), [(torch.float32, True), (torch.float64, False), (torch.bfloat16, True)])
def test_little_at_once_on_a_gpu(monkeypatch, dtype, based):
    # So that groups, models and searches come in many parts, and brackets take several sweeps to close.
    pytest.importorskip("triton")
    from isthmus._gpu import select

    monkeypatch.setattr(select, "AT_ONCE", 1 << 11)
    shapes = [(7, 300), (17_001,), (3,), (2, 16_500)]
    columns = [
        [finite(torch.Size(shape).numel(), dtype, seed=9 * k + row).view(shape) for row, shape in enumerate(shapes)]
        for k in range(3)
    ]
    lengths, counts = [300, 17_001, 3, 16_500], [7, 1, 1, 2]
    of_group = torch.tensor([n for n, count in zip(lengths, counts, strict=True) for _ in range(count)])
    places = torch.tensor([0.5, 0.2])[:, None] * torch.tensor([1, 0.3, 0.9])[: 3 - based]
    ranks = (of_group[:, None, None] * places.t()).long() + 1
    for groups, k in ((Groups(False, lengths), ranks), (Groups(True, None), 40 * ranks[8:9])):
        compare(columns, based=based, groups=groups, ranks=k, exact=True, backend="triton")


def neighbours(numel, dtype):
    """Magnitudes within few units in the last place, of which many are equal."""
    steps = torch.randint(0, 1 << 18, (numel,), generator=torch.Generator().manual_seed(1)).double()
    return (1 + (steps * torch.finfo(dtype).eps).clamp(max=0.9)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("make", ["neighbours", "awkward", "many zeros", "a sixth at the threshold"])
def test_more_ranks_than_memory_for_their_brackets(compiled, make, dtype):
    # Each of 400 ranks may keep 20 000 candidates, fewer than there are: all are found by counting in finer ranges.
    n = 30_011
    x = neighbours(n, dtype) if make == "neighbours" else adversarial(make, n, dtype)
    check_by_sorting([x], spread(torch.arange(1, n, 75)[:400], compiled), compiled)


def test_more_ranks_of_several_models_than_memory_for_their_brackets(compiled):
    n = 30_011
    models = [neighbours(n, torch.float32), *(finite(n, torch.float32, seed=k) for k in range(2))]
    check_by_sorting(models, spread(torch.arange(7, n, 240), compiled), compiled)


def test_sorted_data_whose_candidates_all_lie_with_one_thread(compiled, threads):
    n = 300_007
    x = torch.arange(n).div(3).floor()  # threes of equals, exact as float32
    check_by_sorting([x], spread(torch.arange(1, n, 751)[:400], compiled), compiled)


def test_long_and_short_rows(compiled, threads):
    shapes = [(3, 100_003), (1000, 7), (5, 0), (70_001,), (2, 2, 4096)]
    columns = [
        [finite(torch.Size(shape).numel(), torch.float32, seed=10 * k + len(shape)).view(shape) for shape in shapes]
        for k in range(3)
    ]
    lengths = [100_003, 7, 1, 70_001, 4096]
    counts = [3, 1000, 0, 1, 4]
    ranks = torch.cat(
        [torch.tensor([[n // 5, n // 2 + 1]] * 2).expand(count, 2, 2) for n, count in zip(lengths, counts, strict=True)]
    )
    for exact in (True, False):
        compare(columns, based=True, groups=Groups(False, lengths), ranks=ranks, exact=exact, backend=compiled)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_entries_that_cannot_be_ranked_are_named(backend, bad):
    x = [torch.ones(600), torch.ones(5000)]
    y = [torch.ones(600), torch.ones(5000)]
    y[1][4321] = bad
    for scope in ("global", "tensor"):
        for base in (None, [torch.zeros(600), torch.zeros(5000)]):
            with pytest.raises(InputError, match=r"tensors\[1\] has NaN or infinite entries in 'layer.bias'"):
                ops.thresholds(
                    [x, y], 0.5, base=base, scope=scope, names=["layer.weight", "layer.bias"], backend=backend
                )
    with pytest.raises(InputError, match=r"^tensors\[0\] has NaN or infinite entries in tensor 1"):
        ops.thresholds([y], 0.5, backend=backend)
    ops.thresholds([x, y], [0.5, 1.0], ties="exact", backend=backend)  # the second model's are not looked at


def test_the_first_that_cannot_be_ranked_is_named(backend, threads):
    bad = float("nan")
    x, y = [torch.ones(9), torch.ones(70_000, 2)], [torch.ones(9), torch.ones(70_000, 2)]
    y[1][41, 0] = y[1][60_000, 1] = x[1][42, 1] = x[1][44, 0] = bad
    for scope in ("global", "tensor", "row"):  # the first tensor, and of models the first
        with pytest.raises(InputError, match=r"tensors\[0\] has .* in tensor 1"):
            ops.thresholds([x, y], 0.5, scope=scope, ties="exact", backend=backend)
    y[0][8] = bad
    for scope in ("global", "tensor", "row"):
        with pytest.raises(InputError, match=r"tensors\[1\] has .* in tensor 0"):
            ops.thresholds([x, y], 0.5, scope=scope, ties="exact", backend=backend)


def test_a_difference_that_overflows_cannot_be_ranked(backend):
    big = torch.tensor([3e38, 1.0])
    with pytest.raises(InputError, match=r"the task vector of tensors\[0\] has"):
        ops.thresholds([-big], 0.5, base=big, ties="exact", backend=backend)


ONES = torch.ones(4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.thresholds([], 0.5), "thresholds got no tensors"),
        (lambda: ops.thresholds([[], []], 0.5), "empty lists"),
        (lambda: ops.thresholds([ONES]), "give either density= or densities="),
        (lambda: ops.thresholds([ONES], 0.5, densities=[0.5]), "give either density= or densities="),
        (lambda: ops.thresholds([ONES], 1.01), "density is 1.01, expected a number from 0 to 1"),
        (lambda: ops.thresholds([ONES], float("nan")), "density is nan"),
        (lambda: ops.thresholds([ONES], [0.5, 0.5]), "density has 2 entries, expected a number or a list of 1"),
        (lambda: ops.thresholds([ONES], "half"), "density is"),
        (lambda: ops.thresholds([ONES], 0.5, gamma=-0.1), "gamma is -0.1"),
        (lambda: ops.thresholds([ONES], 0.5, scope="layer"), "scope='layer' is not known; the values are 'global'"),
        (lambda: ops.thresholds([ONES], 0.5, ties="all"), "ties='all' is not known"),
        (lambda: ops.thresholds([ONES], 0.5, min_kept=-1), "min_kept is -1, expected an integer of at least 0"),
        (lambda: ops.thresholds([ONES], 0.5, min_kept=2.5), "min_kept is 2.5"),
        (lambda: ops.thresholds([ONES], ONES[0].clone().requires_grad_()), "density requires a gradient"),
        (lambda: ops.thresholds([[ONES, ONES]], [[0.5, 0.4]]), "scope='tensor' or 'row'"),
        (lambda: ops.thresholds([[ONES, ONES]], 0.5, gamma=[[0.5, 0.4]]), "gamma differs from tensor to tensor"),
        (lambda: ops.thresholds([[ONES, ONES]], [[0.5]], scope="tensor"), r"density\[0\] has 1 entries, expected 2"),
        (lambda: ops.thresholds([ONES.to(torch.complex64)], 0.5), "tensor 0 is complex"),
        (lambda: ops.thresholds([ONES], 0.5, base=torch.ones(3)), r"tensors\[0\] has shape \(4,\), expected \(3,\)"),
        (lambda: ops.thresholds([[ONES]], 0.5, names=["a", "b"]), "names has 2 entries, expected 1"),
    ],
)
def test_bad_input_names_the_thing(call, message):
    with pytest.raises(InputError, match=message):
        call()
