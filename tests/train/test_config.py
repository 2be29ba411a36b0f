from __future__ import annotations

import json
from dataclasses import replace

import pytest

from isthmus.errors import InputError
from isthmus.train import Augmentation, NoiseScale, TrainConfig

CONFIG = TrainConfig(steps=100)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0}, "lr is 0, expected a positive number"),
        ({"lr": "0.1"}, "lr is '0.1'"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 2.0}, r"batch_size is 2\.0"),
        ({"momentum": 1}, "momentum is 1"),
        ({"weight_decay": -1e-4}, r"weight_decay is -0\.0001"),
        ({"optimizer": "adam"}, "optimizer is 'adam', expected one of 'sgd', 'adamw'"),
        ({"schedule": "linear"}, "schedule is 'linear'"),
        ({"kind": "triple"}, "kind is 'triple'"),
        ({"noise_rule": "lion"}, "noise_rule is 'lion'"),
        ({"noise_rule": "adam"}, "noise_rule 'adam' does not describe"),
        ({"noise_exponent": float("inf")}, "noise_exponent is inf"),
        ({"steps": None}, "give exactly one of the two"),
        ({"epochs": 3}, "steps is 100 and epochs is 3: give exactly one"),
        ({"steps": 0}, "steps is 0"),
        ({"branch_step": 100}, "branch_step is 100, expected less than the 100 steps"),
        ({"warmup_steps": 100}, "warmup_steps is 100"),
        ({"kind": "independent", "branch_step": 5}, "independent models have no trunk"),
        ({"anneal_steps": 5, "schedule": "cosine"}, "has annealed the ends already"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov needs a momentum"),
        ({"ema_decay": 1.0}, r"ema_decay is 1\.0"),
        ({"betas": (0.9, 1.0)}, "betas is"),
        ({"decay_fraction": 0.0}, "decay_fraction is 0"),
        ({"min_accuracy": 75}, "min_accuracy is 75"),
        ({"seed": 1.5}, r"seed is 1\.5"),
        ({"threads": 0}, "threads is 0"),
        ({"record_every": 0}, "record_every is 0"),
        ({"augmentation": {"noise": -1}}, "augmentation: noise is -1"),
        ({"augmentation": {"nose": 1}}, "there is no 'nose'; did you mean 'noise'"),
    ],
)
def test_bad_values_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(CONFIG, **changes)  # type: ignore[arg-type]


def test_configuration_comes_back_from_json() -> None:
    config = replace(
        CONFIG,
        betas=(0.8, 0.95),
        augmentation=Augmentation(crop=2, flip=True, noise=0.1),
        model_options={"widths": [8, 8]},
        ema_decay=0.9,
    )
    back = TrainConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert back == config
    assert back.digest == config.digest


def test_digest_changes_with_every_value() -> None:
    others = [
        replace(CONFIG, lr=0.2),
        replace(CONFIG, seed=1),
        replace(CONFIG, augmentation={"noise": 0.1}),  # type: ignore[arg-type]
        replace(CONFIG, model_options={"norm": "batch"}),
    ]
    digests = {config.digest for config in [CONFIG, *others]}
    assert len(digests) == 5
    assert len(CONFIG.digest) == 64


def test_unknown_names_are_named_with_the_nearest_known() -> None:
    with pytest.raises(InputError, match="there is no 'batchsize'; did you mean 'batch_size'"):
        TrainConfig.from_dict({"batchsize": 16, "steps": 10})


def test_noise_scale_follows_optimizer_and_rule() -> None:
    config = replace(CONFIG, lr=0.2, batch_size=32, momentum=0.9, noise_exponent=2.0)
    assert config.noise_scale == NoiseScale(0.2, 32, 0.9, 2.0)
    adamw = replace(config, optimizer="adamw")
    with pytest.raises(InputError, match="does not hold for the optimizer 'adamw'"):
        _ = adamw.noise_scale
    assert replace(adamw, noise_rule="adam").noise_scale == NoiseScale(0.2, 32, rule="adam")
    assert replace(adamw, noise_rule="sgd", betas=(0.8, 0.9)).noise_scale == NoiseScale(0.2, 32, 0.8, 2.0)


def test_epochs_are_whole_batches_of_the_training_data() -> None:
    config = TrainConfig(epochs=3, batch_size=16, branch_step=20)
    assert TrainConfig(epochs=3, batch_size=16).total_steps(100) == 18
    assert CONFIG.total_steps(100) == 100
    with pytest.raises(InputError, match="branch_step is 20, expected less than the 18 steps"):
        config.total_steps(100)
    with pytest.raises(InputError, match="larger than the 15 training examples"):
        config.total_steps(15)
