"""Permutations along axes: equality with plain indexing for every layout and dtype, errors, gradients, compilation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from isthmus import ops, reference
from isthmus.errors import InputError
from isthmus.testing import FLOATS, awkward, same_bits

OTHERS = [torch.complex128, torch.complex64, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES = [*FLOATS, *OTHERS]


def values(shape, dtype, seed=0):
    """Entries whose bits differ from place to place."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return awkward(torch.Size(shape).numel(), dtype, seed=seed).reshape(shape)
    if dtype.is_complex:
        return torch.randn(shape, dtype=torch.complex128, generator=generator).to(dtype)
    return torch.randint(2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)


def shuffled(shape, axes=None, seed=0):
    """A random permutation for each of the axes, and None for the others."""
    generator = torch.Generator().manual_seed(seed)
    axes = range(len(shape)) if axes is None else axes
    return [torch.randperm(n, generator=generator) if d in axes else None for d, n in enumerate(shape)]


def indexed(tensor, indices):
    """The definition, by advanced indexing over all axes at once."""
    full = [torch.arange(n) if index is None else index for n, index in zip(tensor.shape, indices, strict=True)]
    return tensor[torch.meshgrid(*full, indexing="ij")] if full else tensor.clone()


def equal(x, y):
    """Equality to the bit, payloads of NaNs included."""
    return x.dtype == y.dtype and x.shape == y.shape and bytes_of(x) == bytes_of(y)


def bytes_of(x):
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# --- values -----------------------------------------------------------------------------------------------------------


def test_by_hand(backend):
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    rows, columns = torch.tensor([1, 0]), torch.tensor([2, 0, 1])
    assert ops.permute(x, [rows, columns], backend=backend).tolist() == [[6.0, 4.0, 5.0], [3.0, 1.0, 2.0]]
    assert ops.permute(x, [None, columns], backend=backend).tolist() == [[3.0, 1.0, 2.0], [6.0, 4.0, 5.0]]
    assert ops.permute(x, [rows, None], backend=backend).tolist() == [[4.0, 5.0, 6.0], [1.0, 2.0, 3.0]]
    assert ops.permute(x, [torch.tensor([1, 1]), None], backend=backend).tolist() == [[4.0, 5.0, 6.0]] * 2
    halfway = ops.lerp_permuted(torch.zeros(2, 3), x, 0.5, [rows, columns], backend=backend)
    assert halfway.tolist() == [[3.0, 2.0, 2.5], [1.5, 0.5, 1.0]]


SHAPES = {
    (): [()],
    (1,): [(0,)],
    (0,): [(0,)],
    (5003,): [(0,)],
    (3, 0, 2): [(0, 2)],
    (37, 53): [(0,), (1,), (0, 1)],
    (1, 700): [(1,), (0, 1)],
    (300, 2): [(0, 1), (1,)],
    (19, 23, 3, 3): [(0, 1), (1,), (0,), (0, 1, 2, 3), (3,)],
    (70, 1, 5, 5): [(0,)],
    (11, 13, 1, 1): [(0, 1)],
    (5, 3, 17, 19): [(0, 1), (0,)],
    (6, 5, 4, 3, 2): [(0, 2, 4), (1, 3)],
    (5, 33, 67): [(0, 1, 2), (0, 1)],
}
CASES = [(shape, axes) for shape, choices in SHAPES.items() for axes in choices]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape(backend, dtype):
    tensors = [values(shape, dtype, seed=i) for i, (shape, _) in enumerate(CASES)]
    indices = [shuffled(shape, axes, seed=i) for i, (shape, axes) in enumerate(CASES)]
    copies = [x.clone() for x in tensors]
    results = ops.permute(tensors, indices, backend=backend)
    for x, copy, index, result in zip(tensors, copies, indices, results, strict=True):
        assert equal(result, indexed(x, index))
        assert equal(x, copy)
        assert x.numel() == 0 or result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize("unit", [*range(1, 40), 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000])
def test_units_of_every_length(backend, unit):
    x = values((7, 11, unit), torch.uint8)
    index = shuffled(x.shape, (0, 1))
    assert equal(ops.permute(x, index, backend=backend), indexed(x, index))


