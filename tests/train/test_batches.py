from __future__ import annotations

import itertools

import torch

from isthmus.train import Augmentation
from isthmus.train.batches import Batches


def batches(steps: int, size: int = 10, batch_size: int = 3, purpose: str = "a", **augmentation: float) -> list:
    inputs = torch.arange(float(size))[:, None]
    stream = Batches(
        inputs,
        torch.arange(size),
        batch_size,
        Augmentation(**augmentation),  # type: ignore[arg-type]
        seed=0,
        purpose=purpose,
    )
    return list(itertools.chain(*stream.chunks(steps)))


def test_every_epoch_shows_each_example_at_most_once_and_whole_batches_only() -> None:
    stream = batches(9)
    assert len(stream) == 9
    assert all(inputs.shape == (3, 1) and labels.shape == (3,) for inputs, labels in stream)
    for epoch in range(3):
        shown = torch.cat([labels for _, labels in stream[3 * epoch : 3 * epoch + 3]])
        assert len(shown.unique()) == 9


def test_inputs_go_with_their_labels() -> None:
    for inputs, labels in batches(300):
        assert torch.equal(inputs[:, 0], labels.float())


def test_one_batch_may_hold_all() -> None:
    (_, labels), (_, others) = batches(2, size=3)
    assert sorted(labels.tolist()) == sorted(others.tolist()) == [0, 1, 2]


def test_streams_differ_by_purpose_and_start_alike() -> None:
    def labels(stream: list) -> list[list[int]]:
        return [batch.tolist() for _, batch in stream]

    assert labels(batches(20)) == labels(batches(200))[:20]
    assert labels(batches(20)) != labels(batches(20, purpose="b"))


def test_order_does_not_depend_on_augmentation() -> None:
    for (_, plain), (_, noisy) in zip(batches(20), batches(20, noise=0.1), strict=True):
        assert torch.equal(plain, noisy)
