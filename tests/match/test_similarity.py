"""Similarities of units against loops over single elements, and their updates against computing them anew."""

import itertools
import math

import pytest
import torch

from isthmus.errors import InputError
from isthmus.match import PermutationSpec, identity_permutation, random_permutation
from isthmus.match.similarity import Similarity, inner_products, moving_tensors


def positions(segment, start, perm, groups):
    """For each position of a segment its digits, and a function from digits of new units to the old position."""
    sizes = [factor.size for factor in segment]

    def old(digits, own):
        """The position that holds these units before the permutation; ``own`` digits are old ones already."""
        found = 0
        for place, (factor, digit) in enumerate(zip(segment, digits, strict=True)):
            if place not in own and factor.group is not None:
                within = groups[factor.group].within
                order = perm[factor.group]
                if within is None:
                    digit = int(order[digit])
                else:
                    parent = next(i for i, other in enumerate(segment) if other.group == within)
                    head = digits[parent]  # an old one if it is among the own: what stays with it is in its order
                    digit = int(order[perm[within].argsort()[head] if parent in own else head, digit])
            found = found * factor.size + digit
        return start + found

    return list(itertools.product(*map(range, sizes))), old


def segments_of(axis):
    start = 0
    for segment in axis:
        yield start, segment
        start += math.prod(factor.size for factor in segment)


def naive_order(axis, perm, groups):
    order = []
    for start, segment in segments_of(axis):
        every, old = positions(segment, start, perm, groups)
        order += [old(digits, ()) for digits in every]
    return torch.tensor(order)


def naive_similarity(spec, name, a, b, perm, skip=()):
    """S by its definition, element by element."""
    group = spec.groups[name]
    copies = spec.groups[group.within].size if group.within else 1
    children = {other.name for other in spec.groups.values() if other.within == name}
    matrix = torch.zeros(copies * group.size, copies * group.size, dtype=torch.float64)
    for key in spec.axes.keys() - set(skip) - spec.statistics:
        for dimension, axis in enumerate(spec.axes[key]):
            ordered = b[key]
            for other, its in enumerate(spec.axes[key]):
                if other != dimension:
                    ordered = ordered.index_select(other, naive_order(its, perm, spec.groups))
            for start, segment in segments_of(axis):
                names = [factor.group for factor in segment]
                if name not in names or children & set(names):
                    continue
                own = [names.index(member) for member in (group.within, name) if member]
                every, old = positions(segment, start, perm, spec.groups)
                for mine in every:
                    i = number_of(segment, own, mine)
                    at = start + number_of(segment, range(len(segment)), mine)
                    for theirs in itertools.product(*(range(segment[place].size) for place in own)):
                        mixed = list(mine)
                        for place, digit in zip(own, theirs, strict=True):
                            mixed[place] = digit
                        j = number_of(segment, own, mixed)
                        x, y = a[key].select(dimension, at), ordered.select(dimension, old(mixed, own))
                        matrix[i, j] += (x.double() * y.double()).sum()
    return matrix


def number_of(segment, places, digits):
    number = 0
    for place in places:
        number = number * segment[place].size + digits[place]
    return number


