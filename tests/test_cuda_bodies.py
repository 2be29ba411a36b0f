"""The CUDA sources run on the host against the reference: kernels, index arithmetic, and which is launched when.

tests/csrc/host.cpp includes csrc/cuda/*.cu beside a launch.cuh that runs blocks after each other, and their threads as
members of a team that meet. It is compiled once, with the binding, into a module that takes the place of isthmus._cuda.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import hashlib
import importlib
import importlib.util
import itertools
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

import isthmus
from isthmus import _dispatch, _native, ops, reference
from isthmus.errors import BackendError
from isthmus.testing import FLOATS, awkward, contested, finite, same_bits

REPOSITORY = Path(__file__).parents[1]
SOURCES = [REPOSITORY / "tests/csrc/host.cpp", REPOSITORY / "csrc/bind/cuda.cpp"]
LENGTHS = [1, 7, 8, 8191, 8192, 8193, 20001]


@pytest.fixture(scope="module")
def cuda(request):
    """The module isthmus._gpu.cuda on the host."""
    pybind11 = pytest.importorskip("pybind11")
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    texts = [*SOURCES, *REPOSITORY.glob("tests/csrc/*"), *REPOSITORY.glob("csrc/**/*.h")]
    texts += REPOSITORY.glob("csrc/cuda/*.cu")
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(texts)) + sys.version.encode()).hexdigest()
    folder = request.config.cache.mkdir("cuda_bodies")
    library = folder / f"_cuda_{digest[:16]}.so"
    if not library.exists():
        flags = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
        flags += [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}"]
        flags += [f"-I{REPOSITORY / 'tests/csrc'}"]
        objects = [folder / f"{source.stem}_{digest[:16]}.o" for source in SOURCES]

        def build(*arguments):
            done = subprocess.run([compiler, *map(str, arguments)], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr

        bodies, binding = SOURCES  # of which the first must be quick to run, and the second to compile
        with concurrent.futures.ThreadPoolExecutor() as pool:
            jobs = [
                pool.submit(build, *flags, "-O1", "-c", bodies, "-o", objects[0]),
                pool.submit(build, *flags, "-O0", "-c", binding, "-o", objects[1]),
            ]
            for job in jobs:
                job.result()
        build("-shared", *objects, "-o", library)
    spec = importlib.util.spec_from_file_location("on_host._cuda", library)  # pybind11 knows modules by their names
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "isthmus._cuda", extension)
        patch.setattr(isthmus, "_cuda", extension, raising=False)
        patch.delitem(sys.modules, "isthmus._gpu.cuda", raising=False)
        module = importlib.import_module("isthmus._gpu.cuda")
        assert module.ON_HOST
        _native.load_cuda.cache_clear()  # the module before, if it was loaded
        yield module
        del sys.modules["isthmus._gpu.cuda"]
    _native.load_cuda.cache_clear()


@functools.cache
def kernels(library):
    """The name of each kernel, such as ``lerp_kernel<float>``, by its distance in memory from take_launched."""
    done = subprocess.run(["nm", "-C", library], capture_output=True, text=True, check=True)
    symbols = [(int(place, 16), name) for place, name in re.findall(r"^(\w+) [tT] (.*)$", done.stdout, re.MULTILINE)]
    (origin,) = [place for place, name in symbols if name == "take_launched"]
    found = [(place - origin, re.search(r"\w+_kernel<.*>", name)) for place, name in symbols]
    return {distance: name[0].replace("isthmus::", "") for distance, name in found if name}


def launches(cuda, call, *arguments, **options):
    """The names of the kernels that a call launches, in their order."""
    library = cuda._cuda.__file__
    take = ctypes.CDLL(library).take_launched
    take.restype, take.argtypes = ctypes.c_int64, [ctypes.POINTER(ctypes.c_int64), ctypes.c_int64]
    take(None, 0)
    call(cuda, *arguments, **options)
    distances = (ctypes.c_int64 * 64)()
    count = take(distances, len(distances))
    assert count <= len(distances)
    return [kernels(library)[distance] for distance in distances[:count]]


def shifted(x):
    """The same values where no access of 16 bytes begins."""
    return torch.cat([x[:1], x])[1:]


# --- interpolation and sums -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_lerp_to_the_bit(cuda, dtype):
    a = [awkward(n, dtype, seed=n) for n in LENGTHS]
    b = [awkward(n, dtype, seed=n + 1) for n in LENGTHS]
    a[2], b[4] = shifted(a[2]), shifted(b[4])
    weights = [0.0, 1.0, 0.3, 0.5, 0.7, -0.2, 1.5]
    for w in ([0.25], weights):
        out = [torch.empty_like(x) for x in a]
        cuda.lerp(a, b, out, torch.tensor(w, dtype=torch.float64))
        for x, y, result, weight in zip(a, b, out, itertools.cycle(w), strict=False):
            assert same_bits(result, reference.lerp(x, y, weight, dtype=dtype))


@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_lerp_into_another_dtype(cuda, dtype, out_dtype):
    a, b = awkward(1003, dtype, seed=1), awkward(1003, dtype, seed=2)
    out = torch.empty(1003, dtype=out_dtype)
    cuda.lerp([a], [b], [out], torch.tensor([0.3], dtype=torch.float64))
    assert same_bits(out, reference.lerp(a, b, 0.3, dtype=out_dtype))


@pytest.mark.parametrize("models", [1, 2, 4, 5, 9])
@pytest.mark.parametrize("dtype", FLOATS)
def test_weighted_sum_to_the_bit(cuda, dtype, models):
    columns = [[awkward(n, dtype, seed=31 * n + k) for n in LENGTHS[2:5]] for k in range(models)]
    weights = torch.randn(3, models, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for w in (weights, weights[:1]):
        out = [torch.empty_like(x) for x in columns[0]]
        cuda.weighted_sum(columns, out, w)
        for row, result, line in zip(zip(*columns, strict=True), out, w.expand(3, -1).tolist(), strict=True):
            assert same_bits(result, reference.weighted_sum(row, line, dtype=dtype))


def test_outputs_may_be_inputs(cuda):
    a, b = awkward(8195, torch.bfloat16, seed=1), awkward(8195, torch.bfloat16, seed=2)
    expected = reference.lerp(a, b, 0.3, dtype=a.dtype)
    cuda.lerp([a], [b], [a], torch.tensor([0.3], dtype=torch.float64))
    assert same_bits(a, expected)


# --- consensus --------------------------------------------------------------------------------------------------------


def make_plan(rows, *, models, based, seed, vote, merge_func, zero_sign, divisor="count", sparsify="none", **options):
    """A plan for rows of tensors, with cuts that have to be found, and lengths of 1 or of a divisor for each row."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.rand(*shape, dtype=torch.float64, generator=generator)  # noqa: E731
    lengths = options.pop("lengths", None)
    counts = [1 if lengths is None else len(row[0]) // n for row, n in zip(rows, lengths or rows, strict=True)]
    keep = drop = random = None
    if sparsify in ("magnitude", "outliers"):
        n = [len(row[0]) if lengths is None else lengths[r] for r, row in enumerate(rows) for _ in range(counts[r])]
        sizes = torch.tensor(n, dtype=torch.float64)[:, None, None]
        ranks = (sizes * draw(len(n), models, 2)).long().sort(-1, descending=True).values
        groups = reference.Groups(False, lengths)
        columns = [list(column) for column in zip(*rows, strict=True)]
        found = reference.select(columns, based=based, groups=groups, ranks=ranks, exact=True)
        assert found.nonfinite is None
        keep, drop = found.cuts[0], found.cuts[1] if sparsify == "outliers" else None
    if sparsify == "random":
        keys = reference.random_keys(seed, [f"row {r}" for r in range(len(rows))], models)
        density = draw(len(rows), models)
        density[0, 0], density[-1, -1] = 0.0, 1.0
        starts = [int(x) for x in torch.randint(1 << 40, (len(rows),), generator=generator)]
        random = reference.Random(keys, density, None, options.pop("inverse", False), starts)
    return reference.Plan(
        based=based,
        weights=draw(len(rows), models) * 2 - 0.5,
        scaling=draw(len(rows)) + 0.5,
        vote=vote,
        zero_sign=zero_sign,
        tally_rows=options.pop("tally_rows", False),
        merge_func=merge_func,
        divisor=divisor,
        rescale=draw(len(rows), models) + 0.5 if options.pop("rescale", False) else None,
        keep=keep,
        drop=drop,
        lengths=lengths,
        random=random,
    )


def check_consensus(cuda, rows, plan, *, stats):
    columns = [list(column) for column in zip(*rows, strict=True)]
    out = [torch.empty_like(x) for x in columns[0]]
    counted = cuda.consensus(columns, out, plan, stats=stats)
    expected, wanted = reference.consensus(columns, plan, stats=stats)
    for result, right in zip(out, expected, strict=True):
        assert same_bits(result, right)
    if stats:
        for x, y in zip(counted, wanted, strict=True):
            assert torch.equal(x, y)


VOTES = ["none", "total", "weighted_total", "frequency"]
MERGES = ["sum", "mean", "max"]
ZEROS = ["majority", "positive", "negative", "zero"]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("vote", VOTES)
def test_consensus_to_the_bit(cuda, vote, dtype):
    options = itertools.product(MERGES, ZEROS, ["none", "magnitude", "outliers", "random"])
    for seed, (merge_func, zero_sign, sparsify) in enumerate(options, 1):
        models, based = (1, 2, 3, 4, 5, 8, 9)[seed % 7], seed % 3 != 0
        make = (contested, finite)[seed % 2] if sparsify != "none" else (contested, awkward)[seed % 2]
        rows = [[make(n, dtype, seed=100 * seed + 10 * n + k) for k in range(models + based)] for n in (8193, 37, 600)]
        plan = make_plan(
            rows, models=models, based=based, seed=seed, vote=vote, merge_func=merge_func, zero_sign=zero_sign,
            divisor=("count", "weight")[seed % 2], sparsify=sparsify, tally_rows=seed % 5 == 0,
            rescale=seed % 5 == 1, inverse=seed % 5 != 1 and seed % 2 == 0,
        )  # fmt: skip
        check_consensus(cuda, rows, plan, stats=seed % 3 == 1)


def in_registers(dtype, vote, models, merge_func, at_random, stats):
    """The most models that the kernel which serves a case keeps in registers, or None for the one that reads twice."""
    plain = vote in ("none", "total")
    if dtype == torch.float64 or merge_func == "max" or stats:
        return None
    if models <= 4 and (plain or not (at_random or dtype == torch.float16)):
        return 4
    return 8 if models <= 8 and plain and not at_random and dtype != torch.float16 else None


@pytest.mark.parametrize("vote", VOTES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_which_kernel_makes_a_consensus(cuda, dtype, vote):
    cases = [*itertools.product((1, 4, 5, 8, 9), ["sum"], ["none", "random"], [False])]
    cases += [(4, "max", "none", False), (4, "mean", "magnitude", False), (4, "mean", "none", True)]
    stored = {torch.float64: "double", torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    for models, merge_func, sparsify, stats in cases:
        rows = [[contested(n, dtype, seed=n + k) for k in range(models + 1)] for n in (37, 600)]
        plan = make_plan(
            rows, models=models, based=True, seed=1, vote=vote, merge_func=merge_func, zero_sign="positive",
            sparsify=sparsify,
        )  # fmt: skip
        most = in_registers(dtype, vote, models, merge_func, sparsify == "random", stats)
        at_random = str(sparsify == "random").lower()
        if most is None:
            kernel = f"any_consensus_kernel<{stored}, {at_random}>"
        else:
            kernel = f"consensus_kernel<{stored}, (Vote){VOTES.index(vote)}, {most}, {at_random}>"
        assert launches(cuda, check_consensus, rows, plan, stats=stats) == [kernel]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[1, 1], [3, 7], [4096, 61], [5000, 1]])
def test_consensus_of_pieces(cuda, dtype, lengths):
    numel = [length * 3 for length in lengths]
    rows = [[contested(n, dtype, seed=n + k) for k in range(4)] for n in numel]
    for sparsify in ("magnitude", "outliers"):
        plan = make_plan(
            rows, models=3, based=True, seed=1, vote="total", merge_func="mean", zero_sign="positive",
            sparsify=sparsify, lengths=lengths,
        )  # fmt: skip
        check_consensus(cuda, rows, plan, stats=False)
        check_consensus(cuda, rows, plan, stats=True)


@pytest.mark.parametrize("tally_rows", [False, True])
@pytest.mark.parametrize("negative", [False, True])
def test_a_majority_is_put_right_in_place(cuda, negative, tally_rows):
    sign = -1 if negative else 1
    models = [
        [sign * contested(20001, torch.float32, seed=k).abs(), contested(70, torch.float32, seed=9 + k)]
        for k in range(2)
    ]
    models[1][0][::3] *= -1  # cancels
    models[1][0][::3] = -models[0][0][::3]
    rows = [list(row) for row in zip(*models, strict=True)]
    plan = make_plan(
        rows, models=2, based=False, seed=1, vote="total", merge_func="sum", zero_sign="majority", tally_rows=tally_rows
    )
    expected, _ = reference.consensus(models, plan)
    out = [x.clone() for x in models[0]]
    cuda.consensus([out, models[1]], out, plan, stats=False)
    apart = [torch.empty_like(x) for x in out]
    cuda.consensus(models, apart, plan, stats=False)
    for x, y, right in zip(out, apart, expected, strict=True):
        assert same_bits(x, right)
        assert same_bits(y, right)


def test_rows_of_several_dtypes_share_a_majority(cuda):
    rows = [[contested(501, dtype, seed=k + i) for k in range(2)] for i, dtype in enumerate(FLOATS)]
    rows.append([contested(300, torch.float32, seed=1), contested(300, torch.bfloat16, seed=2)])
    rows.append([torch.empty(0), torch.empty(0)])
    plan = make_plan(rows, models=2, based=False, seed=3, vote="total", merge_func="mean", zero_sign="majority")
    check_consensus(cuda, rows, plan, stats=True)


def test_what_has_no_kernel_names_triton(cuda):
    rows = [[torch.ones(8)]]
    plan = make_plan(
        rows, models=1, based=False, seed=1, vote="none", merge_func="sum", zero_sign="zero", sparsify="random"
    )
    plan = reference.Plan(**{**vars(plan), "random": plan.random._replace(epsilon=plan.random.density), "lengths": [8]})
    with pytest.raises(BackendError, match="triton"):
        cuda.consensus([rows[0]], [torch.empty(8)], plan, stats=False)


# --- selection --------------------------------------------------------------------------------------------------------


def check_select(cuda, columns, *, based, groups, ranks, exact):
    found = cuda.select(columns, based=based, groups=groups, ranks=ranks, exact=exact)
    right = reference.select(columns, based=based, groups=groups, ranks=ranks, exact=exact)
    assert found.nonfinite == right.nonfinite
    if right.nonfinite is not None:
        return
    for x, y in zip(found.cuts, right.cuts, strict=True):
        assert torch.equal(x.value, y.value)
        assert torch.equal(x.index, y.index)
    assert torch.equal(found.above, right.above)
    assert torch.equal(found.equal, right.equal)


def ranks_of(sizes, models, seed):
    """Ranks of all kinds: some inside, the ends, nothing and everything."""
    generator = torch.Generator().manual_seed(seed)
    n = torch.tensor(sizes)[:, None, None]
    ranks = (n * torch.rand(len(sizes), models, 2, generator=generator)).long()
    special = torch.randint(8, ranks.shape, generator=generator)
    return torch.where(special == 0, 1, torch.where(special == 1, n - 1, torch.where(special == 2, n, ranks)))


KINDS = {
    "finite": lambda n, dtype, seed: finite(n, dtype, seed=seed),
    "contested": lambda n, dtype, seed: contested(n, dtype, seed=seed),
    "equal": lambda n, dtype, seed: torch.full((n,), 0.5, dtype=dtype),
    "two": lambda n, dtype, seed: torch.where(torch.arange(n) < n // 3, 1.0, 2.0).to(dtype),
    "sorted": lambda n, dtype, seed: torch.linspace(-1, 1, n, dtype=torch.float64).to(dtype),
    "powers": lambda n, dtype, seed: torch.exp2(-(torch.arange(n) % 13).double()).to(dtype),
    # All large ones lie where the sample of a stride would miss them.
    "clustered": lambda n, dtype, seed: (
        torch.where(torch.arange(n) > n - n // 200, 1e3, 1.0).to(dtype) + (torch.arange(n) % 251).to(dtype) / 512
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_selection_in_large_groups(cuda, dtype, kind):
    sizes = [70001, 131075, 300]
    everything = list(itertools.product([False, True], [False, True]))
    for based, whole in everything if dtype == torch.float32 else everything[1:3]:
        columns = [[KINDS[kind](n, dtype, 7 * n + k) for n in sizes] for k in range(2 + based)]
        groups = reference.Groups(whole, None)
        ranks = ranks_of([sum(sizes)] if whole else sizes, 2, seed=int(based))
        check_select(cuda, columns, based=based, groups=groups, ranks=ranks, exact=not whole or based)


def sampled(n):
    """The elements of a lone row that its sample of 1024 runs looks at; see take_sample in csrc/cuda/select.h."""
    stride = n // 1024
    random = np.arange(1, 1025, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    random = (random ^ random >> np.uint64(32)) * np.uint64(0xD6E8FEB86659FD93)
    random ^= random >> np.uint64(32)
    first = np.arange(1024) * stride + (random % np.uint64(stride - 7)).astype(np.int64)
    return torch.from_numpy(first[:, None] + np.arange(8)).flatten()


@pytest.mark.parametrize("factor", [2.0**-6, 2.0**6])
@pytest.mark.parametrize("dtype", FLOATS)
def test_selection_where_all_that_is_sampled_misleads(cuda, dtype, factor):
    x = finite(70001, dtype, seed=1)
    x = torch.where(x.abs() < 2.0**-3, 1, torch.where(x.abs() > 2.0**3, 1, x))
    x[sampled(70001)] *= factor
    ranks = torch.tensor([[[15000, 35000, 50000]]])
    for exact in (False, True):
        check_select(cuda, [[x]], based=False, groups=reference.Groups(False, None), ranks=ranks, exact=exact)


@pytest.mark.parametrize("dtype", FLOATS)
def test_selection_in_pieces(cuda, dtype):
    lengths, counts = [1, 7, 5000, 64], [5, 11, 3, 9]
    columns = [[contested(x * c, dtype, seed=x + k) for x, c in zip(lengths, counts, strict=True)] for k in range(3)]
    sizes = [x for x, c in zip(lengths, counts, strict=True) for _ in range(c)]
    for exact in (False, True):
        groups = reference.Groups(False, lengths)
        check_select(cuda, columns, based=True, groups=groups, ranks=ranks_of(sizes, 2, seed=5), exact=exact)


def test_selection_over_rows_of_several_dtypes(cuda):
    columns = [[finite(5000, dtype, seed=k) for dtype in FLOATS] for k in range(2)]
    for whole in (False, True):
        ranks = ranks_of([20000] if whole else [5000] * 4, 1, seed=1)
        check_select(cuda, columns, based=True, groups=reference.Groups(whole, None), ranks=ranks, exact=True)


@pytest.mark.parametrize("n", [50, 70001])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_selection_names_the_first_that_is_not_finite(cuda, n, bad):
    columns = [[finite(n, torch.float32, seed=r + k) for r in range(3)] for k in range(2)]
    columns[1][1][n - 3] = bad
    columns[0][2][0] = bad
    for whole in (False, True):
        ranks = torch.full((1 if whole else 3, 2, 1), n // 3)
        check_select(cuda, columns, based=False, groups=reference.Groups(whole, None), ranks=ranks, exact=True)
    ranks = torch.full((3, 2, 1), n)
    ranks[1, 0] = 3  # all that is looked at, and finite
    check_select(cuda, columns, based=False, groups=reference.Groups(False, None), ranks=ranks, exact=True)


# --- assignment -------------------------------------------------------------------------------------------------------


def problems(kind, count, rows, cols, dtype, seed):
    generator = np.random.default_rng(seed)
    costs = generator.normal(size=(count, rows, cols))
    if kind == "ties":
        costs = generator.integers(0, 4, size=costs.shape).astype(float)
    if kind == "forbidden":
        costs[generator.random(costs.shape) < 0.3] = np.inf
    if kind == "distinct":
        costs[:, np.arange(rows), generator.permutation(cols)[:rows]] -= 10
    return costs.astype(dtype)


def assert_sums(found, right):
    """The objectives are the same sums in another order."""
    terms = np.abs(right.u).sum(1) + np.abs(right.v).sum(1)  # no fewer than those of the costs
    bound = (right.u.shape[1] + right.v.shape[1]) * np.finfo(np.float64).eps * terms
    assert (np.abs(found.objectives - right.objectives) <= bound).all()


@pytest.mark.parametrize("kind", ["random", "ties", "forbidden", "distinct"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (2, 9), (13, 13), (24, 31)])
def test_assignment_in_batches(cuda, rows, cols, dtype, kind):
    for maximize, started in itertools.product([False, True], [False, rows == cols]):
        costs = problems(kind, 3, rows, cols, dtype, seed=rows) * dtype(-1 if maximize else 1)
        starts = np.random.default_rng(1).normal(size=(3, cols)) if started else None
        right = reference.assign(costs, maximize=maximize, starts=starts)
        found = cuda.assign(
            torch.from_numpy(costs), None if starts is None else torch.from_numpy(starts), maximize=maximize,
            certificate=True,
        )  # fmt: skip
        assert found.fault == right.fault
        if right.fault is not None:
            continue
        assert np.array_equal(found.columns, right.columns)
        assert np.array_equal(found.proofs.u, right.proofs.u)
        assert np.array_equal(found.proofs.v, right.proofs.v)
        assert_sums(found.proofs, right.proofs)


@pytest.mark.parametrize(("value", "kind"), [(float("nan"), "nan"), (-float("inf"), "unbounded")])
def test_assignment_names_the_first_fault(cuda, monkeypatch, value, kind):
    costs = torch.randn(3, 5, 6)
    costs[1, 4, 2] = costs[1, 3, 5] = costs[2, 0, 0] = value
    assert cuda.assign(costs, None, maximize=False, certificate=False).fault == (kind, 1, 3, 5)
    monkeypatch.setattr(cuda, "LARGE", 1)
    assert cuda.assign(costs[1:2], None, maximize=False, certificate=False).fault == (kind, 0, 3, 5)


def test_the_shortcut_of_a_large_problem(cuda, monkeypatch):
    monkeypatch.setattr(cuda, "LARGE", 10)
    costs = problems("distinct", 1, 20, 26, np.float32, seed=1)
    found = cuda.assign(torch.from_numpy(costs), None, maximize=False, certificate=True)
    right = reference.assign(costs, maximize=False)
    assert np.array_equal(found.columns, right.columns)
    assert np.array_equal(found.proofs.u, right.proofs.u)
    assert_sums(found.proofs, right.proofs)
    costs[0, 1] = costs[0, 0]  # two rows with one nearest column
    assert cuda.assign(torch.from_numpy(costs), None, maximize=False, certificate=True) is None


# --- through the public functions -------------------------------------------------------------------------------------


@pytest.fixture
def by_name(cuda, monkeypatch):
    """The backend that is asked for by its name is the one on the host."""
    monkeypatch.setattr(_native, "load_cuda", lambda: (cuda, "on the host"))
    return "cuda"


def test_public_functions_take_it_by_name(by_name):
    base = finite(9001, torch.bfloat16, seed=0)
    models = [finite(9001, torch.bfloat16, seed=k) for k in range(1, 5)]
    strided = [x.as_strided((3000,), (3,)) for x in models]
    calls = [
        lambda backend: ops.lerp(models[0], models[1], 0.3, backend=backend),
        lambda backend: ops.weighted_sum(strided, [0.1, 0.2, 0.3, 0.4], backend=backend),
        lambda backend: ops.consensus(models, density=0.2, base=base, ties="exact", backend=backend),
        lambda backend: ops.consensus([models, strided][0], sparsify="random", density=0.5, names="x", backend=backend),
        lambda backend: ops.consensus(models, density=0.3, scope="tensor", zero_sign="positive", backend=backend),
    ]
    for call in calls:
        assert same_bits(call(by_name), call("cpp"))
    costs = torch.randn(2, 9, 9)
    assert torch.equal(*(ops.linear_sum_assignment(costs, backend=backend)[1] for backend in (by_name, "cpp")))


def test_what_has_no_cuda_kernel_is_an_error_that_names_triton(by_name):
    with pytest.raises(BackendError, match=r"no kernel for .*\. Use backend=.triton"):
        ops.permute(torch.zeros(3), [torch.tensor([2, 1, 0])], backend=by_name)


def test_tensors_elsewhere_are_an_error(by_name):
    with pytest.raises(BackendError, match="tensors on a GPU and these are on meta"):
        _dispatch.choose(by_name, torch.device("meta"))
