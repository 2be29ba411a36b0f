"""Make the tables of README.md and docs/matching.md, and docs/matching.png, from models trained apart on Fashion-MNIST.

usage: python docs/matching_table.py ROOT [MODELS], with ROOT the folder of the IDX files (Debian:
dataset-fashion-mnist), from the root of the repository. Trained models go to the folder MODELS, and are taken from
there by the next run. Tables stand between comments that name them.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import isthmus
from isthmus.io import load_state, save_state
from isthmus.match import PermutationSpec, apply_permutation, repair, weight_matching
from isthmus.path import metrics
from isthmus.train import MLP, Data, ResNet18, load_data

PAGES = ("README.md", "docs/matching.md")
FIGURE = "docs/matching.png"
ALPHAS = [k / 10 for k in range(11)]  # of the perceptrons
FEW_ALPHAS = [0.0, 0.25, 0.5, 0.75, 1.0]  # of the residual network
SAMPLES = 5000  # training images that statistics are measured on
SUBSET = {"train": 10000, "val": 0, "test": 2000}  # of the residual network, at half the size


def train(model: nn.Module, data: Data, *, steps: int, lr: float, seed: int) -> nn.Module:
    """SGD with momentum 0.9 in batches of 128, with a rate that rises and falls once."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, cycle_momentum=False)
    for _ in range(steps):
        rows = torch.randint(len(data.train_x), (128,), generator=generator)
        optimizer.zero_grad()
        functional.cross_entropy(model(data.train_x[rows]), data.train_y[rows]).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def pair(name: str, make: Callable[[], nn.Module], data: Data, folder: Path, **settings: float) -> list[nn.Module]:
    """Two models from different weights and batches, from the folder if it has them."""
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model, path = make(), folder / f"{name}-{seed}.safetensors"
        if path.exists():
            model.load_state_dict(load_state(path))
        else:
            train(model, data, seed=seed, **settings)  # type: ignore[arg-type]
            save_state(path, model.state_dict())
        models.append(model.eval())
    return models


def halved(data: Data) -> Data:
    """A part of the data, each image averaged over squares of two by two pixels."""
    data = data.subset(**SUBSET)
    parts = {f"{part}_x": functional.avg_pool2d(inputs, 2) for part, (inputs, _) in data.parts.items()}
    labels = {f"{part}_y": targets for part, (_, targets) in data.parts.items()}
    return Data(**parts, **labels, num_classes=data.num_classes, name=f"{data.name} at half the size")


def row(name: str, alphas: list[float], losses: list[float], accuracies: list[float]) -> str:
    """A row of a table."""
    middle = alphas.index(0.5)
    barrier = metrics.linear_barrier(alphas, losses, (losses[0], losses[-1])).height
    return f"| {name} | {100 * accuracies[middle]:.1f} | {losses[middle]:.3f} | {barrier:.3f} |"


def scanned(name: str, result: isthmus.PathResult) -> str:
    """The row of a scan."""
    found = result.values["data"]
    return row(name, result.alphas.tolist(), found["loss"].tolist(), found["accuracy"].tolist())


def table(rows: list[str], ends: Mapping[str, Tensor]) -> str:
    """A table below the figures of the ends."""
    head = ["| | accuracy at α = ½ in % | loss | loss barrier |", "|---|---|---|---|"]
    accuracies, losses = ends["accuracy"].tolist(), ends["loss"].tolist()
    both = [f"{100 * accuracies[0]:.1f}, {100 * accuracies[-1]:.1f}", f"{losses[0]:.3f}, {losses[-1]:.3f}"]
    return "\n".join([*head, f"| the ends | {both[0]} | {both[1]} | |", *rows])


def perceptrons(data: Data, folder: Path) -> str:
    """Naive, aligned, and aligned and repaired, at every alpha."""
    make = functools.partial(MLP, 784, (512, 512, 512), 10)
    a, b = pair("perceptron", make, data, folder, steps=2500, lr=0.05)
    spec = PermutationSpec.from_model(a, data.train_x[:2])
    matching = weight_matching(spec, a, b, restarts=4)
    print(matching)
    evaluate = isthmus.Evaluator((data.test_x, data.test_y))
    line = isthmus.scan_line(copy.deepcopy(a), a, b, evaluate, ALPHAS, align=(spec, matching))
    print(line.barrier_cut)
    line.plot()[0].figure.savefig(FIGURE, dpi=100)  # type: ignore[union-attr]
    moved = apply_permutation(spec, matching.permutation, b)
    repaired = {"loss": [], "accuracy": []}  # type: ignore[var-annotated]
    for alpha in ALPHAS:
        merged = copy.deepcopy(a)
        merged.load_state_dict(isthmus.merge([a, moved], method="linear", weights=[1 - alpha, alpha]))
        if 0 < alpha < 1:
            merged = repair(merged, a, moved, data.train_x[:SAMPLES], alpha=alpha)
        for name, value in evaluate(merged).items():
            repaired[name].append(value)
    rows = [scanned("naive", line.naive), scanned("aligned", line)]  # type: ignore[arg-type]
    return table(
        [*rows, row("aligned and repaired", ALPHAS, repaired["loss"], repaired["accuracy"])], line.values["data"]
    )


def residual(data: Data, folder: Path) -> str:
    """Naive and aligned, with BatchNorm statistics interpolated like weights and re-estimated."""
    data = halved(data)
    make = functools.partial(ResNet18, 10, width=32, in_channels=1)
    a, b = pair("resnet", make, data, folder, steps=400, lr=0.1)
    spec = PermutationSpec.from_model(a, data.train_x[:2])
    matching = weight_matching(spec, a, b, restarts=4)
    print(matching)
    rows = []
    for bn, what in (("keep", "statistics interpolated"), ("reset", "statistics re-estimated")):
        line = isthmus.scan_line(
            *(copy.deepcopy(a), a, b, isthmus.Evaluator((data.test_x, data.test_y)), FEW_ALPHAS),
            align=(spec, matching),
            bn=bn,
            bn_data=data.train_x[:SAMPLES],
        )
        print(line.barrier_cut)
        rows += [scanned(f"naive, {what}", line.naive), scanned(f"aligned, {what}", line)]  # type: ignore[arg-type]
    return table([rows[0], rows[2], rows[1], rows[3]], line.values["data"])


def write(page: Path, name: str, text: str) -> None:
    """Put a table between the comments of this name, if the page has them."""
    opening, closing = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(opening)
    if found:
        page.write_text(before + opening + text + closing + rest.partition(closing)[2], encoding="utf-8")


def main(root: str, models: str = "build/matching") -> None:
    """Train, match, repair, and write."""
    data, folder = load_data("fashion-mnist", root=root), Path(models)
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in (("perceptrons", perceptrons), ("residual networks", residual)):
        text = make(data, folder)
        print(text, flush=True)
        for page in PAGES:
            write(Path(page), name, text)


if __name__ == "__main__":
    main(*sys.argv[1:])
