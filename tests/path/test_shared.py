"""The first layer between the ends: answered from memory, and only where that is right."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from isthmus.path import Evaluator, random_line, random_plane, scan_line, scan_plane, shared

WIDTH = 160


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(90, 1, 8, 20, generator=generator), torch.randint(4, (90,), generator=generator)


class Branches(nn.Module):
    """Reads halves of its input by two layers, one of them twice, the second time behind a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.scale = nn.Linear(160, 4), nn.Linear(160, 4), nn.Parameter(torch.rand(1))
        self.head = nn.Linear(160, 4)

    def forward(self, x):
        x = x.flatten(1)
        return self.left(x) * self.right(x) + self.left(self.scale * x) + self.head(self.head.weight[:1] * x)


class Changing(nn.Module):
    """Changes the weight of its first layer before each call of it, or between two."""

    def __init__(self, change, calls: int = 1) -> None:
        super().__init__()
        self.first, self.head, self.change, self.calls = nn.Linear(WIDTH, 8), nn.Linear(8, 4), change, calls

    def forward(self, x):
        x = x.flatten(1)
        hidden = self.first(x) if self.calls == 2 else 0
        with torch.no_grad():
            self.change(self.first)
        return self.head(hidden + self.first(x))


def normalise(layer: nn.Linear) -> None:
    layer.weight.data.div_(layer.weight.norm(dim=1, keepdim=True))


def sequential(first: nn.Module, *rest: nn.Module) -> nn.Sequential:
    return nn.Sequential(first, *rest, nn.Flatten(), nn.LazyLinear(4))


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 4)),
    "convolution": lambda: sequential(nn.Conv2d(1, 6, (8, 16)), nn.ReLU()),
    "branches": Branches,
    "low fan-in": lambda: sequential(nn.Conv2d(1, 6, 3), nn.ReLU()),
    "written into": lambda: nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, 8), nn.ReLU(inplace=True), nn.Linear(8, 4)),
    "without bias": lambda: nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, 8, bias=False), nn.Tanh(), nn.Linear(8, 4)),
}
UNSHARED = {
    "behind a parameter": lambda: nn.Sequential(nn.Flatten(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)),
    "weight norm": lambda: nn.Sequential(nn.Flatten(), parametrizations.weight_norm(nn.Linear(WIDTH, 4))),
    "old weight norm": lambda: nn.Sequential(nn.Flatten(), nn.utils.weight_norm(nn.Linear(WIDTH, 4))),
    "subclass": lambda: nn.Sequential(nn.Flatten(), type("Own", (nn.Linear,), {})(WIDTH, 4)),
    "normalised by hand": lambda: Changing(normalise),
    "normalised in place": lambda: Changing(lambda layer: layer.weight.div_(layer.weight.norm())),
    "bias changed": lambda: Changing(lambda layer: layer.bias.abs_().sqrt_()),
    "compiled": lambda: torch.compile(nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, 4)), backend="eager"),
}


def three(make) -> list[nn.Module]:
    models = []
    for seed in range(3):
        torch.manual_seed(seed)
        models.append(make())
        with torch.no_grad():
            models[-1](data()[0][:2])  # gives lazy layers their shapes
    return models


def evaluator(share: bool | str, **options) -> Evaluator:
    return Evaluator(data(), batch_size=32, memory_format=torch.contiguous_format, share_first_layer=share, **options)


def scan(models: list[nn.Module], *, share: bool | str, **options):
    return scan_line(*models, evaluator(share, **options), 11)


def layer_of(result) -> str:
    return result.choices["splits"]["data"]["first_layer"]


