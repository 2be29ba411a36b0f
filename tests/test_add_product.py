"""Products over gathered rows against float64."""

from __future__ import annotations

import pytest
import torch

from isthmus import _native, ops
from isthmus.errors import InputError
from isthmus.testing import same_bits


@pytest.fixture(params=["reference", "cpp", "triton"])
def product(request):
    """The backends that take this op."""
    module, reason = {"cpp": _native.load_cpu, "triton": _native.load_triton}.get(
        request.param, lambda: (torch, "PyTorch")
    )()
    if module is None:
        pytest.skip(reason)
    return request.param


def make(rows, others, units_a, units_b, rows_b=None):
    generator = torch.Generator().manual_seed(rows + units_a)
    a = torch.randn(rows, others, units_a, generator=generator)
    b = torch.randn(rows_b or rows, others, units_b, generator=generator)
    index, before = (torch.randint(len(b), (rows,), generator=generator) for _ in range(2))
    return a, b, index, before, torch.randn(units_a, units_b, generator=generator)


def bound(a, b):
    """A millionth of ‖a‖ ‖b‖ for the units of every element."""
    return 1e-6 * (1 + a.double().flatten(0, 1).norm(dim=0)[:, None] * b.double().flatten(0, 1).norm(dim=0)[None, :])


SHAPES = [(1, 1, 1, 1), (7, 3, 5, 70), (130, 1, 65, 64), (40, 9, 16, 33), (3, 700, 8, 5), (60, 90, 4, 6)]


@pytest.mark.parametrize(("rows", "others", "units_a", "units_b"), SHAPES)
def test_it_adds_the_product(product, rows, others, units_a, units_b):
    a, b, index, _, start = make(rows, others, units_a, units_b)
    for places in (None, index):
        out = start.clone()
        ops.add_product(out, a, b, places, backend=product)
        moved = (b if places is None else b[places]).double()
        expected = start.double() + a.double().flatten(0, 1).T @ moved.flatten(0, 1)
        assert ((out.double() - expected).abs() <= bound(a, moved)).all()


@pytest.mark.parametrize(("rows", "others", "units_a", "units_b"), SHAPES)
def test_it_adds_what_changes(product, rows, others, units_a, units_b):
    a, b, index, before, start = make(rows, others, units_a, units_b, rows_b=rows + 2)
    changed = (index != before).nonzero().flatten()
    out = start.clone()
    ops.add_product(out, a, b, index, rows=changed, before=before, backend=product)
    difference = b[index].double() - b[before].double()
    expected = start.double() + a.double().flatten(0, 1).T @ difference.flatten(0, 1)
    assert ((out.double() - expected).abs() <= bound(a, b[index].abs() + b[before].abs())).all()
    unchanged = out.clone()
    ops.add_product(out, a, b, index, rows=changed[:0], before=before, backend=product)
    assert same_bits(out, unchanged)


def test_values_by_hand(product):
    a = torch.tensor([[[1.0, 2.0]], [[0.0, 1.0]]])
    b = torch.tensor([[[1.0]], [[10.0]]])
    out = torch.tensor([[100.0], [0.0]])
    ops.add_product(out, a, b, torch.tensor([1, 0]), backend=product)
    assert out.tolist() == [[110.0], [21.0]]
    back = torch.tensor([0, 1])
    ops.add_product(out, a, b, back, rows=back, before=torch.tensor([1, 0]), backend=product)
    assert out.tolist() == [[101.0], [12.0]]


def test_strides_and_inputs(product):
    a, b, index, _, start = make(20, 3, 17, 12)
    expected = start.clone()
    ops.add_product(expected, a, b, index, backend=product)
    out = torch.zeros(17, 12, 2)[..., 1].copy_(start)
    copies = a.clone(), b.clone(), index.clone()
    ops.add_product(out, a.mT.contiguous().mT, b.transpose(0, 1).contiguous().transpose(0, 1), index, backend=product)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    ops.add_product(out, a, b, index, backend=product)
    assert all(map(torch.equal, copies, (a, b, index)))


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4)])
def test_nothing_to_add(product, shape):
    a, b = torch.ones(shape[:3]), torch.ones(*shape[:2], shape[3])
    out = torch.ones(shape[2], shape[3])
    ops.add_product(out, a, b, torch.arange(shape[0]), backend=product)
    assert torch.equal(out, torch.ones(shape[2], shape[3]))


