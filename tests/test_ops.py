"""The public contract of the ops: structure, strides, aliasing, errors, backends, gradients and compilation."""

from __future__ import annotations

import importlib
import types

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from isthmus import _dispatch, _native, ops, reference
from isthmus.errors import BackendError, InputError, IsthmusError
from isthmus.testing import same_bits


def pair(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2)]


# --- structure, strides, memory ---------------------------------------------------------------------------------------


def test_lists_give_lists_in_order(backend):
    a = [torch.full((3, 2), 1.0), torch.tensor(2.0), torch.empty(0, 4), torch.full((3, 2), 5.0), torch.ones(7).double()]
    b = [x + 2 for x in a]
    result = ops.lerp(a, b, 0.5, backend=backend)
    assert [tuple(x.shape) for x in result] == [(3, 2), (), (0, 4), (3, 2), (7,)]
    assert [x.dtype for x in result] == [x.dtype for x in a]
    assert all(torch.equal(x, y + 1) for x, y in zip(result, a, strict=True))
    total = ops.weighted_sum([a, b], [2.0, -1.0], backend=backend)
    assert all(torch.equal(x, y - 2) for x, y in zip(total, a, strict=True))


def test_lists_of_plain_tensors_give_tensors_of_their_own(backend):
    a, b = [torch.ones(8, 4) for _ in range(5)], [torch.zeros(8, 4) for _ in range(5)]
    result = ops.lerp(a, b, 0.25, backend=backend)
    result[0].zero_()
    assert all(torch.equal(x, torch.full((8, 4), 0.75)) for x in result[1:])
    assert all(torch.equal(x, torch.ones(8, 4)) for x in a)


def test_weights_of_each_tensor(backend):
    a, b = [torch.zeros(3), torch.zeros(2, 2)], [torch.ones(3), torch.full((2, 2), 10.0)]
    for weight in ([0.25, 0.5], torch.tensor([0.25, 0.5])):
        first, second = ops.lerp(a, b, weight, backend=backend)
        assert first.tolist() == [0.25] * 3
        assert second.tolist() == [[5.0] * 2] * 2
    for weights in ([[1.0, 2.0], 3.0], [[1.0, 2.0], [3.0, 3.0]], torch.tensor([[1.0, 2.0], [3.0, 3.0]])):
        first, second = ops.weighted_sum([b, b], weights, backend=backend)
        assert first.tolist() == [4.0] * 3
        assert second.tolist() == [[50.0] * 2] * 2


def test_an_empty_list_gives_an_empty_list(backend):
    assert ops.lerp([], [], 0.5, backend=backend) == []
    assert ops.weighted_sum([[], []], [1.0, 2.0], backend=backend) == []
    assert ops.weighted_sum([[], []], [[], []], backend=backend) == []


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x[1:, 1:],
        lambda x: x.expand(3, *x.shape),
        lambda x: x.view(2, 3, 2, 5).to(memory_format=torch.channels_last),
        lambda x: x[0, 0],
    ],
    ids=["plain", "transposed", "strided", "offset", "expanded", "channels_last", "0-dim"],
)
def test_any_strides(backend, view):
    a, b = (view(x) for x in pair(6, 10))
    for x, y in [(a, b), (a, b.contiguous()), (a.contiguous(), b)]:
        result = ops.lerp(x, y, 0.3, backend=backend)
        assert result.stride() == torch.empty_like(x).stride()
        assert same_bits(result, reference.lerp(a, b, 0.3).reshape(a.shape))
        out = torch.zeros(*a.shape, 2)[..., 0]  # strides unlike those of the inputs
        assert ops.weighted_sum([x, y], [2.0, -1.0], out=out, backend=backend) is out
        assert same_bits(out, reference.weighted_sum([a, b], [2.0, -1.0]))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_tensors_are_combined_as_complex(backend, dtype):
    a, b = torch.tensor([1 + 2j, 0j], dtype=dtype), torch.tensor([3 - 2j, 4j], dtype=dtype)
    assert ops.lerp(a, b, 0.25, backend=backend).tolist() == [1.5 + 1j, 1j]
    assert ops.lerp(a.conj(), b.conj(), 0.25, backend=backend).tolist() == [1.5 - 1j, -1j]
    assert ops.lerp(a.conj().imag, b.conj().imag, 0.25, backend=backend).tolist() == [-1.0, -1.0]
    assert ops.lerp(a[:1].conj().imag, a[:1].conj().imag, 0.0, backend=backend).tolist() == [-2.0]