@pytest.mark.parametrize("name", MODELS)
def test_sharing_changes_rounding_alone(name):
    models = three(MODELS[name])
    with_sharing, without = scan(models, share=True), scan(models, share=False)
    assert (layer_of(with_sharing), layer_of(without)) == ("shared", "computed")
    loss, expected = with_sharing.values["data"]["loss"], without.values["data"]["loss"]
    np.testing.assert_allclose(loss, expected, rtol=2e-6)
    assert (loss[0], loss[-1]) == (expected[0], expected[-1])  # ends are computed in full


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("name", UNSHARED)
def test_what_cannot_be_shared_is_computed(name):
    models = three(UNSHARED[name])
    with_sharing, without = scan(models, share=True), scan(models, share=False)
    assert layer_of(with_sharing) == "computed"
    assert np.array_equal(with_sharing.values["data"]["loss"], without.values["data"]["loss"])


@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_rounding_is_no_reason_to_compute(offset, dtype, scale):
    layers, inputs = [nn.Linear(1000, 64).to(dtype) for _ in range(2)], (torch.rand(50, 1000) + offset).to(dtype)
    known = shared.SharedLayers(layers[0], inputs, directions=1, measured=False)
    ends = [layer.weight.detach().clone() * scale for layer in layers]
    with torch.no_grad():
        for anchor, coordinate in enumerate((0.0, 1.0, -1.5)):
            layers[0].weight.copy_(ends[0] + coordinate * (ends[1] - ends[0]))
            with known.record(anchor) if anchor < 2 else known.combine([coordinate]):
                layers[0](inputs)
    assert known.active


def test_weights_that_change_between_two_calls_are_found():
    models = three(lambda: Changing(normalise, calls=2))
    with_sharing, without = scan(models, share=True), scan(models, share=False)
    assert layer_of(with_sharing) == "computed"
    np.testing.assert_allclose(with_sharing.values["data"]["loss"], without.values["data"]["loss"], rtol=2e-6)


def test_a_small_change_of_the_weights_is_found():
    layer, inputs = nn.Linear(WIDTH, 8), data()[0].flatten(1)
    known = shared.SharedLayers(layer, inputs, directions=1, measured=False)
    with torch.no_grad():
        for anchor in (0, 1):
            with known.record(anchor):
                layer(inputs)
        layer.weight.mul_(1 + 1e-3)
        with known.combine([0.5]):
            assert torch.equal(layer(inputs), nn.functional.linear(inputs, layer.weight, layer.bias))
    assert not known.active


def test_autocast_is_never_shared():
    assert layer_of(scan(three(MODELS["mlp"]), share=True, dtype=torch.bfloat16)) == "computed"


def test_matrix_products_are_saved(monkeypatch):
    models, calls, forward = three(MODELS["mlp"]), [], nn.Linear.forward

    def counting(layer, inputs):
        calls.append(layer.in_features)
        return forward(layer, inputs)

    monkeypatch.setattr(nn.Linear, "forward", counting)
    scan(models, share=True)
    assert calls.count(WIDTH) == 3 * 3  # three batches at each end, and at the midpoint, where combining is checked
    assert calls.count(32) == 3 * 11


@pytest.mark.parametrize(("combining", "expected"), [(0.9, "shared"), (1.0, "computed")])
def test_auto_shares_what_is_faster_to_combine(combining, expected, monkeypatch):
    models, now = three(MODELS["mlp"]), [0.0]
    add, compute = torch.add, shared._compute

    def timed(function, seconds):
        def call(*arguments, **keywords):
            now[0] += seconds
            return function(*arguments, **keywords)

        return call

    monkeypatch.setattr(shared, "clock", lambda device: now[0])
    monkeypatch.setattr(shared, "_compute", timed(compute, 1.0))
    monkeypatch.setattr(torch, "add", timed(add, combining))
    assert layer_of(scan(models, share="auto")) == expected


def test_auto_leaves_layers_of_few_inputs_alone():
    assert layer_of(scan(three(MODELS["low fan-in"]), share="auto")) == "computed"


