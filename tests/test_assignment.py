"""Linear assignment: against SciPy and brute force, the same on every backend, certified, and its errors."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment as scipy_assignment

import isthmus
from isthmus import _native
from isthmus.errors import InputError
from isthmus.ops import Certificate, linear_sum_assignment

pytestmark = pytest.mark.cpu_only

SETS = [name for name, runs in (_native.cpu().instruction_sets() if _native.load_cpu()[0] else []) if runs]


def normal(*shape, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def similarity(kind, n, seed=0):
    """Float32 matrices of the kinds that matching meets, with more rows than a list of near columns."""
    a, b, (scale_a, scale_b) = normal(n, 40, seed=seed), normal(n, 40, seed=seed + 1), normal(2, n, 1, seed=seed + 2)
    if kind == "independent":
        result = normal(n, n, seed=seed)
    elif kind == "norms":
        result = (a * np.exp(scale_a)) @ (b * np.exp(scale_b)).T
    elif kind == "relu":
        result = np.maximum(a, 0) @ np.maximum(b, 0).T
    elif kind == "planted":
        result = a @ (a[np.random.default_rng(seed).permutation(n)] + 0.1 * b).T
    elif kind == "integers":
        result = np.random.default_rng(seed).integers(0, 9, (n, n))
    elif kind == "sums":  # every assignment is optimal
        result = np.round(scale_a * 50) + np.round(scale_b * 50).T
    else:  # every row wants the same columns, in the same order
        result = np.outer(np.arange(n), np.arange(n))
    return result.astype(np.float32)


KINDS = ["independent", "norms", "relu", "planted", "integers", "sums", "products"]


def total(matrix, row_ind, col_ind):
    return np.asarray(matrix, dtype=np.float64)[np.asarray(row_ind), np.asarray(col_ind)].sum()


def assert_optimal(matrix, row_ind, col_ind, maximize):
    """A pairing of the right size whose total is SciPy's."""
    matrix = np.asarray(matrix)
    expected = scipy_assignment(matrix.astype(np.float64), maximize)
    assert all(a < b for a, b in itertools.pairwise(map(int, row_ind)))
    assert len(row_ind) == len(set(map(int, col_ind))) == min(matrix.shape)
    scale = np.abs(np.where(np.isfinite(matrix), matrix, 0)).astype(np.float64).sum(axis=1).max(initial=0)
    assert abs(total(matrix, row_ind, col_ind) - total(matrix, *expected)) <= 1e-12 * scale


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_scipys_example(backend):
    cost = np.array([[4, 1, 3], [2, 0, 5], [3, 2, 2]])
    row_ind, col_ind = linear_sum_assignment(cost, backend=backend)
    assert row_ind.tolist() == [0, 1, 2]
    assert col_ind.tolist() == [1, 0, 2]
    assert row_ind.dtype == col_ind.dtype == np.int64
    assert linear_sum_assignment(cost, maximize=True, backend=backend)[1].tolist() == [0, 2, 1]
    assert linear_sum_assignment(cost, True, backend=backend)[1].tolist() == [0, 2, 1]


def test_it_is_exported_at_the_top():
    assert isthmus.linear_sum_assignment is linear_sum_assignment


@pytest.mark.parametrize("n", [1, 2, 7, 64, 65, 300])
@pytest.mark.parametrize("value", [0.0, -2.5, 1e30])
def test_equal_entries_give_the_identity(backend, n, value):
    for maximize in (False, True):
        rows, cols = linear_sum_assignment(np.full((n, n), value), maximize, backend=backend)
        assert cols.tolist() == rows.tolist() == list(range(n))


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0)])
def test_empty_matrices_give_nothing(backend, shape):
    row_ind, col_ind, proof = linear_sum_assignment(np.empty(shape), certificate=True, backend=backend)
    assert row_ind.shape == col_ind.shape == (0,)
    assert row_ind.dtype == col_ind.dtype == np.int64
    assert (proof.primal, proof.dual, proof.gap) == (0, 0, 0)
    assert proof.u.shape + proof.v.shape == shape