def test_out_may_be_exactly_an_input(backend):
    a, b = pair(1000)
    expected = reference.lerp(a, b, 0.3)
    for target in (0, 1):
        inputs = [a.clone(), b.clone()]
        assert ops.lerp(*inputs, 0.3, out=inputs[target], backend=backend) is inputs[target]
        assert same_bits(inputs[target], expected)
    assert same_bits(ops.weighted_sum([a, a, b], [1.0, 1.0, 1.0], out=a, backend=backend), a)


def test_out_takes_its_own_dtype(backend):
    a, b = pair(100)
    out = torch.empty(100, dtype=torch.float64)
    assert same_bits(ops.lerp(a, b, 0.3, out=out, backend=backend), reference.lerp(a, b, 0.3).double())


@pytest.mark.parametrize("offset", [1, 50, -1])
def test_partial_overlap_is_an_error(backend, offset):
    memory = torch.randn(300)
    a, out = memory[100:200], memory[100 + offset : 200 + offset]
    with pytest.raises(InputError, match="overlap in memory"):
        ops.lerp(a, torch.randn(100), 0.5, out=out, backend=backend)


def test_an_output_that_is_an_input_of_another_place_is_an_error(backend):
    a, b = [torch.ones(4), torch.ones(4)], [torch.zeros(4), torch.zeros(4)]
    with pytest.raises(InputError, match=r"overlap in memory"):
        ops.lerp(a, b, 0.5, out=[a[1], a[0]], backend=backend)
    with pytest.raises(InputError, match=r"overlap in memory"):
        ops.lerp(a, b, 0.5, out=[b[0], b[0]], backend=backend)
    with pytest.raises(InputError, match=r"overlap in memory"):
        ops.lerp(a, b, 0.5, out=[torch.empty(8)[0:4], a[0]], backend=backend)
    assert ops.lerp(a, b, 0.5, out=[b[0], a[1]], backend=backend)[0] is b[0]


def test_inputs_are_never_modified(backend):
    a, b = pair(5000)
    copies = a.clone(), b.clone()
    ops.lerp(a, b, 0.3, backend=backend)
    ops.weighted_sum([a, b], [0.5, 2.0], backend=backend)
    assert same_bits(a, copies[0])
    assert same_bits(b, copies[1])


# --- bad input --------------------------------------------------------------------------------------------------------