def test_outputs_on_a_plane_are_combined_from_three():
    layer, (inputs, _) = nn.Linear(WIDTH, 5).double(), data()
    inputs = inputs.flatten(1).double()
    weights = [torch.randn(5, WIDTH, dtype=torch.double) for _ in range(3)]
    known = shared.SharedLayers(layer, inputs, directions=2, measured=False)
    with torch.no_grad():
        for anchor, weight in enumerate((weights[0], weights[0] + weights[1], weights[0] + weights[2])):
            layer.weight.copy_(weight)
            with known.record(anchor):
                layer(inputs[:50])
        layer.weight.copy_(weights[0] + weights[1] + weights[2])
        with known.combine([1.0, 1.0]):  # the first, which is checked
            torch.testing.assert_close(layer(inputs[:50]) - layer.bias, inputs[:50] @ layer.weight.T)
        layer.weight.fill_(torch.nan)
        with known.combine([-0.5, 2.0]):
            found = layer(inputs[:50])
            assert layer(inputs).isnan().all()  # another view
        torch.testing.assert_close(found - layer.bias, inputs[:50] @ (weights[0] - 0.5 * weights[1] + 2 * weights[2]).T)


PLANES = {
    "three models": lambda models, share: scan_plane(models[0], models[0], models[1:], evaluator(share), (5, 4)),
    "random plane": lambda models, share: random_plane(models[0], evaluator(share), (5, 4)),
    "random line": lambda models, share: random_line(models[0], evaluator(share), 8),
}


@pytest.mark.parametrize("name", PLANES)
def test_planes_and_random_lines_share_too(name, monkeypatch):
    models, calls, forward = three(MODELS["mlp"]), [], nn.Linear.forward

    def counting(layer, inputs):
        calls.append(layer.in_features)
        return forward(layer, inputs)

    monkeypatch.setattr(nn.Linear, "forward", counting)
    with_sharing = PLANES[name](models, True)
    batches, anchors = 3, 2 if name == "random line" else 3
    marked = len(getattr(with_sharing, "models", ["the model, an anchor"])) if anchors == 3 else 0
    assert calls.count(WIDTH) == batches * (anchors + marked + 1)  # at one point combining is checked
    without = PLANES[name](models, False)
    assert (layer_of(with_sharing), layer_of(without)) == ("shared", "computed")
    loss, expected = with_sharing.values["data"]["loss"], without.values["data"]["loss"]
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert np.ptp(expected) > 1e-2
    if anchors == 3:
        assert with_sharing.model_values["data"]["loss"].tolist() == without.model_values["data"]["loss"].tolist()


def test_a_plane_is_shared_after_it_was_interrupted(tmp_path):
    models = three(MODELS["mlp"])
    expected = PLANES["random plane"](models, True).values["data"]["loss"]

    def interrupt(done, *_):
        if done == 9:
            raise KeyboardInterrupt

    options = {"grid": (5, 4), "checkpoint": tmp_path / "plane"}
    with pytest.raises(KeyboardInterrupt):
        random_plane(models[0], evaluator(True), progress=interrupt, **options)
    result = random_plane(models[0], evaluator(True), **options)
    assert layer_of(result) == "shared"
    assert np.array_equal(result.values["data"]["loss"], expected)


def test_memory_limit_ends_recording(monkeypatch):
    monkeypatch.setattr(shared, "MEMORY_LIMIT", 32 * 32 * 4 * 3)  # A takes all of it, B none
    models = three(MODELS["mlp"])
    limited = scan(models, share=True)
    assert layer_of(limited) == "computed"
    monkeypatch.setattr(shared, "MEMORY_LIMIT", 32 * 32 * 4 * 4)  # all of A and the first batch of B
    partly = scan(models, share=True)
    assert layer_of(partly) == "shared"
    expected = scan(models, share=False).values["data"]["loss"]
    assert np.array_equal(limited.values["data"]["loss"], expected)
    np.testing.assert_allclose(partly.values["data"]["loss"], expected, rtol=2e-6)


def test_layers_have_their_own_forward_back():
    models = three(MODELS["mlp"])
    scan(models, share=True)
    assert all("forward" not in layer.__dict__ for model in models for layer in model.modules())