CASES = {
    "linear": ({"w": (4, 3), "v": (2, 4), "b": (4,)}, {"w": ("h", None), "v": (None, "h"), "b": ("h",)}, {}, {}),
    "two groups": ({"w": (4, 3), "v": (5, 4), "b": (4,)}, {"w": ("h", "g"), "v": ("e", "h"), "b": ("h",)}, {}, {}),
    "convolution": (
        {"c": (4, 3, 2, 2), "d": (2, 4, 1, 3), "n": (4,)},
        {"c": ("h", "g", None, None), "d": ("e", "h", None, None), "n": ("h",)},
        {},
        {},
    ),
    "flattened": ({"c": (3, 2), "f": (4, 15)}, {"c": ("h", "g"), "f": ("e", ("h", 5))}, {}, {}),
    "product of two": (
        {"c": (3, 2), "d": (4, 2), "f": (2, 24)},
        {"c": ("h", "g"), "d": ("k", None), "f": ("g", ("h", 2, "k"))},
        {},
        {},
    ),
    "concatenation": (
        {"c": (3, 2), "d": (2, 2), "f": (4, 10)},
        {"c": ("h", None), "d": ("k", None), "f": ("g", ["h", "k", 2, "h"])},
        {},
        {},
    ),
    "both axes": ({"w": (4, 4), "v": (3, 4)}, {"w": ("h", "h"), "v": (None, "h")}, {}, {}),
    "heads": (
        {"qkv": (18, 4), "b": (18,), "o": (4, 6), "slope": (3, 2)},
        {
            "qkv": ([("heads", "qk"), ("heads", "qk"), ("heads", "v")], "stream"),
            "b": ([("heads", "qk"), ("heads", "qk"), ("heads", "v")],),
            "o": ("stream", ("heads", "v")),
            "slope": ("heads", None),
        },
        {"qk": "heads", "v": "heads"},
        {"heads": 3},
    ),
    "heads with a digit between": (
        {"o": (4, 18), "p": (12, 2)},
        {"o": ("stream", ("heads", 3, "v")), "p": (("heads", 2, "v"), None)},
        {"v": "heads"},
        {"heads": 3},
    ),
    "two kinds of columns in one product": (
        {"w": (3, 12), "q": (6, 20), "v": (4, 2)},
        {"w": ("stream", ("heads", "q", "v")), "q": (("heads", "q"), "wide"), "v": (("heads", "v"), None)},
        {"q": "heads", "v": "heads"},
        {"heads": 2},
    ),
    "long": ({"w": (3, 700), "v": (2, 3, 600)}, {"w": ("h", None), "v": ("g", "h", None)}, {}, {}),
}


def make(case, dtype=torch.float32):
    shapes, axes, within, sizes = CASES[case]
    torch.manual_seed(0)
    a = {key: torch.randn(shape, dtype=dtype) for key, shape in shapes.items()}
    b = {key: torch.randn(shape, dtype=dtype) for key, shape in shapes.items()}
    return PermutationSpec.from_dict(axes, a, within=within, sizes=sizes), a, b


