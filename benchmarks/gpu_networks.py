"""Scans and training of a ResNet-18 on the card, on images of CIFAR's shape made of noise."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from isthmus.path import Evaluator, scan_line
from isthmus.train import Data, Pair, ResNet18, TrainConfig, train_pair, train_pairs

from .card import Card

State = dict[str, Tensor]
Batches = list[tuple[Tensor, Tensor]]

CLASSES, SIDE = 10, 32
POINTS = 201
EPOCHS, BATCH, TRAINING_IMAGES = 20, 128, 50_000  # of the pairs that are counted by the hour
TOGETHER = 8  # pairs


def images(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Noise, and labels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 3, SIDE, SIDE, generator=generator)
    return x.to(device), torch.randint(CLASSES, (count,), generator=generator).to(device)


def network(seed: int, width: int, device: torch.device) -> nn.Module:
    """A ResNet-18 whose BatchNorm statistics are those of some noise."""
    torch.manual_seed(seed)
    model = ResNet18(CLASSES, width=width).to(device)
    with torch.no_grad():
        model(torch.randn(64, 3, SIDE, SIDE, device=device))
    return model.eval()


def plain_scan(
    model: nn.Module, a: Any, b: Any, alphas: list[float], batches: list[tuple[Tensor, Tensor]]
) -> list[float]:
    """Loss at every alpha, as people write it for data that is on the device already."""
    losses = []
    for alpha in alphas:
        net = copy.deepcopy(model)
        net.load_state_dict(
            {key: torch.lerp(a[key], b[key], alpha) if a[key].is_floating_point() else a[key] for key in a}
        )
        net.eval()
        total = 0.0
        with torch.no_grad():
            for x, y in batches:
                total += cross_entropy(net(x), y, reduction="sum").item()
        losses.append(total / sum(len(y) for _, y in batches))
    return losses


def scan(
    card: Card, *, seconds: float, width: int, most: int, points: int = POINTS, batch: int = 1000
) -> dict[str, Any]:
    """A scan against the plain loop, of as many images as the time allows."""
    model, a, b = (network(seed, width, card.device) for seed in range(3))
    x, y = images(most, card.device)
    batches = list(zip(x.split(batch), y.split(batch), strict=True))

    def loop(few: Batches, alphas: list[float]) -> list[float]:
        return plain_scan(model, a.state_dict(), b.state_dict(), alphas, few)

    loop(batches[:1], [0.5])
    one = card.seconds_of(lambda: loop(batches[:1], [0.5]))
    used = max(1, min(len(batches), int(seconds / (2 * points) / one)))  # one batch of a point takes so long
    count = sum(len(labels) for _, labels in batches[:used])
    evaluate = Evaluator((x[:count], y[:count]))
    few = [0.0, 0.25, 0.5]
    expected = loop(batches[:used], few)

    def ours() -> Any:
        return scan_line(model, a, b, evaluate, alphas=points, bn="keep")

    result = ours()  # decides on batch size and layout, and compiles
    at = [min(range(len(result.alphas)), key=lambda place: abs(result.alphas[place] - alpha)) for alpha in few]
    losses = [result.values["data"]["loss"][place] for place in at]
    plain = card.seconds_of(lambda: loop(batches[:used], few)) / len(few)
    mine = card.seconds_of(ours) / points
    return {
        "points": points,
        "images": count,
        "seconds_per_point": mine,
        "speedup": plain / mine,
        "distance": max(abs(loss - right) for loss, right in zip(losses, expected, strict=True)),
        "choices": {name: str(value) for name, value in result.choices.items()},
    }


def pairs_per_hour(
    card: Card, *, width: int, steps: int, together: int = TOGETHER, batch: int = BATCH
) -> dict[str, Any]:
    """How long steps of training take, and how many pairs of a stated length they make in an hour."""
    x, y = images(batch * 8, card.device)
    data = Data(x, y, x[:0], y[:0], x[:batch], y[:batch], CLASSES, "noise")
    whole = EPOCHS * (TRAINING_IMAGES // BATCH)
    found: dict[str, Any] = {"epochs": EPOCHS, "images": TRAINING_IMAGES, "batch": batch, "rows": []}

    def config(seed: int, precision: str, length: int) -> TrainConfig:
        options = {"data": "noise", "model": "resnet18", "model_options": {"width": width}, "branch_step": length // 2}
        return TrainConfig(
            **options, lr=0.01, batch_size=batch, steps=length, seed=seed, precision=precision, device=str(card.device)
        )  # fmt: skip

    def alone(precision: str, length: int, **options: bool) -> list[Pair]:
        return [train_pair(config(0, precision, length), data=data, **options)]

    def several(precision: str, length: int) -> list[Pair]:
        return train_pairs([config(seed, precision, length) for seed in range(together)], data=data)

    ways: dict[str, Callable[[str, int], list[Pair]]] = {
        "one by one, launched step by step": functools.partial(alone, capture=False),
        "one by one": alone,
        f"{together} at once": several,
    }
    for precision in ("float32", "bfloat16"):
        for name, train in ways.items():
            if card.left <= 0:
                found["rows"].append({"way": name, "precision": precision, "left_out": "no time left"})
                continue
            short, long = train(precision, steps), train(precision, 3 * steps)
            step = (long[0].seconds - short[0].seconds) / (3 * steps)  # branches halfway: 1.5 of the length
            execution = long[0].execution
            found["rows"].append(
                {
                    "way": name,
                    "precision": precision,
                    "seconds_per_step": step,
                    "pairs_per_hour": len(long) * 3600 / (1.5 * whole * step) if step > 0 else None,
                    "captured": execution.captured,
                    "reason": execution.eager_reason or execution.apart_reason,
                }
            )
    return found
