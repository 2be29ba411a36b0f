from __future__ import annotations

import itertools

import torch

from isthmus.train import Augmentation
from isthmus.train.batches import Batches, SideBySide


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


def stream(seed: int, **options: object) -> Batches:
    images = torch.arange(10 * 2 * 3 * 3.0).view(10, 2, 3, 3)
    augmentation = Augmentation(crop=1, flip=True, noise=0.1 * seed)
    return Batches(images, torch.arange(10), 3, augmentation, seed=seed, purpose="a", **options)  # type: ignore[arg-type]


def test_side_by_side_every_stream_is_what_it_is_alone() -> None:
    steps = 2 * stream(0).capacity + 5
    together = list(SideBySide([stream(seed) for seed in range(3)]).chunks(steps))
    assert [len(chunk) for chunk in together] == [128, 128, 5]
    for seed in range(3):
        for chunk, alone in zip(together, stream(seed).chunks(steps), strict=True):
            assert torch.equal(chunk.inputs[:, seed], alone.inputs)
            assert torch.equal(chunk.labels[:, seed], alone.labels)


def test_channels_last_changes_the_order_of_memory_alone() -> None:
    for plain, last in zip(stream(1).chunks(200), stream(1, channels_last=True).chunks(200), strict=True):
        assert torch.equal(plain.inputs, last.inputs)
        assert last.inputs[0].is_contiguous(memory_format=torch.channels_last)
        assert not plain.inputs[0].is_contiguous(memory_format=torch.channels_last)