def test_rectangles_leave_rows_or_columns_over(backend):
    cost = np.array([[5.0, 1.0, 9.0], [8.0, 2.0, 3.0]])
    assert [x.tolist() for x in linear_sum_assignment(cost, backend=backend)] == [[0, 1], [1, 2]]
    assert [x.tolist() for x in linear_sum_assignment(cost.T, backend=backend)] == [[1, 2], [0, 1]]


def test_infinity_forbids_a_pair(backend):
    inf = np.inf
    cost = np.array([[1.0, inf, inf], [0.0, 5.0, inf], [0.0, 1.0, 9.0]])
    assert linear_sum_assignment(cost, backend=backend)[1].tolist() == [0, 1, 2]
    assert linear_sum_assignment(-cost, True, backend=backend)[1].tolist() == [0, 1, 2]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert linear_sum_assignment(torch.tensor(cost, dtype=dtype), backend=backend)[1].tolist() == [0, 1, 2]


# --- against brute force and SciPy ------------------------------------------------------------------------------------

SMALL = st.integers(1, 6).flatmap(
    lambda rows: st.integers(1, 6).flatmap(
        lambda cols: st.lists(
            st.lists(st.sampled_from([-3, -1, 0, 0, 1, 2, 5, 0.5, None]), min_size=cols, max_size=cols),
            min_size=rows,
            max_size=rows,
        )
    )
)


def best_total(matrix, maximize):
    """The best finite total over all pairings, or None."""
    matrix = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    rows = range(matrix.shape[0])
    totals = [sum(matrix[i, p[i]] for i in rows) for p in itertools.permutations(range(matrix.shape[1]), len(rows))]
    finite = [value for value in totals if np.isfinite(value)]
    return (max if maximize else min)(finite) if finite else None


def check_small(entries, maximize, single):
    """Brute force, SciPy, the reference and every instruction set agree on one matrix; None is a forbidden pair."""
    forbidden = -np.inf if maximize else np.inf
    matrix = np.array([[forbidden if x is None else x for x in row] for row in entries])
    matrix = matrix.astype(np.float32 if single else np.float64)
    best = best_total(matrix, maximize)
    if best is None:
        for backend in ["reference", "cpp"] if SETS else ["reference"]:
            with pytest.raises(InputError, match="no pairing"):
                linear_sum_assignment(matrix, maximize, backend=backend)
        return
    row_ind, col_ind, proof = linear_sum_assignment(matrix, maximize, certificate=True, backend="reference")
    assert total(matrix, row_ind, col_ind) == best == proof.primal == proof.dual
    assert_optimal(matrix, row_ind, col_ind, maximize)
    for name in SETS:
        before = _native.cpu().instruction_set()
        _native.cpu().use_instruction_set(name)
        found = linear_sum_assignment(matrix, maximize, certificate=True, backend="cpp")
        _native.cpu().use_instruction_set(before)
        assert np.array_equal(found[0], row_ind)
        assert np.array_equal(found[1], col_ind)
        assert np.array_equal(found[2].u, proof.u)
        assert np.array_equal(found[2].v, proof.v)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SMALL, st.booleans(), st.booleans())
@example([[None]], False, False)
@example([[0, None], [0, None]], True, True)
def test_small_matrices(entries, maximize, single):
    check_small(entries, maximize, single)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SMALL, st.booleans(), st.booleans())
def test_many_small_matrices(entries, maximize, single):
    check_small(entries, maximize, single)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [8, 63, 64, 65, 150, 256, 257, 330])
def test_similarities(compiled, kind, n):
    matrix = similarity(kind, n)
    for maximize in (False, True):
        expected = linear_sum_assignment(matrix, maximize, backend="reference")
        row_ind, col_ind = linear_sum_assignment(matrix, maximize, backend=compiled)
        assert np.array_equal(col_ind, expected[1])  # of several optima the same
        assert_optimal(matrix, row_ind, col_ind, maximize)


@pytest.mark.parametrize("shape", [(1, 200), (40, 41), (40, 300), (300, 40), (129, 130)])
@pytest.mark.parametrize("levels", [0, 5])
def test_rectangles(compiled, shape, levels):
    matrix = normal(*shape)
    matrix = np.round(matrix * levels) if levels else matrix
    for maximize in (False, True):
        expected = linear_sum_assignment(matrix, maximize, backend="reference")
        row_ind, col_ind = linear_sum_assignment(matrix, maximize, backend=compiled)
        assert np.array_equal(row_ind, expected[0])
        assert np.array_equal(col_ind, expected[1])
        assert_optimal(matrix, row_ind, col_ind, maximize)


