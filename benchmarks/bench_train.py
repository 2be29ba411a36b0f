"""Steps of the demo's training on Fashion-MNIST against the loop that people write."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from isthmus.train import MLP, TrainConfig, train_pair

from . import usual

STEPS = 400


def bench_train_400_steps(measure, fashion_mnist, fashion_mnist_root, benchmark):
    config = TrainConfig(
        data="fashion-mnist",
        data_options={"root": str(fashion_mnist_root)},
        model="mlp",
        model_options={"widths": [256, 256]},
        lr=0.1,
        batch_size=128,
        momentum=0.9,
        warmup_steps=0,
        steps=STEPS // 2 + 1,
        branch_step=1,
    )
    images = usual.Images(fashion_mnist_root, "train", mean=0.2860, std=0.3530)

    def loop() -> list[float]:
        torch.manual_seed(0)
        model = MLP(784, (256, 256), 10, norm="layer")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return usual.train(model, optimizer, DataLoader(images, batch_size=128, shuffle=True), STEPS)

    pair = train_pair(config, data=fashion_mnist)
    end, usual_end = pair.history["a"]["loss"][-1], sum(loop()[STEPS // 2 - 50 : STEPS // 2]) / 50
    assert abs(end - usual_end) < 0.1, (end, usual_end)
    measure(lambda: train_pair(config, data=fashion_mnist), peers={"DataLoader and transforms": loop}, rounds=3)