@pytest.mark.parametrize(
    "index",
    [
        torch.arange(60),
        torch.arange(60).roll(20),
        torch.arange(60).view(6, 10)[[3, 1, 0, 5, 4, 2]].flatten(),
        torch.arange(60).view(20, 3).flip(0).flatten(),
        torch.arange(60).flip(0),
        torch.zeros(60, dtype=torch.int64),
        torch.arange(60).clamp(10, 50),
        torch.arange(60).roll(-1),
    ],
    ids=["identity", "halves", "tens", "threes", "reversed", "repeated", "clamped", "rolled"],
)
def test_runs_of_an_index(backend, index):
    for shape in [(60,), (60, 5), (5, 60), (60, 60, 3)]:
        x = values(shape, torch.float32)
        entries = [index if n == 60 else None for n in shape]
        assert equal(ops.permute(x, entries, backend=backend), indexed(x, entries))


VIEWS = {
    "plain": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1),
    "reversed": lambda x: x.permute(3, 2, 1, 0),
    "strided": lambda x: x[:, ::2, :, 1:],
    "expanded": lambda x: x[:1].expand(9, *x.shape[1:]),
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "conjugated": lambda x: torch.complex(x, x + 1).conj(),
    "negated": lambda x: torch.complex(x, x + 1).conj().imag,
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("target", ["none", "plain", "channels_last", "strided"])
def test_any_strides(backend, view, target):
    x = VIEWS[view](torch.randn(12, 10, 7, 5))
    for axes in [(0, 1), (1, 3), (0,), ()]:
        index = shuffled(x.shape, axes)
        out = {
            "none": None,
            "plain": torch.zeros(x.shape, dtype=x.dtype),
            "channels_last": torch.zeros(x.shape, dtype=x.dtype).to(memory_format=torch.channels_last),
            "strided": torch.zeros(*x.shape, 2, dtype=x.dtype)[..., 0],
        }[target]
        result = ops.permute(x, index, out=out, backend=backend)
        assert out is None or result is out
        assert out is not None or result.stride() == torch.empty_like(x).stride()
        assert torch.equal(result, indexed(x, index))


def test_an_index_of_any_stride(backend):
    x, both = torch.randn(50, 3), torch.stack([torch.randperm(50), torch.randperm(50)], dim=1)
    assert torch.equal(ops.permute(x, [both[:, 1], None], backend=backend), x[both[:, 1]])


def test_none_copies(backend):
    tensors = [torch.randn(4, 5), torch.arange(6), torch.tensor(3.0)]
    results = ops.permute(tensors, [None, None, None], backend=backend)
    assert all(torch.equal(x, y) for x, y in zip(tensors, results, strict=True))
    results[0].zero_()
    assert tensors[0].count_nonzero() == 20
    assert torch.equal(ops.permute(tensors[1], None, backend=backend), tensors[1])
    assert ops.permute([], [], backend=backend) == []
    assert ops.lerp_permuted([], [], 0.5, [], backend=backend) == []


def test_threads_and_writes_past_the_caches(compiled, threads):
    # More than 16 MB in all, cut between threads within rows and units, and outputs that begin within a cache line.
    shapes = [(1001,), (300, 257, 3, 3), (999, 1001), (50, 3, 77, 7), (130, 257)]
    tensors = [torch.randn(shape) for shape in shapes]
    indices = [shuffled(shape, (0, 1)) for shape in shapes]
    memory = torch.zeros(sum(x.numel() for x in tensors) + 100)
    out, at = [], 3
    for x in tensors:
        out.append(memory[at : at + x.numel()].view(x.shape))
        at += x.numel() + 5
    for x in [*tensors, *tensors[1:3]]:
        assert x.is_contiguous()
    assert 4 * at > 1 << 22
    big = [*tensors, torch.randn(2000, 2003)]
    indices.append(shuffled((2000, 2003)))
    out.append(torch.zeros(2000, 2003))
    assert sum(x.nbytes for x in big) > 1 << 24
    for x, index, result in zip(big, indices, ops.permute(big, indices, out=out, backend=compiled), strict=True):
        assert torch.equal(result, indexed(x, index))
    assert memory[:3].tolist() == [0.0] * 3
    a = [torch.randn_like(x) for x in big]
    expected = [reference.lerp(y, indexed(x, i), 0.3) for y, x, i in zip(a, big, indices, strict=True)]
    for x, y in zip(ops.lerp_permuted(a, big, 0.3, indices, out=out, backend=compiled), expected, strict=True):
        assert same_bits(x, y)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