@pytest.mark.parametrize("n", [200, 300])
@pytest.mark.parametrize("share", [0.5, 0.98, 0.992])
def test_sparse_matrices_with_ties(compiled, share, n):
    generator = np.random.default_rng(3)
    cost = generator.integers(0, 5, (n, n)).astype(np.float64)
    cost[generator.random(cost.shape) < share] = np.inf
    cost[np.arange(n), generator.permutation(n)] = 4
    row_ind, col_ind = linear_sum_assignment(cost, backend=compiled)
    assert np.array_equal(col_ind, linear_sum_assignment(cost, backend="reference")[1])
    assert_optimal(cost, row_ind, col_ind, False)


@pytest.mark.parametrize("kind", KINDS)
def test_larger_than_the_reference_takes(kind):
    matrix = similarity(kind, 700)
    assert_optimal(matrix, *linear_sum_assignment(matrix, maximize=True), True)


# --- certificates and warm starts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("shape", [(30, 30), (70, 100), (100, 70), (300, 300), (270, 300)])
def test_certificates_prove_the_optimum(backend, shape, maximize):
    matrix = normal(*shape) * np.exp(normal(shape[0], 1, seed=1))
    row_ind, col_ind, proof = linear_sum_assignment(matrix, maximize, certificate=True, backend=backend)
    sign = -1 if maximize else 1
    scale = np.abs(matrix).max() * min(shape)
    slack = sign * (matrix - proof.u[:, None] - proof.v)
    assert slack.min() >= -1e-13 * scale  # feasible
    assert np.abs(slack[row_ind, col_ind]).max() <= 1e-13 * scale  # and tight where paired
    over = np.delete(proof.u, row_ind) if shape[0] > shape[1] else np.delete(proof.v, col_ind)
    assert not over.any()
    assert abs(proof.primal - total(matrix, row_ind, col_ind)) <= 1e-13 * scale
    assert proof.dual == pytest.approx(proof.u.sum() + proof.v.sum(), abs=1e-13 * scale)
    assert proof.gap == pytest.approx(sign * (proof.primal - proof.dual), abs=1e-13 * scale)
    assert abs(proof.gap) <= 1e-13 * scale


def test_a_certificate_is_of_the_arrays_kind():
    proof = linear_sum_assignment(torch.randn(4, 4), certificate=True)[2]
    assert proof.u.dtype == proof.v.dtype == torch.float64
    assert isinstance(linear_sum_assignment(np.eye(3), certificate=True)[2].u, np.ndarray)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "maximize"), [(130, False), (130, True), (270, True)])
def test_warm_starts_find_an_optimum_of_the_new_matrix(backend, kind, n, maximize):
    first = similarity(kind, n)
    second = first + np.float32(0.05) * similarity("independent", n, seed=9)
    start = linear_sum_assignment(first, maximize, certificate=True, backend=backend)[2]
    for duals in (start, (start.u, start.v), (torch.from_numpy(start.u), torch.from_numpy(start.v))):
        row_ind, col_ind, proof = linear_sum_assignment(
            second, maximize, duals=duals, certificate=True, backend=backend
        )
        assert_optimal(second, row_ind, col_ind, maximize)
        assert abs(proof.gap) <= 1e-12 * np.abs(second).sum()


@pytest.mark.parametrize("n", [150, 300])
def test_a_start_from_any_duals_is_the_same_on_every_backend(compiled, n):
    matrix = similarity("relu", n)
    duals = (np.zeros(n), 3 * normal(n, seed=5))
    found = linear_sum_assignment(matrix, True, duals=duals, certificate=True, backend=compiled)
    expected = linear_sum_assignment(matrix, True, duals=duals, certificate=True, backend="reference")
    assert np.array_equal(found[1], expected[1])
    assert np.array_equal(found[2].v, expected[2].v)
    assert_optimal(matrix, *found[:2], True)


