"""How models are run: decided by measurements, which here are given."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from isthmus.path import Evaluator, calibrate, scan_line

PLAIN, CHANNELS_LAST = torch.contiguous_format, torch.channels_last


@pytest.mark.parametrize(
    ("each", "best"),
    [
        ({}, 64),
        ({32: 0.96, 128: 0.96}, 64),  # by less than 5 %
        ({32: 0.9}, 32),
        ({32: 0.97, 16: 0.9, 8: 0.1}, 16),  # at most to a quarter
        ({32: 0.9, 128: 0.8, 256: 0.1}, 128),  # at most to the double
    ],
)
def test_batch_sizes_move_where_that_is_faster(each, best):
    assert calibrate.fastest(lambda size: size * each.get(size, 1.0), 64) == best


def test_batch_sizes_are_at_least_one():
    assert calibrate.fastest(lambda size: size * (1.0 if size > 1 else 0.5), 2) == 1
    assert calibrate.fastest(lambda size: float(size), 1) == 1


def test_the_fastest_of_several_passes_counts():
    # Sizes 16, 32, 64 and 128 in turn; 32 needs the least in the second pass alone.
    times = iter([16, 32, 64, 128, 16, 24, 64, 128, 16, 32, 64, 128])
    assert calibrate.fastest(lambda size: next(times), 64) == 32


def test_batches_start_with_what_fits_activations():
    wide, data = nn.Linear(2, 2**16), torch.zeros(5, 2)  # 256 KiB a sample: 32 of them are 8 MiB
    model = nn.Sequential(wide, nn.Linear(2**16, 2))
    assert calibrate.starting_batch_size(model, data) == 32
    assert calibrate.starting_batch_size(nn.Identity(), data) == 1024
    assert calibrate.starting_batch_size(nn.Linear(2, 2**22), data) == 1
    assert not wide._forward_hooks


class Clock:
    """Time that passes only in forward passes: a fixed cost for each, and one for each example."""

    def __init__(self, monkeypatch, per_pass: float, per_example: dict[torch.memory_format, float]) -> None:
        self.now, self.sizes = 0.0, []
        self.per_pass, self.per_example = per_pass, per_example
        monkeypatch.setattr(calibrate, "clock", lambda device: self.now)

    def hook(self, _module, inputs, _output) -> None:
        (images,) = inputs
        self.sizes.append(len(images))
        memory_format = CHANNELS_LAST if images.dim() == 4 and images.stride(1) == 1 else PLAIN
        self.now += self.per_pass + self.per_example[memory_format] * len(images)


def run(model: nn.Module, clock: Clock, inputs: torch.Tensor, **options) -> Evaluator:
    handle = model.register_forward_hook(clock.hook)
    evaluator = Evaluator((inputs, torch.zeros(len(inputs), dtype=torch.long)), **options)
    evaluator.calibrate(model)
    handle.remove()
    return evaluator


def test_large_batches_where_passes_cost_much(monkeypatch):
    model = nn.Linear(2**11, 2)  # 8 KiB an example: 1024 of them are 8 MiB
    for per_pass, expected in ((1e3, 2048), (0.0, 1024)):
        clock = Clock(monkeypatch, per_pass, {PLAIN: 1.0})
        assert run(model, clock, torch.zeros(8 * 1024, 1).expand(-1, 2**11)).batch_size == expected
        assert max(clock.sizes) == 2048


def test_little_data_is_not_measured(monkeypatch):
    clock = Clock(monkeypatch, 1e3, {PLAIN: 1.0})
    assert run(nn.Linear(2, 2), clock, torch.zeros(8 * 1024 - 1, 2)).batch_size == 1024
    assert clock.sizes == [2]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("faster", "expected"), [(0.9, CHANNELS_LAST), (0.96, PLAIN), (2.0, PLAIN)])
def test_images_in_the_faster_format(channels, faster, expected, monkeypatch):
    images = torch.randn(10, channels, 6, 7)
    model = nn.Sequential(nn.Conv2d(channels, 2, 3), nn.Flatten(), nn.Linear(40, 3))
    evaluator = run(model, Clock(monkeypatch, 0.0, {PLAIN: 1.0, CHANNELS_LAST: faster}), images)
    assert evaluator.memory_format is expected
    assert (evaluator.inputs is images) == (expected is PLAIN)
    assert torch.equal(evaluator.inputs, images)
    torch.testing.assert_close(evaluator.outputs(model), model(images))
    assert evaluator.choices()["memory_format"] == str(expected).removeprefix("torch.")


def test_convolutions_run_in_the_format_of_images_with_one_channel():
    seen = []
    model = nn.Conv2d(1, 4, 3)
    model.register_forward_hook(lambda _m, _i, output: seen.append(output.is_contiguous(memory_format=CHANNELS_LAST)))
    model(calibrate.arranged(torch.randn(2, 1, 6, 7), CHANNELS_LAST))
    assert seen == [True]


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (nn.Flatten(), torch.zeros(2, 3, 4, 4)),
        (nn.Conv1d(3, 2, 1), torch.zeros(2, 3, 4)),
        (torch.compile(nn.Conv2d(3, 2, 1), backend="eager"), torch.zeros(2, 3, 4, 4)),
    ],
)
def test_what_does_not_convolve_images_keeps_its_format(model, inputs, monkeypatch):
    monkeypatch.setattr(calibrate, "_seconds", lambda *_: pytest.fail("timed"))
    assert calibrate.memory_format(model, inputs) is PLAIN


def test_what_is_given_is_taken(monkeypatch):
    monkeypatch.setattr(calibrate, "_seconds", lambda *_: pytest.fail("timed"))
    images, model = torch.zeros(64, 3, 4, 4), nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten())
    evaluator = Evaluator((images, torch.zeros(64).long()), batch_size=3, memory_format=CHANNELS_LAST)
    assert evaluator.inputs.is_contiguous(memory_format=CHANNELS_LAST)
    evaluator(model)
    assert (evaluator.batch_size, evaluator.memory_format) == (3, CHANNELS_LAST)


def test_the_first_model_decides_for_good(monkeypatch):
    evaluator = Evaluator((torch.zeros(5, 2), torch.zeros(5, dtype=torch.long)))
    assert (evaluator.batch_size, evaluator.memory_format) == (None, None)
    evaluator(nn.Sequential(nn.Linear(2, 2**16), nn.Linear(2**16, 2)))
    evaluator(nn.Identity())
    assert evaluator.choices() == {
        "samples": 5,
        "batch_size": 32,
        "memory_format": "contiguous_format",
        "autocast": None,
    }


@pytest.mark.parametrize("faster", [0.9, 2.0])
def test_statistics_are_estimated_from_images_in_the_faster_format(faster, monkeypatch):
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 2)) for _ in range(3)]
    images, seen = torch.randn(8, 3, 6, 6), []

    def evaluate(model: nn.Module) -> float:
        return model[1].running_var.sum().item()

    expected = scan_line(*models, evaluate, 3, bn_data=images).values["data"]["loss"]
    clock = Clock(monkeypatch, 0.0, {PLAIN: 1.0, CHANNELS_LAST: faster})
    models[0].register_forward_hook(clock.hook)
    models[0].register_forward_hook(lambda model, inputs, _: seen.append((model[1].training, inputs[0].stride(1))))
    found = scan_line(*models, evaluate, 3, bn_data=images).values["data"]["loss"]
    assert [stride for training, stride in seen if training] == [1 if faster < 1 else 36] * 3
    assert found == pytest.approx(expected, rel=1e-5)
    assert models[0].training