@pytest.mark.parametrize("name", ["reference", "cpp", "triton"])
def test_is_plain_indexing(name, data):
    if name == "triton":
        pytest.importorskip("triton")
    shape = data.draw(st.lists(st.integers(0, 9), max_size=5))
    order = data.draw(st.permutations(range(len(shape))))
    dtype = data.draw(st.sampled_from(DTYPES))
    x = values([shape[d] for d in order], dtype).permute(torch.tensor(order).argsort().tolist())
    entry = st.integers(0, 1 << 30)
    index = [
        data.draw(
            st.none()
            | st.permutations(range(n)).map(torch.tensor)
            | st.lists(entry, min_size=n, max_size=n).map(lambda e, n=n: torch.tensor(e, dtype=torch.int64) % max(n, 1))
        )
        for n in x.shape
    ]
    index = [None if i is None else i.to(torch.int64) for i in index]
    expected = indexed(x, index)
    assert equal(ops.permute(x, index, backend=name), expected)
    if dtype in FLOATS:
        weight = data.draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
        a = values(shape, dtype, seed=1)
        assert same_bits(ops.lerp_permuted(a, x, weight, index, backend=name), reference.lerp(a, expected, weight))


# --- lerp_permuted ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0.0, 0.3, 0.7, 1.0, 1.5])
def test_lerp_permuted_is_lerp_of_permuted(backend, weight):
    indices = [shuffled(shape, axes, seed=i) for i, (shape, axes) in enumerate(CASES)]
    for dtype in FLOATS:
        a, b = ([values(shape, dtype, seed=first + i) for i, (shape, _) in enumerate(CASES)] for first in (0, 100))
        expected = ops.lerp(a, ops.permute(b, indices, backend=backend), weight, backend=backend)
        results = ops.lerp_permuted(a, b, weight, indices, backend=backend)
        assert all(same_bits(x, y) for x, y in zip(results, expected, strict=True))
        assert same_bits(ops.lerp_permuted(a[5], b[5], weight, indices[5], backend=backend), expected[5])


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("other", VIEWS)
def test_lerp_permuted_of_any_strides(backend, view, other):
    a, b = VIEWS[view](torch.randn(12, 10, 7, 5)), VIEWS[other](torch.randn(12, 10, 7, 5))
    if a.is_complex() != b.is_complex():
        a, b = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else torch.stack([x, x], -1) for x in (a, b))
    common = [slice(min(sizes)) for sizes in zip(a.shape, b.shape, strict=True)]
    a, b = a[tuple(common)], b[tuple(common)]
    index = shuffled(b.shape, (0, 1, 3))
    expected = ops.lerp(a, ops.permute(b, index), 0.3)
    result = ops.lerp_permuted(a, b, 0.3, index, backend=backend)
    assert torch.equal(result, expected)
    assert result.stride() == torch.empty_like(a).stride()
    out = torch.zeros(*a.shape, 2, dtype=a.dtype)[..., 0]
    assert ops.lerp_permuted(a, b, 0.3, index, out=out, backend=backend) is out
    assert torch.equal(out, expected)


def test_lerp_permuted_mixes_dtypes_and_weights(backend):
    for first in FLOATS:
        for second in FLOATS:
            a, b = [torch.randn(30, 7).to(first)] * 2, [torch.randn(30, 7).to(second), torch.randn(7, 9, 3).to(second)]
            a[1] = torch.randn(7, 9, 3).to(first)
            index = [shuffled((30, 7)), shuffled((7, 9, 3), (1,))]
            expected = ops.lerp(a, ops.permute(b, index, backend=backend), [0.25, 0.8], backend=backend)
            for weight in ([0.25, 0.8], torch.tensor([0.25, 0.8], dtype=torch.float64)):
                result = ops.lerp_permuted(a, b, weight, index, backend=backend)
                assert all(same_bits(x, y) for x, y in zip(result, expected, strict=True))
    out = torch.zeros(30, 7, dtype=torch.float64)
    x, y = torch.randn(30, 7), torch.randn(30, 7)
    ops.lerp_permuted(x, y, 0.3, index[0], out=out, backend=backend)
    assert same_bits(out, ops.lerp(x, ops.permute(y, index[0]), 0.3).double())


