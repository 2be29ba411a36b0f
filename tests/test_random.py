"""Philox against the vectors of its authors, and masks that depend on seed, model, name and index alone."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from isthmus import ops, reference
from isthmus.errors import InputError
from isthmus.testing import FLOATS, contested, same_bits

DEVICE = torch.device("cpu")


def philox(counter: str, key: str) -> str:
    words = [torch.tensor([int(word, 16)]) for word in counter.split()]
    k0, k1 = (int(word, 16) for word in key.split())
    return " ".join(f"{word.item():08x}" for word in reference.philox(words, (k0, k1)))


@pytest.mark.parametrize(
    ("counter", "key", "output"),
    [
        ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_known_answers(counter, key, output):
    assert philox(counter, key) == output


def test_keys_are_the_start_of_a_hash_of_seed_model_and_name():
    keys = reference.random_keys(7, ["α.weight", "b"], models=3)
    assert keys.shape == (2, 3, 4)
    digest = hashlib.sha256(
        b"isthmus" + (7).to_bytes(8, "little") + (2).to_bytes(8, "little") + "α.weight".encode()
    ).digest()
    assert keys[0, 2].tolist() == [int.from_bytes(digest[i : i + 4], "little") for i in (0, 4, 8, 12)]
    assert len({tuple(words) for words in keys.view(-1, 4).tolist()}) == 6
    assert reference.random_keys((1 << 64) - 1, ["a"], 1).shape == (1, 1, 4)


def test_an_element_has_the_word_of_its_index():
    key = (3, 4, 5, 6)
    counters = [torch.tensor([c]) for c in (2, 0, 5, 6)]
    block = [word.item() for word in reference.philox(counters, (3, 4))]
    assert reference.random_words(key, 8, 4, DEVICE).tolist() == block
    assert reference.random_words(key, 10, 1, DEVICE).tolist() == block[2:3]
    whole = reference.random_words(key, 0, 100, DEVICE)
    for start in range(9):
        for numel in (0, 1, 3, 4, 5, 90):
            assert torch.equal(reference.random_words(key, start, numel, DEVICE), whole[start : start + numel])


def test_indices_beyond_32_bits_reach_the_second_counter_word():
    counters = [torch.tensor([c]) for c in (1, 2, 0, 0)]
    block = [word.item() for word in reference.philox(counters, (0, 0))]
    assert reference.random_words((0, 0, 0, 0), 4 * (2 * 2**32 + 1) + 1, 2, DEVICE).tolist() == block[1:3]


def mask(name="w", *, density, seed=0, model=0, numel=100_000, backend="auto", **options):
    """The entries of one model that survive, seen through a merge of ones."""
    models = [torch.ones(numel) if k == model else torch.zeros(numel) for k in range(model + 1)]
    result = ops.consensus(
        models, density=density, names=name, seed=seed, sparsify="random", merge_func="sum", backend=backend, **options
    )
    return result != 0


def test_masks_keep_what_was_asked_for(backend):
    for density in (0.01, 0.25, 0.5, 0.9):
        kept = mask(density=density, backend=backend).double().mean().item()
        assert abs(kept - density) < 5 * math.sqrt(density * (1 - density) / 100_000)


def test_masks_differ_with_model_name_and_seed_and_are_independent(backend):
    for p in (0.5, 0.1):
        first = mask(density=p, backend=backend)
        assert torch.equal(first, mask(density=p, backend=backend))
        agree = p * p + (1 - p) * (1 - p)
        for other in (
            mask(density=p, model=1, backend=backend),
            mask("v", density=p, backend=backend),
            mask(density=p, seed=1, backend=backend),
        ):
            share = (first == other).double().mean().item()
            assert abs(share - agree) < 5 * math.sqrt(agree * (1 - agree) / 100_000)


def test_masks_are_those_of_the_definition(backend):
    key = reference.random_keys(9, ["layer.weight"], 2)[0, 1].tolist()
    words = reference.random_words(key, 0, 5000, DEVICE)
    got = mask("layer.weight", density=0.3, seed=9, model=1, numel=5000, backend=backend)
    assert torch.equal(got, words < int(0.3 * 2**32))


@pytest.mark.parametrize("start", [1, 2, 3, 5, 4095, 2**34 + 1, 2**36 - 2])
def test_masks_of_shards_begin_at_any_index(backend, start):
    key = reference.random_keys(0, ["w"], 1)[0, 0].tolist()
    expected = reference.random_words(key, start, 3001, DEVICE) < int(0.3 * 2**32)
    assert torch.equal(mask(density=0.3, numel=3001, starts=start, backend=backend), expected)


def test_limits_of_the_density_are_exact(backend):
    assert not mask(density=0.0, backend=backend).any()
    assert mask(density=1.0, backend=backend).all()
    models = [torch.ones(1000), torch.ones(1000)]
    result = ops.consensus(models, density=[0.0, 1.0], names="w", sparsify="random", merge_func="sum", backend=backend)
    assert result.tolist() == [1.0] * 1000


def test_dare_at_density_zero_is_the_base_to_the_bit(backend):
    # PEFT divides by the density and gives NaN here.
    base = torch.tensor([-0.0, 0.0, 1.5, -2.0])
    result = ops.consensus(
        [base + 1, base - 1], density=0.0, base=base, names="w", sparsify="random", rescale="inverse_density",
        backend=backend,
    )  # fmt: skip
    assert torch.equal(result, base)
    assert result.signbit().tolist() == [True, False, False, True]


def test_dare_on_ones_gives_zero_and_the_inverse_density(backend):
    ones = torch.ones(1000)
    result = ops.consensus(
        [ones], density=0.25, names="w", sparsify="random", rescale="inverse_density", backend=backend
    )
    assert set(result.tolist()) == {0.0, 4.0}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sizes", [[1, 2, 3, 4, 990], [513, 487], [0, 1000]])
def test_shards_have_the_masks_of_the_whole(backend, threads, dtype, sizes):
    x = torch.linspace(-1, 2, 1000, dtype=torch.float64).to(dtype)
    options = {
        "density": 0.4,
        "sparsify": "random",
        "rescale": "inverse_density",
        "zero_sign": "positive",
        "backend": backend,
    }
    whole = ops.consensus([x, -x.flip(0)], names="w", **options)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    shards = [list(x.split(sizes)), list((-x.flip(0)).split(sizes))]
    parts = ops.consensus(shards, names=["w"] * len(sizes), starts=starts, **options)
    assert torch.equal(torch.cat(parts), whole)
    far = ops.consensus([s[-1] for s in shards], names="w", starts=starts[-1], **options)
    assert torch.equal(far, parts[-1])


def test_della_keeps_more_of_the_larger(backend):
    x = torch.linspace(0.001, 1, 1000).repeat(400, 1)  # every row ascending: ranks are columns
    result = ops.consensus(
        [x], density=0.5, epsilon=0.4, names="w", sparsify="magnitude_random", merge_func="sum", backend=backend
    )
    share = (result != 0).double().mean(0)
    assert abs(share[:100].mean() - 0.14) < 0.015
    assert abs(share[-100:].mean() - 0.86) < 0.015
    assert abs(share.mean() - 0.5) < 0.01


def test_della_divides_each_entry_by_its_own_probability(backend):
    x = torch.tensor([[1.0, -3.0, 2.0]]).repeat(64, 1)
    options = {"density": 0.5, "epsilon": 0.25, "names": "w", "sparsify": "magnitude_random", "backend": backend}
    result = ops.consensus([x], rescale="inverse_density", **options)
    assert set(result[:, 0].tolist()) == {0.0, 4.0}
    assert set(result[:, 1].tolist()) == {0.0, -4.0}
    assert set(result[:, 2].tolist()) == {0.0, 4.0}


def test_della_ranks_the_earlier_of_equals_higher_and_single_entries_in_the_middle(backend):
    def shares(x):
        rows = x.repeat(4000, 1)
        result = ops.consensus(
            [rows], density=0.5, epsilon=0.4, names="w", sparsify="magnitude_random", merge_func="sum", backend=backend
        )
        return (result != 0).double().mean(0).tolist()

    assert shares(torch.ones(1, 3)) == pytest.approx([0.9, 0.5, 0.1], abs=0.04)
    assert shares(torch.ones(1, 1)) == pytest.approx([0.5], abs=0.04)


def test_della_at_the_limits_of_the_density(backend):
    x = torch.randn(8, 16)
    options = {"names": "w", "sparsify": "magnitude_random", "merge_func": "sum", "backend": backend}
    assert torch.equal(ops.consensus([x], density=1.0, **options), x)
    assert not ops.consensus([x], density=0.0, **options).any()
    both = ops.consensus([x, x], density=[0.0, 1.0], rescale="inverse_density", **options)
    assert torch.equal(both, x)
    alone = ops.consensus([x], density=0.5, rescale="inverse_density", **options)
    mixed = ops.consensus([x, x, x], density=[0.5, 1.0, 0.0], rescale="inverse_density", **options)
    agree = alone * x > 0
    assert torch.equal(mixed, torch.where(agree, alone + x, x))


def test_della_ranks_some_rows_at_a_time(monkeypatch):
    ranked = pytest.importorskip("isthmus._gpu.consensus")
    shapes = [(20, 7), (), (0, 3), (2, 130), (64,)]  # parts of a tensor, and several tensors at a time
    models = [
        [contested(torch.Size(shape).numel(), torch.bfloat16, seed=k).view(shape) for shape in shapes] for k in (1, 2)
    ]
    names = ["a", "b", "c", "d", "e"]
    for options in ({"rescale": "inverse_density"}, {"scope": "tensor", "rescale": "l1"}):
        options |= {"density": [0.5, 0.9], "epsilon": 0.05, "names": names, "sparsify": "magnitude_random"}
        expected, counts = ops.consensus(models, backend="reference", stats=True, **options)
        monkeypatch.setattr(ranked, "_RANKED", 200)
        got, again = ops.consensus(models, backend="triton", stats=True, **options)
        assert all(same_bits(x, y) for x, y in zip(got, expected, strict=True))
        assert all(torch.equal(x, y) for x, y in zip(again, counts, strict=True))


def test_della_in_place_ranks_the_inputs():
    # Where the runtime grants fewer threads than asked for, parts of a row are merged one after the other.
    code = """
        import torch
        from isthmus import ops
        from isthmus.testing import same_bits
        torch.set_num_threads(4)
        columns = [torch.randn(300_003, generator=torch.Generator().manual_seed(k)) for k in range(3)]
        for zero_sign in ("positive", "majority"):
            options = dict(density=0.5, epsilon=0.3, names="w", sparsify="magnitude_random", zero_sign=zero_sign)
            expected = ops.consensus(columns[1:], base=columns[0], **options)
            for target in range(3):
                inputs = [x.clone() for x in columns]
                ops.consensus(inputs[1:], base=inputs[0], out=inputs[target], **options)
                assert same_bits(inputs[target], expected)
        print("same")
    """
    environment = {**os.environ, "OMP_THREAD_LIMIT": "1"}
    environment.pop("OMP_WAIT_POLICY", None)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.stdout == "same\n", done.stderr


ONES = torch.ones(3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsify": "random"}, "pass names="),
        ({"sparsify": "random", "names": ["a", "b"]}, "names has 2 entries, expected 1"),
        ({"sparsify": "random", "names": "a", "seed": -1}, "seed is -1"),
        ({"sparsify": "random", "names": "a", "seed": 1 << 64}, "seed is 18446744073709551616"),
        ({"sparsify": "random", "names": "a", "seed": 0.5}, "seed is 0.5, expected an integer"),
        ({"sparsify": "random", "names": "a", "starts": -1}, "starts is -1"),
        ({"sparsify": "random", "names": "a", "starts": [0, 1]}, "starts is"),
        ({"sparsify": "magnitude_random", "names": "a", "epsilon": 0.5}, "choose epsilon below 0.5"),
        ({"sparsify": "magnitude_random", "names": "a", "epsilon": -0.1}, "epsilon is -0.1"),
        (  # p + ε is below 1, but (p - ε) + 2ε is 1
            {
                "density": 0.8861795808260082,
                "sparsify": "magnitude_random",
                "names": "a",
                "epsilon": 0.11382041917399169,
            },
            r"leave \(0, 1\)",
        ),
        ({"sparsify": "random", "names": "a", "density": 1.5}, "density is 1.5, expected a number from 0 to 1"),
    ],
)
def test_bad_input_names_the_thing(options, message):
    with pytest.raises(InputError, match=message):
        ops.consensus([ONES, ONES], **({"density": 0.5} | options))


def test_ranks_for_random_masks_need_finite_entries(backend):
    x = torch.tensor([1.0, float("nan")])
    with pytest.raises(InputError, match=r"tensors\[1\] has NaN or infinite entries in 'layer.w'"):
        ops.consensus([torch.ones(2), x], density=0.5, names="layer.w", sparsify="magnitude_random", backend=backend)