ONES = torch.ones(3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.lerp(ONES, torch.ones(4), 0.5), r"b has shape \(4,\), expected \(3,\)"),
        (lambda: ops.lerp([ONES, ONES], [ONES, torch.ones(3, 1)], 0.5), r"b\[1\] has shape \(3, 1\)"),
        (lambda: ops.lerp([ONES], [ONES, ONES], 0.5), "b has 2 tensors and a has 1"),
        (lambda: ops.lerp(ONES, ONES.long(), 0.5), "b has dtype torch.int64"),
        (lambda: ops.lerp(ONES, ONES.to(torch.complex64), 0.5), "mix no real and complex"),
        (lambda: ops.lerp(ONES, ONES.to_sparse(), 0.5), "sparse"),
        (lambda: ops.lerp(ONES, torch.ones(3, device="meta"), 0.5), "b is on meta, expected cpu"),
        (
            lambda: ops.lerp([ONES, ONES.to("meta")], [ONES, ONES.to("meta")], 0.5),
            r"a\[1\] is on meta and a\[0\] on cpu, expected all tensors of a call on one device",
        ),
        (
            lambda: ops.lerp([ONES.to("meta"), ONES], [ONES.to("meta"), ONES], 0.5),
            r"a\[1\] is on cpu and a\[0\] on meta",
        ),
        (lambda: ops.lerp(ONES, 3.0, 0.5), "b is a float"),
        (lambda: ops.lerp({"w": ONES}, ONES, 0.5), "a is a dict"),
        (lambda: ops.lerp([ONES], [None], 0.5), "b is a NoneType"),
        (lambda: ops.lerp(ONES, ONES, float("nan")), "weight is nan"),
        (lambda: ops.lerp(ONES, ONES, torch.ones(2)), r"weight is a tensor of shape \(2,\)"),
        (lambda: ops.lerp(ONES, ONES, 0.5, out=torch.ones(2)), r"out has shape \(2,\)"),
        (lambda: ops.lerp(ONES, ONES, 0.5, out=torch.ones(3).long()), "out has dtype torch.int64"),
        (lambda: ops.lerp(ONES, ONES, 0.5, backend="gpu"), "'gpu' is not a backend"),
        (lambda: ops.weighted_sum([], []), "no tensors"),
        (lambda: ops.weighted_sum([ONES, ONES], [1.0]), "2 tensors and 1 weights"),
        (lambda: ops.weighted_sum([ONES], torch.ones(1, 2)), r"a tensor of shape \(1, 2\)"),
        (lambda: ops.weighted_sum([ONES], torch.tensor(1.0)), r"a tensor of shape \(\)"),
        (lambda: ops.weighted_sum([[ONES, ONES]], [[1.0]]), r"weights\[0\] has 1 entries, expected 2"),
        (lambda: ops.lerp([ONES, ONES], [ONES, ONES], [0.5]), "weight has 1 entries and there are 2 tensors"),
        (lambda: ops.lerp([ONES, ONES], [ONES, ONES], [0.5, float("nan")]), "weight is nan"),
        (lambda: ops.weighted_sum([ONES], [float("inf")]), "weight is inf"),
    ],
)
def test_bad_input_names_the_thing(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_tensor_subclasses_are_refused_by_name():
    class Tagged(torch.Tensor):
        pass

    with pytest.raises(InputError, match="Tagged"):
        ops.lerp(ONES, ONES.as_subclass(Tagged), 0.5)


# --- backends ---------------------------------------------------------------------------------------------------------


def test_auto_takes_the_compiled_backend_on_the_cpu():
    assert _dispatch.choose("auto", torch.device("cpu")) == "cpp"


def test_auto_takes_triton_on_a_gpu(monkeypatch):
    monkeypatch.setattr(_native, "load_triton", lambda: (types.SimpleNamespace(INTERPRETED=False), "Triton"))
    _dispatch._triton_or_warn.cache_clear()
    assert _dispatch.choose("auto", torch.device("cuda")) == "triton"
    monkeypatch.setattr(_native, "load_triton", lambda: (None, "Triton could not be loaded (why)"))
    _dispatch._triton_or_warn.cache_clear()
    with pytest.warns(UserWarning, match=r"\(why\)"):
        assert _dispatch.choose("auto", torch.device("cuda")) == "reference"
    with pytest.raises(BackendError, match=r"\(why\)"):
        _dispatch.choose("triton", torch.device("cuda"))
    _dispatch._triton_or_warn.cache_clear()


def test_a_driver_that_cannot_be_built_is_no_triton(monkeypatch):
    def no_compiler():
        raise RuntimeError("Failed to find C compiler.")

    module = types.SimpleNamespace(INTERPRETED=False, VERSION="3", load_driver=no_compiler)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_native.importlib, "import_module", lambda name: module)
    monkeypatch.setattr(_native, "load_triton", _native.load_triton.__wrapped__)
    _dispatch._triton_or_warn.cache_clear()
    message = r"driver could not be built or loaded \(Failed to find C compiler\)\. Install triton and a C compiler"
    with pytest.warns(UserWarning, match=message):
        assert _dispatch.choose("auto", torch.device("cuda")) == "reference"
    with pytest.raises(BackendError, match=message):
        _dispatch.choose("triton", torch.device("cuda"))
    _dispatch._triton_or_warn.cache_clear()
    module.INTERPRETED = True  # needs none
    assert _native.load_triton()[0] is module


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: ops.consensus([ONES], density=0.5, rescale="l1", backend="cuda"), "rescale='l1'"),
        (lambda: ops.gram([ONES], backend="cuda"), "gram"),
        (lambda: ops.permute(ONES, [torch.arange(3)], backend="cuda"), "permute"),
        (lambda: ops.lerp_permuted(ONES, ONES, 0.5, [torch.arange(3)], backend="cuda"), "lerp_permuted"),
    ],
)
def test_what_cuda_does_not_have_is_named(monkeypatch, call, name):
    cuts = reference.Cuts(torch.zeros(1, 1).double(), torch.zeros(1, 1, dtype=torch.int64))
    none = torch.zeros(1, 1, 1, dtype=torch.int64)
    selected = reference.Selected([cuts], none, none, None)
    stand_in = types.SimpleNamespace(ON_HOST=True, select=lambda *args, **options: selected)
    monkeypatch.setattr(_native, "cuda", lambda: stand_in)
    with pytest.raises(BackendError, match=f"backend 'cuda' has no kernel for {name}"):
        call()


