from __future__ import annotations

import pytest

from isthmus.train import TrainConfig
from isthmus.train.schedules import annealing, schedule


def rates(steps: int = 10, **options: object) -> list[float]:
    config = TrainConfig(lr=2.0, steps=steps, **options)  # type: ignore[arg-type]
    return [schedule(config, steps)(step) for step in range(steps)]


def test_constant_after_warmup() -> None:
    assert rates(6, warmup_steps=4) == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0])
    assert rates(3) == [2.0, 2.0, 2.0]


def test_cosine() -> None:
    assert rates(6, warmup_steps=2, schedule="cosine") == pytest.approx(
        [1.0, 2.0, 2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5]
    )


def test_warmup_stable_decay() -> None:
    assert rates(10, warmup_steps=2, schedule="wsd", decay_fraction=0.4) == pytest.approx(
        [1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.5, 1.0, 0.5]
    )


def test_annealing_starts_at_the_rate_and_would_reach_zero_next() -> None:
    rate = annealing(TrainConfig(lr=2.0, steps=10, anneal_steps=4))
    assert [rate(step) for step in range(5)] == pytest.approx([2.0, 1.5, 1.0, 0.5, 0.0])