@pytest.mark.parametrize("magnitude", [1e3, 1e6, 1e12, 1e15, 1e17])
def test_duals_that_dwarf_the_entries_do_not_spoil_the_optimum(backend, magnitude):
    for seed in range(20):
        matrix = normal(8, 8, seed=seed)
        duals = (np.zeros(8), magnitude * normal(8, seed=100 + seed))
        row_ind, col_ind, proof = linear_sum_assignment(matrix, duals=duals, certificate=True, backend=backend)
        assert_optimal(matrix, row_ind, col_ind, False)
        assert abs(proof.gap) <= 1e-9


def test_duals_beside_forbidden_pairs(backend):
    matrix = np.array([[np.inf, 1.0], [2.0, np.inf]])
    _, col_ind, proof = linear_sum_assignment(
        matrix, duals=(np.zeros(2), [5.0, -5.0]), certificate=True, backend=backend
    )
    assert col_ind.tolist() == [1, 0]
    assert proof.primal == 3


def test_a_rectangle_begins_afresh(backend):
    matrix = normal(20, 30)
    row_ind, col_ind = linear_sum_assignment(matrix, duals=(np.zeros(20), normal(30, seed=1)), backend=backend)
    assert_optimal(matrix, row_ind, col_ind, False)


# --- several problems -------------------------------------------------------------------------------------------------


def test_a_batch(backend, threads):
    batch = normal(40, 9, 12)
    row_ind, col_ind, proofs = linear_sum_assignment(batch, certificate=True, backend=backend)
    assert row_ind.shape == col_ind.shape == (40, 9)
    for k in range(40):
        alone = linear_sum_assignment(batch[k], certificate=True, backend=backend)
        assert np.array_equal(row_ind[k], alone[0])
        assert np.array_equal(col_ind[k], alone[1])
        assert proofs[k].primal == alone[2].primal
    tensor = torch.from_numpy(batch).transpose(1, 2)
    rows, cols = linear_sum_assignment(tensor, backend=backend)
    assert rows.shape == cols.shape == (40, 9)
    assert torch.equal(cols.sort(1).values, torch.arange(9).expand(40, 9))
    for k in range(40):
        assert total(tensor[k], rows[k], cols[k]) == pytest.approx(proofs[k].primal)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 4, 0)])
def test_a_batch_of_nothing(shape):
    for batch in (np.empty(shape), torch.empty(shape)):
        row_ind, col_ind = linear_sum_assignment(batch)
        assert tuple(row_ind.shape) == tuple(col_ind.shape) == (shape[0], min(shape[1:]))


def test_a_list_of_problems_gives_each_its_own(backend, threads):
    matrices = [normal(n, n + n % 3, seed=n).astype(dtype) for n in range(1, 90, 11) for dtype in ("f4", "f8")]
    given = [torch.from_numpy(matrix) if k % 2 else matrix for k, matrix in enumerate(matrices)]
    results = linear_sum_assignment(given, True, backend=backend)
    for matrix, each, (row_ind, col_ind) in zip(matrices, given, results, strict=True):
        assert isinstance(row_ind, torch.Tensor) == isinstance(each, torch.Tensor)
        assert np.array_equal(col_ind, linear_sum_assignment(matrix, True, backend=backend)[1])


def test_many_problems_in_parallel_are_each_solved_as_alone(compiled, threads):
    batch = np.stack([similarity(kind, 90, seed) for kind in KINDS for seed in range(6)])
    col_ind = linear_sum_assignment(batch, True, backend=compiled)[1]
    for matrix, columns in zip(batch, col_ind, strict=True):
        assert np.array_equal(columns, linear_sum_assignment(matrix, True, backend="reference")[1])


def test_starts_of_several_problems(backend):
    batch = normal(3, 20, 20)
    proofs = linear_sum_assignment(batch, certificate=True, backend=backend)[2]
    again = linear_sum_assignment(batch, duals=[proofs[0], None, (proofs[2].u, proofs[2].v)], backend=backend)
    assert np.array_equal(again[1], linear_sum_assignment(batch, backend=backend)[1])


