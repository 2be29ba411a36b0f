"""Scans of models that people have, against the loop that people write."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from isthmus.path import Evaluator, scan_line

ALPHAS = (0.0, 0.3, 0.5, 1.0)
BATCH = 3
VOCABULARY = 61

Weights = dict[str, torch.Tensor]
Data = tuple[torch.Tensor, torch.Tensor]
Score = Callable[[nn.Module, torch.Tensor, torch.Tensor], tuple[float, int]]


def other(model: nn.Module, scale: float = 0.1) -> nn.Module:
    """A copy whose floating-point tensors differ; variances stay positive."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                factor = 1 + scale * torch.randn_like(tensor)
                tensor.mul_(factor.abs() if key.endswith("running_var") else factor)
    return model


def images(samples: int = 5, size: int = 32, channels: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, channels, size, size), torch.randint(10, (samples,))


def tokens(samples: int = 5, length: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of several lengths, padded on the right; what is padded is not predicted."""
    inputs = torch.randint(VOCABULARY, (samples, length))
    labels = inputs.clone()
    for row, kept in enumerate(torch.randint(2, length + 1, (samples,)).tolist()):
        labels[row, kept:] = -100
    return inputs, labels


def classified(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, int]:
    """The summed loss of a batch, and by how much it counts."""
    return functional.cross_entropy(model(inputs), targets, reduction="sum").item(), len(targets)


def read(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[float, int]:
    """As ``classified``, for language models that shift labels and average over tokens themselves."""
    count = int((labels[:, 1:] != -100).sum())
    return model(input_ids=inputs, labels=labels).loss.item() * count, count


def mean(model: nn.Module, data: Data, score: Score = classified) -> float:
    """The loss of a model over all batches."""
    with torch.no_grad():
        batches = zip(data[0].split(BATCH), data[1].split(BATCH), strict=True)
        sums, counts = zip(*[score(model, inputs, targets) for inputs, targets in batches], strict=True)
    return sum(sums) / sum(counts)


def loop(model: nn.Module, a: Weights, b: Weights, data: Data, score: Score) -> list[float]:
    """The loss at every alpha: interpolate the state dicts, load them, go through the batches."""
    losses = []
    for alpha in ALPHAS:
        net = copy.deepcopy(model)
        net.load_state_dict(
            {k: (1 - alpha) * a[k] + alpha * b[k] if a[k].is_floating_point() else a[k] for k in net.state_dict()}
        )
        losses.append(mean(net.eval(), data, score))
    return losses


def check(
    model: nn.Module, a: nn.Module, b: nn.Module, data: Data, score: Score = classified, evaluate=None, **options
) -> None:
    """Scan the line from ``a`` to ``b``: the loop's values, the ends' weights, and the model as it was."""
    weights_a, weights_b = a.state_dict(), b.state_dict()
    seen: list[Weights] = []

    def keep(bound: nn.Module) -> float:
        seen.append({key: value.clone() for key, value in bound.state_dict().items()})
        return 0.0

    before = {key: value.clone() for key, value in model.state_dict().items()}
    tensors = [*model.parameters(), *model.buffers()]
    modes = [module.training for module in model.modules()]
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    evaluate = evaluate or Evaluator(data, batch_size=BATCH, **options)
    result = scan_line(model, a, b, {"data": evaluate, "weights": keep}, ALPHAS, bn="keep")

    expected = loop(getattr(model, "_orig_mod", model), weights_a, weights_b, data, score)
    np.testing.assert_allclose(result.values["data"]["loss"], expected, rtol=1e-5)
    assert np.ptp(expected) > 1e-3 * np.mean(expected)  # the weights matter
    for end, weights in zip(seen[:2], (weights_a, weights_b), strict=True):
        for key, value in end.items():
            assert torch.equal(value, weights[key.removeprefix("_orig_mod.")]), key
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(x is y for x, y in zip(tensors, [*model.parameters(), *model.buffers()], strict=True))
    assert [module.training for module in model.modules()] == modes
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states


def trained(model: nn.Module, size: int = 32) -> nn.Module:
    """The model with BatchNorm statistics of some data, in training mode."""
    model.train()
    with torch.no_grad():
        model(images(4, size)[0])
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "densenet121", "vit_b_16"])
def test_torchvision(name):
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    options = {"image_size": 32} if name == "vit_b_16" else {}
    model = getattr(models, name)(num_classes=10, **options)
    if name == "vit_b_16":
        nn.init.normal_(model.heads.head.weight, std=0.1)  # torchvision begins with zero
    a = trained(model)
    b = other(a, 0.05)
    check(copy.deepcopy(a).eval(), a, b, images(), share_first_layer=True)


def test_resnet_block():
    torch.manual_seed(0)
    block = pytest.importorskip("torchvision.models.resnet").BasicBlock
    model = nn.Sequential(nn.Conv2d(3, 8, 7, 2), nn.BatchNorm2d(8), nn.ReLU(True), block(8, 8), nn.Flatten())
    model = trained(model.append(nn.Linear(8 * 13 * 13, 10)))
    for options in ({}, {"memory_format": torch.channels_last}, {"share_first_layer": True}):
        check(model, model, other(model, 0.3), images(), **options)


class Reader(nn.Module):
    """A causal language model in the manner of Hugging Face: tied embeddings, and labels that it shifts itself."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.mix = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids, labels=None):
        logits = self.head(self.mix(self.embed(input_ids))[0])
        loss = (
            None if labels is None else functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        )
        return SimpleNamespace(logits=logits, loss=loss)


def test_language_model_with_tied_embeddings():
    torch.manual_seed(0)
    model = Reader()
    check(model, model, other(model), tokens(), read, task="language_modelling")
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_language_model_from_a_hugging_face_configuration(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = {
        "GPT2": lambda: transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=16, vocab_size=VOCABULARY),
        "Llama": lambda: transformers.LlamaConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=VOCABULARY
        ),
    }[kind]()
    model = transformers.AutoModelForCausalLM.from_config(config)
    check(model, model, other(model, 0.5), tokens(), read, task="language_modelling")


def small(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 12), nn.ReLU(), *layers, nn.Linear(12, 10))


def test_dropout():
    model = small(nn.Dropout(0.5)).train()
    check(model, model, other(model), images(size=8))


@pytest.mark.parametrize("share", [True, False])
def test_compiled(share):
    net = small()
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(net), backend="aot_eager")
    check(compiled, net, other(net), images(size=8), share_first_layer=share)


class Remembering(nn.Module):
    """Adds to its outputs a buffer that it changes at every call, in place or by another tensor."""

    def __init__(self, width: int, *, in_place: bool, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(width), persistent=persistent)
        self.in_place = in_place

    def forward(self, x):
        if self.in_place:
            self.seen.add_(x[0].abs())
        else:
            self.seen = self.seen + x[0].abs()
        return x + self.seen


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_buffers_that_the_forward_pass_changes(in_place, persistent):
    model = small(Remembering(12, in_place=in_place, persistent=persistent))
    data = images(size=8)
    check(model, model, other(model), data)
    check(model, model, other(model), data, evaluate=lambda bound: mean(bound, data))
