from __future__ import annotations

import pytest
import torch
from torch import nn

from isthmus.errors import InputError
from isthmus.train import MLP, Data, ResNet18, build_model


def data(*shape: int, classes: int = 5) -> Data:
    x, y = torch.randn(6, *shape), torch.arange(6) % classes
    return Data(x, y, x, y, x, y, classes, "made up")


@pytest.mark.parametrize(("norm", "count"), [("none", 0), ("batch", 4), ("layer", 4)])
def test_mlp_shapes_and_parameters(norm: str, count: int) -> None:
    model = MLP(12, [8, 7], 5, norm=norm)  # type: ignore[arg-type]
    assert model(torch.randn(3, 1, 3, 4)).shape == (3, 5)
    expected = (12 * 8 + 8) + (8 * 7 + 7) + (7 * 5 + 5) + (2 * 8 + 2 * 7 if count else 0)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


def test_mlp_without_hidden_layers_is_linear() -> None:
    model = MLP(4, [], 2)
    x = torch.randn(3, 4)
    torch.testing.assert_close(model(x), x @ model[1].weight.T + model[1].bias)


def test_unknown_norm() -> None:
    with pytest.raises(InputError, match="norm is 'group'"):
        MLP(4, [4], 2, norm="group")  # type: ignore[arg-type]


@pytest.mark.parametrize("side", [8, 28, 32])
def test_resnet18_of_any_width(side: int) -> None:
    model = ResNet18(7, width=4, in_channels=1)
    assert model(torch.randn(2, 1, side, side)).shape == (2, 7)


def test_resnet18_has_the_published_number_of_parameters() -> None:
    assert sum(parameter.numel() for parameter in ResNet18(10).parameters()) == 11_173_962


def test_models_fit_their_data() -> None:
    assert build_model("mlp", data(2, 3, 3), widths=[4])(torch.randn(2, 2, 3, 3)).shape == (2, 5)
    assert build_model("resnet18", data(2, 8, 8), width=4)(torch.randn(2, 2, 8, 8)).shape == (2, 5)


def own_model(data: Data, *, bias: bool = True) -> nn.Module:
    return nn.Linear(data.train_x.shape[1], data.num_classes, bias=bias)


def not_a_model(data: Data) -> int:
    return 3


def test_own_factory() -> None:
    model = build_model(f"{__name__}:own_model", data(4), bias=False)
    assert isinstance(model, nn.Linear)
    assert model.bias is None


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet-18", {}, "there is no model 'resnet-18'; did you mean 'resnet18'"),
        ("zzz", {}, "there is no model 'zzz'. Known are mlp, resnet18"),
        ("mlp", {"width": 3}, r"'mlp' does not take the options \['width'\]"),
        ("resnet18", {}, r"resnet18 needs images.*\(6, 4\)"),
        ("no_such_module:factory", {}, "could not be imported: No module named"),
        (f"{__name__}:missing", {}, "could not be imported"),
        (f"{__name__}:__name__", {}, "is a str, expected a callable"),
        (f"{__name__}:not_a_model", {}, "is a int, expected a torch.nn.Module"),
    ],
)
def test_bad_names_and_options(name: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_model(name, data(4), **options)