def test_triton_takes_tensors_where_its_kernels_run(monkeypatch):
    for interpreted, right, wrong in ((False, "cuda", "cpu"), (True, "cpu", "cuda")):
        module = types.SimpleNamespace(INTERPRETED=interpreted)
        monkeypatch.setattr(_native, "load_triton", lambda module=module: (module, "Triton"))
        assert _dispatch.choose("triton", torch.device(right)) == "triton"
        with pytest.raises(BackendError, match=f"these are on {wrong}"):
            _dispatch.choose("triton", torch.device(wrong))


def test_a_forced_backend_is_the_one_that_runs(monkeypatch):
    monkeypatch.setattr(reference, "lerp", lambda *args, **kwargs: torch.full((3,), 7.0))
    assert ops.lerp(ONES, ONES, 0.5, backend="reference").tolist() == [7.0] * 3
    assert ops.lerp(ONES, ONES, 0.5, backend="cpp").tolist() == [1.0] * 3


def test_cuda_does_not_take_tensors_of_the_cpu():
    with pytest.raises(BackendError, match="cuda"):
        ops.lerp(ONES, ONES, 0.5, backend="cuda")


def test_cpp_does_not_take_tensors_elsewhere():
    with pytest.raises(BackendError, match="cuda"):
        _dispatch.choose("cpp", torch.device("cuda"))


def test_a_missing_extension_is_named_and_auto_falls_back_with_a_warning(monkeypatch):
    monkeypatch.setattr(_native, "load_cpu", lambda: (None, "the C++ extension isthmus._cpu could not be loaded (why)"))
    _dispatch._cpp_or_warn.cache_clear()
    with pytest.raises(BackendError, match=r"could not be loaded \(why\)"):
        ops.lerp(ONES, ONES, 0.5, backend="cpp")
    with pytest.warns(UserWarning, match="slower reference backend"):
        assert ops.lerp(ONES, 3 * ONES, 0.5).tolist() == [2.0] * 3
    rows = {row.name: row for row in _dispatch.describe()}
    assert rows["reference"].chosen
    assert not rows["cpp"].available
    assert "(why)" in rows["cpp"].reason
    _dispatch._cpp_or_warn.cache_clear()


def test_describe_marks_one_backend_and_one_instruction_set():
    rows = _dispatch.describe()
    assert [row.name for row in rows if row.chosen and " " not in row.name] == ["cpp"]
    assert sum(row.chosen for row in rows if " " in row.name) == 1
    assert all(row.reason for row in rows)