def test_lerp_permuted_in_place_of_a(backend):
    a, b = torch.randn(100, 30), torch.randn(100, 30)
    index = shuffled(a.shape)
    expected = ops.lerp(a, ops.permute(b, index), 0.3)
    assert ops.lerp_permuted(a, b, 0.3, index, out=a, backend=backend) is a
    assert same_bits(a, expected)


# --- bad input --------------------------------------------------------------------------------------------------------

X = torch.ones(3, 4)
THREE, FOUR = torch.arange(3), torch.arange(4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.permute(X, [THREE]), "the indices of tensors are 1 entries, expected 2"),
        (lambda: ops.permute(X, THREE), "the indices of tensors are a Tensor, expected 2"),
        (lambda: ops.permute([X, X], [None, [THREE]]), r"the indices of tensors\[1\] are 1 entries"),
        (lambda: ops.permute([X, X], [None]), "indices has 1 entries, expected 2"),
        (lambda: ops.permute([X, X], None), "indices is a NoneType, expected 2"),
        (lambda: ops.permute(X, [FOUR, None]), r"of tensors along axis 0 has shape \(4,\), expected \(3,\)"),
        (lambda: ops.permute(X, [None, FOUR[None]]), r"along axis 1 has shape \(1, 4\)"),
        (lambda: ops.permute([X, X], [None, [THREE.int(), None]]), r"tensors\[1\] along axis 0 has dtype torch.int32"),
        (lambda: ops.permute(X, [[0, 1, 2], None]), "along axis 0 is a list, expected an int64 tensor"),
        (lambda: ops.permute(X, [THREE.to("meta"), None]), "along axis 0 is on meta, expected cpu"),
        (
            lambda: ops.permute([X, X.to("meta")], [[THREE, None], [None, None]]),
            r"tensors\[1\] is on meta and tensors\[0\] on cpu",
        ),
        (lambda: ops.permute(X, None, out=torch.ones(4, 3)), r"out has shape \(4, 3\)"),
        (lambda: ops.permute(X, None, out=X.double()), "out has dtype torch.float64, expected torch.float32"),
        (lambda: ops.permute(X, None, backend="gpu"), "'gpu' is not a backend"),
        (lambda: ops.permute(X.to_sparse(), None), "sparse"),
        (lambda: ops.permute("x", None), "tensors is a str"),
        (lambda: ops.permute(torch.ones(3, dtype=torch.uint16), None), "tensors has dtype torch.uint16"),
        (lambda: ops.lerp_permuted(X, X, 0.5, [THREE]), "the indices of b are 1 entries, expected 2"),
        (lambda: ops.lerp_permuted(X, X.long(), 0.5, None), "b has dtype torch.int64"),
        (lambda: ops.lerp_permuted(X, X, float("nan"), None), "weight is nan"),
        (lambda: ops.lerp_permuted([X, X], [X, X], [0.5], [None, None]), "weight has 1 entries and there are 2"),
    ],
)
def test_bad_input_names_the_thing(call, message):
    with pytest.raises(InputError, match=message):
        call()


@pytest.mark.parametrize("entry", [-1, 4, 1 << 40, -(1 << 40)])
def test_entries_out_of_range(backend, entry):
    bad = torch.tensor([0, 1, entry, 3])
    with pytest.raises(InputError, match=rf"the index of the tensor along axis 1 has the entry {entry}, expected 0 to"):
        ops.permute(X, [THREE, bad], backend=backend)
    with pytest.raises(InputError, match=f"the index of tensor 1 along axis 1 has the entry {entry}"):
        ops.permute([X, X], [None, [None, bad]], backend=backend)
    with pytest.raises(InputError, match=f"the index of tensor 1 along axis 1 has the entry {entry}"):
        ops.lerp_permuted([X, X], [X, X], 0.5, [None, [None, bad]], backend=backend)
    with pytest.raises(InputError, match=f"along axis 1 has the entry {entry}"):
        ops.permute(X.clone().requires_grad_(), [THREE, bad], backend=backend)