A, B, OUT, PLACES = torch.ones(4, 2, 3), torch.ones(4, 2, 5), torch.zeros(3, 5), torch.arange(4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.add_product(OUT, A[0], B), r"a has shape \(2, 3\), expected 3 axes"),
        (lambda: ops.add_product(OUT[0], A, B), r"out has shape \(5,\), expected 2 axes"),
        (lambda: ops.add_product(OUT.T, A, B), r"out has shape \(5, 3\), expected \(3, 5\)"),
        (lambda: ops.add_product(OUT, A, B[1:]), r"b has shape \(3, 2, 5\), which does not fit a with \(4, 2, 3\)"),
        (lambda: ops.add_product(OUT, A.double(), B), "a has dtype torch.float64"),
        (lambda: ops.add_product(OUT, A, B.to("meta")), "b is on meta, expected cpu"),
        (lambda: ops.add_product(OUT, A, B, PLACES[1:]), r"index has .* shape \(3,\) .* expected .* \(4,\)"),
        (lambda: ops.add_product(OUT, A, B, PLACES.int()), "index has dtype torch.int32"),
        (lambda: ops.add_product(OUT, A, B, PLACES + 1), "index has entries outside of 0 to 3"),
        (lambda: ops.add_product(OUT, A, B, PLACES, rows=PLACES), "belong together"),
        (lambda: ops.add_product(OUT, A, B, PLACES, rows=PLACES - 1, before=PLACES), "rows has entries outside"),
        (lambda: ops.add_product(OUT, A, B, PLACES, rows=PLACES, before=PLACES + 4), "before has entries outside"),
        (lambda: ops.add_product(OUT, A.requires_grad_(), B), "add_product records no gradient"),
        (lambda: ops.add_product(A[0].detach(), A.detach(), torch.ones(4, 2, 3)), "out has shape"),
        (lambda: ops.add_product(B[0, :, :2], torch.ones(4, 2, 2), B[:, :, :2]), "out and b overlap in memory"),
    ],
)
def test_bad_input_names_the_thing(call, message):
    with pytest.raises(InputError, match=message):
        call()
    A.requires_grad_(False)


def test_places_are_counted_in_64_bits_where_32_may_not_do(monkeypatch):
    similarity = pytest.importorskip("isthmus.kernels.similarity")
    counted = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: counted.append(str(options["counted"]))

    monkeypatch.setattr(similarity, "_products", Kernel())
    index = torch.zeros(1, dtype=torch.int64).expand(49981)
    for others in (3, 42965, 42966):  # the last are 2 short of 2³¹ rows
        similarity.products(torch.empty(1, others, 1), torch.empty(1, others, 1), index, None, None)
    assert counted == ["int32", "int32", "int64"]


def test_the_products_of_places_in_64_bits(monkeypatch):
    similarity = pytest.importorskip("isthmus.kernels.similarity")
    if not similarity.INTERPRETED:
        pytest.skip("kernels take tensors on a GPU")
    a, b, index, before, _ = make(40, 9, 16, 33)
    rows = torch.arange(40)
    expected = [similarity.products(a, b, index, *more) for more in ((None, None), (rows, before))]
    kernel = similarity._products

    class Wide:
        def __getitem__(self, grid):
            return lambda *args, **options: kernel[grid](*args, **options | {"counted": similarity.tl.int64})

    monkeypatch.setattr(similarity, "_products", Wide())
    found = [similarity.products(a, b, index, *more) for more in ((None, None), (rows, before))]
    assert all(map(torch.equal, found, expected))