@pytest.mark.parametrize("case", [case for case in CASES if case != "long"])
def test_similarity_is_what_its_definition_says(case, kernels):
    spec, a, b = make(case)
    permutation = random_permutation(spec, torch.Generator().manual_seed(1))
    pairs = moving_tensors(spec, a, b)
    for name in spec.groups:
        similarity = Similarity(spec, name, pairs, backend=kernels)
        similarity.update(permutation)
        expected = naive_similarity(spec, name, a, b, permutation)
        torch.testing.assert_close(similarity.matrix.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_updates_keep_up(case, kernels):
    spec, a, b = make(case)
    pairs = moving_tensors(spec, a, b)
    generator = torch.Generator().manual_seed(1)
    kept = {name: Similarity(spec, name, pairs, backend=kernels) for name in spec.groups}
    permutation = random_permutation(spec, generator)
    for step in range(40 if kernels == "auto" else 6):
        name = list(spec.groups)[step % len(spec.groups)]
        order = permutation[name].clone()
        order[..., :2] = order[..., :2].flip(-1)  # two units change places
        permutation[name] = order if step % 5 else random_permutation(spec, generator)[name]
        for name, similarity in kept.items():
            similarity.update(permutation)
            fresh = Similarity(spec, name, pairs)
            fresh.update(permutation)
            torch.testing.assert_close(similarity.matrix, fresh.matrix, rtol=1e-5, atol=1e-6 * fresh.weight)


def test_nothing_is_computed_where_nothing_changed():
    spec, a, b = make("two groups")
    pairs = moving_tensors(spec, a, b)
    similarity = Similarity(spec, "h", pairs)
    permutation = identity_permutation(spec)
    similarity.update(permutation)
    version, matrix = similarity.version, similarity.matrix.clone()
    permutation["h"] = permutation["h"].flip(0)  # its own order is not part of S
    similarity.update(permutation)
    assert similarity.version == version
    assert torch.equal(similarity.matrix, matrix)
    permutation["e"] = permutation["e"].flip(0)
    similarity.update(permutation)
    assert similarity.version == version + 1


def test_the_sum_over_an_order_is_the_objective():
    spec, a, b = make("convolution")
    pairs = moving_tensors(spec, a, b)
    permutation = random_permutation(spec, torch.Generator().manual_seed(2))
    similarity = Similarity(spec, "h", pairs)  # on an axis of every tensor
    similarity.update(permutation)
    reached = similarity.matrix.gather(1, permutation["h"][:, None]).sum(dtype=torch.float64)
    objective = sum(gram[0, 1] for gram in inner_products(spec, pairs, [{}, permutation]).values())
    torch.testing.assert_close(reached, objective, rtol=1e-5, atol=1e-5)
    assert abs(float(reached)) <= similarity.weight


def test_statistics_integers_and_ties_do_not_count():
    state = {
        "w": torch.randn(4, 2),
        "running_mean": torch.randn(4),
        "count": torch.arange(4),
        "tied": torch.randn(3, 4),
    }
    spec = PermutationSpec.from_dict(
        {"w": ("h", None), "running_mean": ("h",), "count": ("h",), "tied": (None, "h"), "again": (None, "h")},
        state | {"again": state["tied"]},
    )
    a, b = ({key: tensor.clone() for key, tensor in state.items()} for _ in range(2))
    for model in (a, b):
        model["again"] = model["tied"]
    assert list(moving_tensors(spec, a, b)) == ["again", "w"]
    b["tied"] = b["tied"].clone()  # tied in one model alone, but equal in both
    assert list(moving_tensors(spec, a, b)) == list(moving_tensors(spec, b, a)) == ["again", "w"]
    b["tied"] += 1
    assert list(moving_tensors(spec, a, b)) == list(moving_tensors(spec, b, a)) == ["again", "tied", "w"]


def test_complex_and_real_do_not_mix():
    spec, a, b = make("linear")
    with pytest.raises(InputError, match="'v' is complex in one model and real in another"):
        moving_tensors(spec, a | {"v": a["v"].to(torch.complex64)}, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_other_dtypes(dtype):
    spec, a, b = make("convolution", dtype)
    permutation = random_permutation(spec, torch.Generator().manual_seed(1))
    wide = [
        {key: torch.view_as_real(t).double() if t.is_complex() else t.double() for key, t in model.items()}
        for model in (a, b)
    ]
    axes = spec.axes
    if dtype.is_complex:
        two = PermutationSpec.from_dict({"x": (None,)}, {"x": torch.zeros(2)}).axes["x"]
        axes = {key: (*its, *two) for key, its in axes.items()}
    similarity = Similarity(spec, "h", moving_tensors(spec, a, b))
    similarity.update(permutation)
    expected = naive_similarity(PermutationSpec(spec.groups, axes), "h", *wide, permutation)
    torch.testing.assert_close(similarity.matrix.double(), expected, rtol=1e-5, atol=1e-5)


def test_what_columns_share_is_left_out_on_request():
    spec, a, b = make("two kinds of columns in one product")
    permutation = random_permutation(spec, torch.Generator().manual_seed(1))
    similarity = Similarity(spec, "q", moving_tensors(spec, a, b), shared=False)
    similarity.update(permutation)
    expected = naive_similarity(spec, "q", a, b, permutation, skip=["w"])
    torch.testing.assert_close(similarity.matrix.double(), expected, rtol=1e-5, atol=1e-5)


def test_products_are_the_same_on_any_number_of_threads():
    torch.manual_seed(0)
    a, b = torch.randn(96, 40, 3, 3), torch.randn(96, 40, 3, 3)
    spec = PermutationSpec.from_dict({"w": ("h", "g", None, None)}, {"w": a})
    permutation = random_permutation(spec, torch.Generator().manual_seed(0))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for name in ("g", "h"):
                similarity = Similarity(spec, name, moving_tensors(spec, {"w": a}, {"w": b}))
                similarity.update(permutation)
                found.append(similarity.matrix)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(matrix, found[i % 2]) for i, matrix in enumerate(found))