def test_the_host_does_not_wait_for_weights_on_a_gpu(monkeypatch):
    """As if the tensors here were on one: Triton's kernels take the weights as they are, NaN too."""
    if _native.load_triton()[0] is None:
        pytest.skip(_native.load_triton()[1])
    a, b = pair(50)
    w, ws, rows = torch.tensor(0.3), torch.tensor([0.3, 0.9]), torch.tensor([[0.3, 0.9], [2.0, -1.0]])
    x, weight = a.view(5, 10), b.view(5, 10)

    def results(backend):
        return [
            ops.lerp(a, b, w, backend=backend),
            *ops.lerp([a, b], [b, a], ws, backend=backend),
            *ops.lerp([a, b], [b, a], w, backend=backend),
            ops.weighted_sum([a, b], ws, backend=backend),
            *ops.weighted_sum([[a, b], [b, a]], rows, backend=backend),
        ]

    def refuse(*args):
        raise AssertionError("a value was read")

    expected = results("reference")
    layers = ops.multi_linear(x, weight, x, ws, backend="reference")
    for name in ("_validate", "elementwise", "multi_linear"):
        module = importlib.import_module(f"isthmus.ops.{name}")
        monkeypatch.setattr(module, "stays_unread", lambda weights, tensors: isinstance(weights, torch.Tensor))
    with monkeypatch.context() as context:
        for name in ("item", "tolist", "__float__", "__bool__"):
            context.setattr(torch.Tensor, name, refuse)
        found = results("triton")
        unknown = ops.lerp(a, b, torch.tensor(torch.nan), backend="triton")
        at_once = ops.multi_linear(x, weight, x, ws, backend="triton")
    assert all(map(same_bits, found, expected))
    assert unknown.isnan().all()
    torch.testing.assert_close(at_once, layers)
    with pytest.raises(InputError, match=r"weight is a tensor of shape \(2,\)"):
        ops.lerp(a, b, ws, backend="triton")


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0.0, 0.3, 0.7, 1.0])
def test_gradients_of_lerp(weight):
    a, b = (x.requires_grad_() for x in pair(4, 3, dtype=torch.float64))
    w = torch.tensor(weight, dtype=torch.float64, requires_grad=True)
    if weight in (0.0, 1.0):  # the copy's derivative in the weight is that of the line
        assert gradcheck(lambda a, b: ops.lerp(a, b, weight), (a, b))
        ops.lerp(a, b, w).sum().backward()
        assert torch.allclose(w.grad, (b - a).sum())
    else:
        assert gradcheck(ops.lerp, (a, b, w))
        assert gradgradcheck(ops.lerp, (a, b, w))


def test_gradients_of_weighted_sum():
    tensors = [x.requires_grad_() for seed in (0, 1) for x in pair(5, dtype=torch.float64, seed=seed)]
    w = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)

    def function(w, *xs):
        return ops.weighted_sum(xs, w)

    assert gradcheck(function, (w, *tensors))
    assert gradgradcheck(function, (w, *tensors))


def test_gradients_of_weights_of_each_tensor():
    a, b = (x.requires_grad_() for x in pair(5, dtype=torch.float64))
    w = torch.tensor([0.3, 0.8], dtype=torch.float64, requires_grad=True)
    table = torch.tensor([[0.5, -1.0], [2.0, 0.25]], dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda a, b, w: ops.lerp([a, b], [b, a], w), (a, b, w))
    assert gradcheck(lambda a, b, table: ops.weighted_sum([[a, b], [b, a]], table), (a, b, table))
    expected = 0.5 * a + 2 * b
    assert torch.allclose(ops.weighted_sum([[a, b], [b, a]], [[0.5, 1.0], 2.0])[0], expected)


def test_gradients_of_complex_tensors():
    a, b = (torch.randn(3, dtype=torch.complex128, requires_grad=True) for _ in range(2))
    w = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(ops.lerp, (a, b, w))
    assert gradcheck(lambda w, a, b: ops.weighted_sum([a, b], w), (torch.stack([w, w]).detach().requires_grad_(), a, b))


def test_gradients_of_lists_and_low_precision():
    a, b = pair(100, dtype=torch.bfloat16)
    w = torch.tensor(0.3, requires_grad=True)
    first, second = ops.lerp([a, a], [b, b], w)
    (first.float().sum() + second.float().sum()).backward()
    assert w.grad.dtype == torch.float32
    assert torch.allclose(w.grad, 2 * (b.float() - a.float()).sum())


def test_out_with_gradients_is_an_error():
    a = torch.ones(3, requires_grad=True)
    with pytest.raises(InputError, match="out= cannot be used"):
        ops.lerp(a, ONES, 0.5, out=torch.empty(3))
    with torch.no_grad():
        assert ops.lerp(a, 3 * ONES, 0.5, out=torch.empty(3)).tolist() == [2.0] * 3