def test_calls_from_several_threads():
    matrices = [similarity("norms", 200, seed) for seed in range(4)]
    found = [None] * 4

    def solve(k):
        found[k] = linear_sum_assignment(matrices[k], True)[1]

    workers = [threading.Thread(target=solve, args=(k,)) for k in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for matrix, col_ind in zip(matrices, found, strict=True):
        assert_optimal(matrix, np.arange(200), col_ind, True)


# --- what goes in -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["f2", "f4", "f8", "g", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?", ">f4", ">f8", ">i4"]
)
def test_numpy_dtypes(backend, dtype):
    matrix = np.random.default_rng(0).integers(0, 100, (30, 30)).astype(dtype)
    before = matrix.copy()
    row_ind, col_ind = linear_sum_assignment(matrix, True, backend=backend)
    assert_optimal(matrix.astype(np.float64), row_ind, col_ind, True)
    assert np.array_equal(matrix, before)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool]
)
def test_tensor_dtypes(backend, dtype):
    matrix = (torch.rand(30, 30, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)
    row_ind, col_ind = linear_sum_assignment(matrix, backend=backend)
    assert row_ind.dtype == col_ind.dtype == torch.int64
    assert_optimal(matrix.double().numpy(), row_ind.tolist(), col_ind.tolist(), False)


def test_float64_is_not_rounded_to_float32(backend):
    cost = np.array([[1.0, 1.0 + 1e-12], [1.0, 1.0 + 3e-12]])
    assert linear_sum_assignment(cost, backend=backend)[1].tolist() == [1, 0]
    assert linear_sum_assignment(np.array([[2**40, 2**40 + 1], [0, 3]]), backend=backend)[1].tolist() == [1, 0]


def test_strides_and_views(backend):
    base = normal(60, 80, dtype=np.float32)
    for view in (base[::2, ::2], base[::-1, 3:50], base.T, np.asfortranarray(base), base[5:6], base[:, 7:8]):
        assert_optimal(view, *linear_sum_assignment(view, backend=backend), False)
    tensor = torch.from_numpy(base)
    for view in (tensor[::2, ::2], tensor.t(), tensor[:1].expand(40, 80)):
        rows, cols = linear_sum_assignment(view, backend=backend)
        assert_optimal(view.numpy(), rows.tolist(), cols.tolist(), False)
    negated = torch.complex(tensor, tensor).conj().imag
    assert_optimal(-base, *(x.numpy() for x in linear_sum_assignment(negated, backend=backend)), False)
    read_only = base.copy()
    read_only.flags.writeable = False
    assert_optimal(read_only, *linear_sum_assignment(read_only, backend=backend), False)


def test_lists_parameters_and_memory_that_requires_a_gradient(backend):
    assert linear_sum_assignment([[1, 0], [1, 5]], backend=backend)[1].tolist() == [1, 0]
    assert linear_sum_assignment([[[1, 0], [1, 5]]], backend=backend)[1].tolist() == [[1, 0]]
    parameter = torch.nn.Parameter(torch.tensor([[1.0, 0.0], [1.0, 5.0]]))
    assert linear_sum_assignment(parameter, backend=backend)[1].tolist() == [1, 0]


def test_signs_of_zero_do_not_matter(backend):
    matrix = np.zeros((70, 70), np.float32)
    matrix[::2] = -0.0
    matrix[:, ::3] *= -1
    assert linear_sum_assignment(matrix, backend=backend)[1].tolist() == list(range(70))


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [70, 270])
@pytest.mark.parametrize("place", [(0, 0), (2, 69), (68, 3)])
def test_nan_is_named(backend, dtype, place, n):
    matrix = normal(n, n).astype(dtype)
    matrix[place] = np.nan
    for maximize in (False, True):
        with pytest.raises(InputError, match=rf"^layer1 is NaN at row {place[0]}, column {place[1]},"):
            linear_sum_assignment(matrix, maximize, names="layer1", backend=backend)
    with pytest.raises(InputError, match=rf"^the matrix is NaN at row {place[1]}, column {place[0]},"):
        linear_sum_assignment(np.concatenate([matrix.T, matrix.T * 0 + 1])[: n + 20], backend=backend)


@pytest.mark.parametrize("n", [5, 270])
def test_the_infinity_that_no_pairing_could_leave_aside(backend, n):
    matrix = normal(n, n)
    matrix[3, 1] = np.inf
    with pytest.raises(InputError, match=r"the matrix is \+inf at row 3, column 1.*-inf forbids"):
        linear_sum_assignment(matrix, maximize=True, backend=backend)
    with pytest.raises(InputError, match=r"the matrix is -inf at row 3, column 1.*\+inf forbids"):
        linear_sum_assignment(-matrix, backend=backend)


