"""BatchNorm statistics: found, saved, re-estimated, restored."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from isthmus import norms
from isthmus.errors import InputError


def scalar_norm(**options) -> nn.BatchNorm1d:
    return nn.BatchNorm1d(1, **options)


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None]


def test_finds_each_layer_with_statistics_once():
    shared = scalar_norm()
    model = nn.Sequential(shared, nn.Sequential(nn.BatchNorm2d(2), shared), nn.LayerNorm(3), nn.InstanceNorm1d(1))
    model.append(scalar_norm(track_running_stats=False))
    assert norms.batch_norms(model) == [shared, model[1][0]]


def test_statistics_by_hand():
    layer = scalar_norm()
    assert norms.reset_statistics(layer, column(1, 3, 5, 7), batch_size=2) == 4
    assert layer.running_mean.item() == 4
    assert layer.running_var.item() == 2
    assert layer.num_batches_tracked.item() == 2


def test_batches_are_weighted_by_their_size():
    layer = scalar_norm()
    # batches [0, 2, 4] (mean 2, unbiased variance 4) and [10, 12] (mean 11, variance 2)
    norms.reset_statistics(layer, column(0, 2, 4, 10, 12), batch_size=3)
    assert layer.running_mean.item() == pytest.approx((3 * 2 + 2 * 11) / 5)
    assert layer.running_var.item() == pytest.approx((3 * 4 + 2 * 2) / 5)


def test_a_last_batch_of_one_joins_the_one_before():
    layer = scalar_norm()
    norms.reset_statistics(layer, column(0, 2, 4, 6, 13), batch_size=2)  # [0, 2] and [4, 6, 13]
    late = torch.tensor([4.0, 6, 13])
    assert layer.running_mean.item() == pytest.approx((2 * 1 + 3 * late.mean().item()) / 5)
    assert layer.running_var.item() == pytest.approx((2 * 2 + 3 * late.var().item()) / 5)


def test_old_statistics_leave_no_trace():
    layer = scalar_norm()
    layer.running_mean.fill_(float("nan"))
    layer.running_var.fill_(float("inf"))
    norms.reset_statistics(layer, column(1, 3, 5, 7), batch_size=2)
    assert (layer.running_mean.item(), layer.running_var.item()) == (4, 2)


def test_iterable_of_batches_is_used_as_it_comes():
    layer = scalar_norm()
    norms.reset_statistics(layer, [(column(0, 2, 4), "label"), column(10, 12)])
    assert layer.running_mean.item() == pytest.approx(5.6)


def test_statistics_of_convolutional_layers_pool_over_positions():
    layer = nn.BatchNorm2d(3)
    images = torch.randn(8, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    norms.reset_statistics(layer, images)
    torch.testing.assert_close(layer.running_mean, images.mean((0, 2, 3)))
    torch.testing.assert_close(layer.running_var, images.var((0, 2, 3)))


def test_deeper_layers_see_batch_normalised_activations_and_no_dropout():
    model = nn.Sequential(scalar_norm(eps=1e-12), nn.Dropout(0.5), scalar_norm())
    norms.reset_statistics(model, column(1, 3, 5, 7), batch_size=2)  # the first layer emits -1 and 1 in both batches
    assert model[2].running_mean.item() == pytest.approx(0, abs=1e-6)
    assert model[2].running_var.item() == pytest.approx(2)


def test_modes_and_momenta_come_back():
    model = nn.Sequential(scalar_norm(momentum=None), nn.Dropout(), scalar_norm(momentum=0.3))
    model[0].eval()
    model.register_forward_hook(lambda module, *_: seen.extend(part.training for part in module))
    seen: list[bool] = []
    norms.reset_statistics(model, column(1, 3, 5, 7))
    assert seen == [True, False, True]
    assert [part.training for part in model] == [False, True, True]
    assert (model[0].momentum, model[2].momentum) == (None, 0.3)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_everything_comes_back_after_an_error(error):
    model = nn.Sequential(scalar_norm(momentum=0.3), nn.Dropout())
    norms.reset_statistics(model, column(1, 3, 5, 7), batch_size=2)

    def batches():
        yield column(100, 200)
        raise error

    with pytest.raises(error):
        norms.reset_statistics(model, batches())
    layer = model[0]
    assert (layer.running_mean.item(), layer.running_var.item(), layer.num_batches_tracked.item()) == (4, 2, 2)
    assert (layer.momentum, layer.training, model[1].training) == (0.3, True, True)


def test_save_and_restore_write_in_place():
    layer = scalar_norm()
    mean = layer.running_mean
    saved = norms.save_statistics(layer)
    norms.reset_statistics(layer, column(1, 3))
    norms.restore_statistics(layer, saved)
    assert layer.running_mean is mean
    assert (mean.item(), layer.running_var.item(), layer.num_batches_tracked.item()) == (0, 1, 0)


def test_without_batch_norm_no_forward_pass_is_made():
    model = nn.Linear(3, 1)  # cannot take inputs of width 1
    assert norms.reset_statistics(model, column(1, 3)) == 0


@pytest.mark.parametrize(("data", "batch_size"), [(column(1), 256), (column(1, 2, 3), 1)])
def test_single_examples_are_refused(data, batch_size):
    with pytest.raises(InputError, match="at least two examples"):
        norms.reset_statistics(scalar_norm(), data, batch_size)


def test_no_batch_is_refused_and_statistics_kept():
    layer = scalar_norm()
    layer.running_mean.fill_(3)
    with pytest.raises(InputError, match="no batch"):
        norms.reset_statistics(layer, [])
    assert layer.running_mean.item() == 3
