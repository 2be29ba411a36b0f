"""Merge rules against the copy bandwidth of the run and against other tools on the same tensors.

``bytes_moved`` is the least a rule has to move: one read of every input for each sweep that it needs, and one write. So
a ratio of 0.4 means 2.5 times the time that a copy of as many bytes would take.
"""

from __future__ import annotations

import pytest
import torch

import isthmus
from isthmus import ops

from . import peers

COUNT = 20_000_000
DENSITY = 0.2
WEIGHTS = [0.4, 0.3, 0.2, 0.1]
PEER_ROUNDS = 2  # a call of a peer takes seconds
ADAPTERS, RANK, WIDTH = 448, 16, 4096  # both matrices of seven projections in each of 32 layers


@pytest.fixture(scope="module")
def models():
    """Eight models, or task vectors, of normal entries."""
    generator = torch.Generator().manual_seed(0)
    return [torch.empty(COUNT).normal_(generator=generator).mul_(0.01) for _ in range(8)]


@pytest.fixture(scope="module")
def out():
    return torch.zeros(COUNT)


@pytest.mark.parametrize("count", [4, 8])
def bench_ties(measure, models, out, count):
    deltas, ones = models[:count], torch.ones(count)
    peft, mergekit_ties = peers.peft(), peers.mergekit_ties()
    ops.consensus(deltas, density=DENSITY, out=out)
    torch.testing.assert_close(out, peers.ties_as_published(deltas, DENSITY))
    measure(
        lambda: ops.consensus(deltas, density=DENSITY, out=out),
        bytes_moved=(2 * count + 1) * out.nbytes,
        peers={
            "PEFT": lambda: peft.ties(deltas, ones, DENSITY),
            "mergekit's steps": lambda: mergekit_ties(deltas, DENSITY),
            "the published steps": lambda: peers.ties_as_published(deltas, DENSITY),
        },
        peer_rounds=PEER_ROUNDS,
    )


@pytest.mark.parametrize("count", [4, 8])
def bench_consensus_alone(measure, models, out, count):
    deltas = models[:count]
    thresholds = ops.thresholds(deltas, DENSITY)
    measure(
        lambda: ops.consensus(deltas, density=DENSITY, thresholds=thresholds, out=out),
        bytes_moved=(count + 1) * out.nbytes,
    )


def bench_thresholds_alone(measure, models):
    deltas = models[:4]
    measure(lambda: ops.thresholds(deltas, DENSITY), bytes_moved=4 * deltas[0].nbytes)


@pytest.mark.filterwarnings("ignore:entries equal to the threshold")  # of bfloat16 magnitudes, many equal the threshold
@pytest.mark.parametrize("step", ["both sweeps", "consensus alone"])
def bench_ties_of_bf16(measure, models, out, step):
    deltas, narrow = models[:4], [model.bfloat16() for model in models[:4]]
    narrow_out = torch.zeros(COUNT, dtype=torch.bfloat16)
    alone = step == "consensus alone"
    given, narrow_given = (ops.thresholds(x, DENSITY) if alone else None for x in (deltas, narrow))
    measure(
        lambda: ops.consensus(narrow, density=DENSITY, thresholds=narrow_given, out=narrow_out),
        bytes_moved=(4 if alone else 8) * narrow_out.nbytes + narrow_out.nbytes,
        peers={"float32": lambda: ops.consensus(deltas, density=DENSITY, thresholds=given, out=out)},
    )


SUM = {"majority_sign_method": "none", "merge_func": "sum"}


def task_arithmetic(models, out):
    return ops.consensus(models[1:5], WEIGHTS, base=models[0], sparsify="none", out=out, **SUM)


def linear(models, out):
    return ops.linear(models[:4], WEIGHTS, out=out)


def dare(models, out):
    random = {"sparsify": "random", "rescale": "inverse_density", "names": ["weight"]}
    return ops.consensus(models[1:5], WEIGHTS, DENSITY, base=models[0], out=out, **random, **SUM)


def slerp(models, out):
    return ops.slerp(models[0], models[1], 0.3, out=out)


# Our call, the reads and writes of its fewest sweeps, and mergekit's method over so many models with its parameters.
RULES = {
    "task_arithmetic": (task_arithmetic, 6, 5, {"base_index": 0, "weight": WEIGHTS}),
    "linear": (linear, 5, 4, {"weight": WEIGHTS}),
    "dare_linear": (dare, 6, 5, {"base_index": 0, "weight": WEIGHTS, "density": [DENSITY] * 4}),
    "slerp": (slerp, 5, 2, {"base_index": 0, "t": 0.3}),
}


@pytest.mark.parametrize("method", RULES)
def bench_rule(measure, models, out, method):
    mergekit = peers.mergekit()
    rule, moves, count, parameters = RULES[method]
    if method != "dare_linear":  # its masks are random, and other than ours
        torch.testing.assert_close(rule(models, out), mergekit(method, models[:count], **parameters))
    measure(
        lambda: rule(models, out),
        bytes_moved=moves * out.nbytes,
        peers={"mergekit": lambda: mergekit(method, models[:count], **parameters)},
        peer_rounds=PEER_ROUNDS,
    )


def bench_merge_of_state_dicts(measure, models):
    """A whole call, with its checks and a new output, whose pages are touched for the first time."""
    mergekit = peers.mergekit()
    keys = [f"layer{i}.weight" for i in range(20)]
    base, *others = [dict(zip(keys, model.chunk(len(keys)), strict=True)) for model in models[:5]]
    shared = {"density": [DENSITY] * 4}

    def tool():
        rows = {key: [base[key], *(model[key] for model in others)] for key in keys}
        return {key: mergekit("ties", row, base_index=0, weight=WEIGHTS, **shared) for key, row in rows.items()}

    def call():
        return isthmus.merge(others, base=base, method="ties", preset="mergekit", weights=WEIGHTS, **shared)

    ours, theirs = call(), tool()
    for key in keys:  # of magnitudes equal to a threshold, the tool keeps whichever its sort puts first
        differing = ((ours[key] - theirs[key]).abs() > 1e-5).sum()
        assert differing <= 2 * len(others)
    measure(call, bytes_moved=11 * models[0].nbytes, peers={"mergekit": tool}, peer_rounds=PEER_ROUNDS)


def bench_adapters(measure):
    peft = peers.peft()
    generator = torch.Generator().manual_seed(0)
    adapters = [[torch.randn(RANK, WIDTH, generator=generator) for _ in range(3)] for _ in range(ADAPTERS)]
    options = {"scope": "tensor", "ties": "exact", "zero_sign": "positive"}  # what PEFT does
    ones = torch.ones(3)
    torch.testing.assert_close(
        ops.consensus(adapters[0], density=DENSITY, **options), peft.ties(adapters[0], ones, DENSITY)
    )
    measure(
        lambda: [ops.consensus(deltas, density=DENSITY, **options) for deltas in adapters],
        peers={"PEFT": lambda: [peft.ties(deltas, ones, DENSITY) for deltas in adapters]},
        peer_rounds=PEER_ROUNDS,
    )