@pytest.mark.parametrize("n", [2, 70, 300])
def test_an_infeasible_problem_is_an_error(backend, n):
    cost = normal(n, n)
    cost[: n // 2 + 1, n // 2 :] = np.inf  # more rows than columns they may have
    with pytest.raises(InputError, match=rf"no pairing.*rows up to row {n // 2} "):
        linear_sum_assignment(cost, backend=backend)
    with pytest.raises(InputError, match="no pairing"):
        linear_sum_assignment(np.full((3, 3), np.inf), backend=backend)
    tall = np.concatenate([cost.T, np.full((1, n), np.inf)])
    with pytest.raises(InputError, match=rf"no pairing.*columns up to column {n // 2} "):
        linear_sum_assignment(tall, backend=backend)


def test_the_first_bad_matrix_of_a_batch_is_named(backend):
    batch = normal(4, 3, 5)
    batch[2, 1, 4] = batch[3] = np.nan
    for matrices, place in ((batch, "row 1, column 4"), (batch.transpose(0, 2, 1), "row 4, column 1")):
        with pytest.raises(InputError, match=rf"^matrix 2 is NaN at {place},"):
            linear_sum_assignment(matrices, backend=backend)
        with pytest.raises(InputError, match=rf"^c is NaN at {place},"):
            linear_sum_assignment(torch.from_numpy(matrices), names=list("abcd"), backend=backend)
    with pytest.raises(InputError, match=r"^the duals of matrix 1 hold NaN"):
        linear_sum_assignment(np.zeros((2, 2, 2)), duals=[None, (np.zeros(2), np.full(2, np.nan))], backend=backend)


def test_the_matrix_of_a_list_is_named(backend):
    bad = np.array([[np.nan]])
    with pytest.raises(InputError, match=r"^matrix 1 is NaN"):
        linear_sum_assignment([np.eye(2), bad], backend=backend)
    with pytest.raises(InputError, match=r"^heads of layer 3 is NaN"):
        linear_sum_assignment([np.eye(2), bad], names=["layer 2", "heads of layer 3"], backend=backend)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (np.zeros(3), "1 axes, expected two"),
        (np.zeros((1, 1, 1, 1)), "4 axes, expected two"),
        (3.0, "0 axes"),
        (np.zeros((2, 2), complex), "dtype complex128, expected real numbers"),
        (torch.zeros(2, 2, dtype=torch.complex64), "torch.complex64, expected a dense tensor of real numbers"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo, expected a dense tensor"),
        (np.array([["a", "b"]]), "expected real numbers"),
        (np.array([[None, 1.0]]), "dtype object, expected real numbers"),
        ([], "1 axes, expected two"),
    ],
)
def test_what_is_no_matrix(matrix, message):
    with pytest.raises(InputError, match=message):
        linear_sum_assignment(matrix)


@pytest.mark.parametrize(
    ("duals", "message"),
    [
        ((np.zeros(3), np.zeros(4)), r"shapes \(3,\) and \(4,\), expected \(3,\) and \(3,\)"),
        ((np.zeros((3, 1)), np.zeros(3)), "shapes"),
        ((np.zeros(3), np.array([0, np.nan, 0])), "NaN or infinity, expected finite"),
        ((np.zeros(3),), "1 arrays, expected a Certificate or a pair"),
    ],
)
def test_duals_that_do_not_fit(duals, message):
    with pytest.raises(InputError, match=message):
        linear_sum_assignment(np.eye(3), duals=duals)


def test_a_certificate_for_a_batch_and_names_for_fewer():
    proof = Certificate(0.0, 0.0, 0.0, np.zeros(2), np.zeros(2))
    with pytest.raises(InputError, match="duals is no list of 3 entries"):
        linear_sum_assignment(np.zeros((3, 2, 2)), duals=proof)
    with pytest.raises(InputError, match="names is no list of 3 entries"):
        linear_sum_assignment(np.zeros((3, 2, 2)), names=["a"])


def test_an_unknown_backend():
    with pytest.raises(InputError, match="'gpu' is not a backend"):
        linear_sum_assignment(np.eye(2), backend="gpu")