def test_overlapping_outputs_are_errors(backend):
    memory = torch.randn(300)
    x, y = memory[:100], memory[100:200]
    index = [torch.randperm(100)]
    with pytest.raises(InputError, match="out has the memory of tensors, and no tensor is permuted in place"):
        ops.permute(x, index, out=x, backend=backend)
    with pytest.raises(InputError, match=r"out\[1\] has the memory of tensors\[1\]"):
        ops.permute([x, y], [index, index], out=[torch.empty(100), y], backend=backend)
    with pytest.raises(InputError, match="overlap in memory"):
        ops.permute(x, index, out=memory[1:101], backend=backend)
    with pytest.raises(InputError, match="overlap in memory"):
        ops.permute([x, y], [index, index], out=[y, torch.empty(100)], backend=backend)
    with pytest.raises(InputError, match="overlap in memory"):
        ops.permute(torch.arange(100), index, out=index[0], backend=backend)
    with pytest.raises(InputError, match="out has the memory of b, and no tensor is permuted in place"):
        ops.lerp_permuted(x, y, 0.5, index, out=y, backend=backend)
    with pytest.raises(InputError, match="overlap in memory"):
        ops.lerp_permuted(x, y, 0.5, index, out=memory[150:250], backend=backend)


# --- gradients and compilation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("repeated", [False, True])
def test_gradients(backend, repeated):
    x = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    index = [torch.tensor([2, 2, 0, 1] if repeated else [2, 3, 0, 1]), None, torch.tensor([1, 0])]
    fast = {"fast_mode": backend == "triton"}  # few calls: each takes a while in Triton's interpreter
    assert gradcheck(lambda x: ops.permute(x, index, backend=backend), x, **fast)
    assert gradgradcheck(lambda x: ops.permute(x, index, backend=backend), x, **fast)
    a = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    w = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda a, x, w: ops.lerp_permuted(a, x, w, index, backend=backend), (a, x, w), **fast)
    assert gradgradcheck(lambda a, x, w: ops.lerp_permuted(a, x, w, index, backend=backend), (a, x, w), **fast)


def test_gradient_by_hand(backend):
    x = torch.zeros(3, requires_grad=True)
    weights = torch.tensor([1.0, 10.0, 100.0])
    (ops.permute(x, [torch.tensor([2, 0, 2])], backend=backend) * weights).sum().backward()
    assert x.grad.tolist() == [10.0, 0.0, 101.0]


def test_gradients_of_complex_tensors():
    x = torch.randn(4, 3, dtype=torch.complex128, requires_grad=True)
    assert gradcheck(lambda x: ops.permute(x, shuffled(x.shape)), x)


def test_out_with_gradients_is_an_error():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(InputError, match="out= cannot be used"):
        ops.permute(x, [THREE], out=torch.empty(3))
    with torch.no_grad():
        assert ops.permute(x, [THREE], out=torch.empty(3)).tolist() == [1.0] * 3


def test_writing_to_out_raises_its_version(backend):
    x, saved = torch.ones(3, requires_grad=True), torch.ones(3)
    y = (x * saved).sum()
    ops.permute(torch.zeros(3), [THREE], out=saved, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad):
    x = torch.randn(5, 4, requires_grad=requires_grad)
    index, repeated = torch.randperm(5), torch.tensor([0, 0, 1, 2, 3])
    for op in (torch.ops.isthmus.permute, torch.ops.isthmus.permute_adjoint):
        torch.library.opcheck(op, (x, [index], [0], "auto"))
        torch.library.opcheck(op, (x, [repeated, torch.randperm(4)], [0, 1], "auto"))
        torch.library.opcheck(op, (x.t(), [index], [1], "auto"))
        torch.library.opcheck(op, (x, [], [], "auto"))
    if not requires_grad:
        torch.library.opcheck(torch.ops.isthmus.permute_out, (x, [index], [0], "auto"), {"out": torch.empty(5, 4)})


def test_compile_full_graph_with_gradients_and_out():
    torch._dynamo.reset()
    index = shuffled((5, 4))
    a, b = torch.randn(5, 4), torch.randn(5, 4, requires_grad=True)
    w = torch.tensor(0.3)
    compiled = torch.compile(
        lambda a, b, w, index: ops.permute(ops.lerp_permuted(a, b, w, index), index),
        fullgraph=True,
        backend="aot_eager",
    )
    result = compiled(a, b, w, index)
    assert same_bits(result.detach(), ops.permute(ops.lerp_permuted(a, b.detach(), w, index), index))
    result.sum().backward()
    assert torch.allclose(b.grad, torch.full((5, 4), 0.3))
    out = torch.empty(5, 4)
    torch.compile(lambda x, index, out: ops.permute(x, index, out=out), fullgraph=True, backend="aot_eager")(
        a, index, out
    )
    assert torch.equal(out, indexed(a, index))
