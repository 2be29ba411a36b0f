from __future__ import annotations

import pytest
import torch

from isthmus.errors import InputError
from isthmus.train import Augmentation


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_nothing_asked_for_changes_nothing() -> None:
    images = torch.randn(4, 1, 3, 3)
    assert torch.equal(Augmentation()(images, generator()), images)


def test_every_crop_is_a_window_of_the_padded_image() -> None:
    images = torch.arange(1.0, 1 + 200 * 2 * 3 * 4).view(200, 2, 3, 4)
    before = images.clone()
    cropped = Augmentation(crop=1)(images, generator())
    assert torch.equal(images, before)
    padded = torch.zeros(200, 2, 5, 6)
    padded[:, :, 1:-1, 1:-1] = images
    places = set()
    for image, result in zip(padded, cropped, strict=True):
        windows = {
            (row, column): image[:, row : row + 3, column : column + 4] for row in range(3) for column in range(3)
        }
        found = [place for place, window in windows.items() if torch.equal(window, result)]
        assert len(found) == 1
        places.add(found[0])
    assert len(places) == 9  # all places come up


def test_half_of_the_images_are_mirrored() -> None:
    images = torch.randn(1000, 1, 2, 3)
    flipped = Augmentation(flip=True)(images, generator())
    same = (flipped == images).flatten(1).all(1)
    mirrored = (flipped == images.flip(-1)).flatten(1).all(1)
    assert bool((same ^ mirrored).all())
    assert 400 < int(mirrored.sum()) < 600  # six standard deviations


def test_noise_has_the_deviation_asked_for_and_a_draw_for_each_value() -> None:
    inputs = torch.randn(1000, 100)
    noise = Augmentation(noise=0.3)(inputs, generator()) - inputs
    assert float(noise.std()) == pytest.approx(0.3, rel=0.02)
    assert float(noise.mean()) == pytest.approx(0, abs=0.005)
    assert float(torch.corrcoef(noise[:2])[0, 1]) == pytest.approx(0, abs=0.5)


def test_draws_come_from_the_generator_alone() -> None:
    images = torch.randn(8, 1, 4, 4)
    augment = Augmentation(crop=1, flip=True, noise=0.1)
    first = augment(images, generator())
    torch.manual_seed(9)
    assert torch.equal(augment(images, generator()), first)
    assert not torch.equal(augment(images, generator(1)), first)


@pytest.mark.parametrize(
    "options", [{"crop": -1}, {"crop": 1.5}, {"flip": 1}, {"noise": -0.1}, {"noise": float("nan")}]
)
def test_bad_options_are_named(options: dict[str, float]) -> None:
    with pytest.raises(InputError, match=f"augmentation: {next(iter(options))} is"):
        Augmentation(**options)  # type: ignore[arg-type]


def test_crop_needs_images() -> None:
    with pytest.raises(InputError, match=r"the inputs have shape \(4, 9\)"):
        Augmentation(crop=1)(torch.randn(4, 9), generator())
