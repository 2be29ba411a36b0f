"""Make the figures of docs/gallery.md from pairs of perceptrons trained on Fashion-MNIST.

usage: python docs/gallery.py ROOT [OUT], with ROOT the folder of the IDX files (Debian: dataset-fashion-mnist)
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import isthmus
from isthmus.train import Data, Pair, TrainConfig, build_model, load_data, train_pair

WIDTHS = (256, 256)
HELD_OUT = 2000  # test images that planes are evaluated on


def pair(root: str, **settings: object) -> Pair:
    """Two perceptrons trained on Fashion-MNIST."""
    return train_pair(
        TrainConfig(
            data="fashion-mnist",
            data_options={"root": root},
            model="mlp",
            model_options={"widths": WIDTHS},
            batch_size=128,
            momentum=0.9,
            **settings,  # type: ignore[arg-type]
        )
    )


def fine_tune(model: nn.Module, inputs: Tensor, targets: Tensor, steps: int = 300) -> list[dict[str, Tensor]]:
    """SGD on one task; the state before the first step, and after every thirtieth."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    states = [copy.deepcopy(model.state_dict())]
    for step in range(1, steps + 1):
        rows = torch.randint(len(inputs), (128,), generator=generator)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs[rows]), targets[rows]).backward()
        optimizer.step()
        if step % 30 == 0:
            states.append(copy.deepcopy(model.state_dict()))
    return states


def task(data: Data, classes: range) -> dict[str, isthmus.Evaluator]:
    """The validation and test images of some classes."""
    splits = {}
    for name, (inputs, targets) in data.parts.items():
        rows = torch.isin(targets, torch.tensor(classes))
        splits[name] = isthmus.Evaluator((inputs[rows], targets[rows]))
    return {name: splits[name] for name in ("val", "test")}


def main(root: str, out: str = "docs/gallery") -> None:
    """Train, scan and draw."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    data = load_data("fashion-mnist", root=root)
    model = build_model("mlp", data, widths=WIDTHS)
    test = isthmus.Evaluator((data.test_x, data.test_y))
    some = isthmus.Evaluator((data.test_x[:HELD_OUT], data.test_y[:HELD_OUT]))
    both = {"val": isthmus.Evaluator((data.val_x, data.val_y)), "test": test}

    def save(result: object, name: str) -> None:
        figure = result.plot()[0].figure  # type: ignore[attr-defined]
        figure.savefig(folder / f"{name}.png", dpi=100)
        print(folder / f"{name}.png")

    close = pair(root, lr=0.2, steps=2000, branch_step=300)
    apart = pair(root, lr=0.1, steps=1500, kind="independent")
    save(isthmus.scan_line(model, close.a, close.b, both, 101, base=close.trunk), "line")
    save(isthmus.scan_line(model, apart.a, apart.b, test, "adaptive", tol=1e-2), "adaptive")
    curve = isthmus.fit_curve(model, apart.a, apart.b, (data.train_x, data.train_y), steps=2000)
    save(isthmus.scan_curve(model, curve, test, 51), "curve")
    save(isthmus.scan_plane(model, close.trunk, [close.a, close.b], some), "plane")
    metric = isthmus.scan_plane(
        *(model, curve.a, [curve.b, curve.theta], some), coordinates="metric", names=("A", "B", "bend")
    )
    save(metric, "plane-to-scale")
    model.load_state_dict(close.a)
    save(isthmus.random_line(model, some, 81), "random-line")
    save(isthmus.random_plane(model, some), "random-plane")

    trained = {}
    for name, classes in (("tops to coats", range(5)), ("shoes, shirts, bags", range(5, 10))):
        rows = torch.isin(data.train_y, torch.tensor(classes))
        model.load_state_dict(close.trunk)
        trained[name] = fine_tune(model, data.train_x[rows], data.train_y[rows])
    first, second = trained.values()
    save(isthmus.trajectory_plane(model, first, some), "trajectory")
    tasks = {name: task(data, classes) for name, classes in zip(trained, (range(5), range(5, 10)), strict=True)}
    factors = np.linspace(0, 1.5, 31)
    found = isthmus.scan_task_arithmetic(
        *(model, [first[-1], second[-1]], tasks),
        base=close.trunk,
        scaling_factors=factors,
        method="ties",
        density=[0.1, 0.3, 1.0],
    )
    save(found, "task-arithmetic")


if __name__ == "__main__":
    main(*sys.argv[1:])