@pytest.mark.parametrize("requires_grad", [False, True])
def test_bad_factors_are_refused_with_and_without_gradients(requires_grad):
    a = torch.ones(3, requires_grad=requires_grad)
    with pytest.raises(InputError, match="weight is nan"):
        ops.lerp(a, ONES, float("nan"))
    with pytest.raises(InputError, match=r"weight is a tensor of shape \(2,\)"):
        ops.lerp(a, ONES, torch.ones(2))
    with pytest.raises(InputError, match="weight is inf"):
        ops.weighted_sum([a, ONES], [1.0, float("inf")])


def test_writing_to_out_raises_its_version(backend):
    x = torch.ones(3, requires_grad=True)
    saved = torch.ones(3)
    y = (x * saved).sum()
    ops.lerp(saved, saved, 0.5, out=saved, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_inference_mode(backend):
    with torch.inference_mode():
        out = torch.empty(3)
        assert ops.lerp(ONES, 3 * ONES, 0.5, out=out, backend=backend).tolist() == [2.0] * 3


# --- torch.compile and torch.ops --------------------------------------------------------------------------------------


def test_compile_full_graph_with_tensor_factors():
    torch._dynamo.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    @torch.compile(fullgraph=True, backend=count)
    def function(a, b, w, ws):
        return ops.weighted_sum([ops.lerp(a, b, w), ops.lerp([a, b], [b, a], w)[1]], ws)

    a, b = pair(50)
    for value in torch.linspace(0, 1, 20):
        ws = torch.stack([value, 1 - value])
        eager = ops.weighted_sum([ops.lerp(a, b, value), ops.lerp(b, a, value)], ws)
        assert same_bits(function(a, b, value, ws), eager)
    assert len(graphs) == 1


def test_compile_full_graph_with_float_factors():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda a, b, w: ops.weighted_sum([ops.lerp(a, b, w), b], [w, 1.0]), fullgraph=True, backend="aot_eager"
    )
    a, b = pair(50)
    for value in (0.25, 0.5, 0.75):
        assert same_bits(compiled(a, b, value), ops.weighted_sum([ops.lerp(a, b, value), b], [value, 1.0]))


def test_compile_aot_eager_with_gradients_and_out():
    torch._dynamo.reset()
    a, b = pair(50)
    w = torch.tensor(0.25, requires_grad=True)
    compiled = torch.compile(ops.lerp, fullgraph=True, backend="aot_eager")
    compiled(a, b, w).sum().backward()
    assert torch.allclose(w.grad, (b - a).sum())
    out = torch.empty(50)
    with torch.no_grad():
        torch.compile(lambda a, b, w, out: ops.lerp(a, b, w, out=out), fullgraph=True, backend="aot_eager")(
            a, b, w, out
        )
    assert same_bits(out, reference.lerp(a, b, 0.25))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad):
    a, b = (x.requires_grad_(requires_grad) for x in pair(5, 4))
    w, ws = torch.tensor(0.3, requires_grad=requires_grad), torch.tensor([0.3, 0.7], requires_grad=requires_grad)
    torch.library.opcheck(torch.ops.isthmus.lerp, (a, b, w, "auto"))
    torch.library.opcheck(torch.ops.isthmus.lerp, (a.t(), b.t().contiguous(), w, "auto"))
    torch.library.opcheck(torch.ops.isthmus.weighted_sum, ([a, b], ws, "auto"))
    if not requires_grad:
        out = torch.empty(5, 4)
        torch.library.opcheck(torch.ops.isthmus.lerp_out, (a, b, w, "auto"), {"out": out})
        torch.library.opcheck(torch.ops.isthmus.weighted_sum_out, ([a, b], ws, "auto"), {"out": out})


def test_every_error_of_ours_is_an_isthmus_error():
    assert issubclass(InputError, IsthmusError)
    assert issubclass(InputError, ValueError)
    assert issubclass(BackendError, RuntimeError)
