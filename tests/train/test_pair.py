from __future__ import annotations

import copy
import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

from isthmus.errors import FileError, InputError
from isthmus.train import Data, Pair, TrainConfig, build_model, load_data, train_pair
from isthmus.train.batches import Batches
from isthmus.train.seeds import derived_seed

pytest.importorskip("sklearn")

CONFIG = TrainConfig(steps=40, branch_step=10, warmup_steps=5, augmentation={"noise": 0.3}, record_every=4)


@pytest.fixture(scope="module")
def digits() -> Data:
    return load_data("digits")


def equal(a: dict[str, torch.Tensor] | None, b: dict[str, torch.Tensor] | None) -> bool:
    return a is not None and b is not None and a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_same_configuration_gives_same_bits_whatever_the_global_state(digits: Data) -> None:
    torch.manual_seed(1)
    first = train_pair(CONFIG, data=digits)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = train_pair(CONFIG, data=digits)
    assert torch.equal(torch.get_rng_state(), before)
    for name in ("trunk", "a", "b"):
        assert equal(getattr(first, name), getattr(second, name)), name
    assert not equal(first.a, first.b)
    assert not equal(first.a, train_pair(replace(CONFIG, seed=1), data=digits).a)
    assert first.history == second.history


# Adam divides by the size of the gradient: a bias before BatchNorm, whose gradient is zero but for rounding, is noise
@pytest.mark.parametrize(("optimizer", "lr", "norm"), [("sgd", 0.1, "batch"), ("adamw", 1e-3, "none")])
def test_weights_are_those_of_a_plain_loop(
    digits: Data, optimizer: Literal["sgd", "adamw"], lr: float, norm: str
) -> None:
    config = replace(CONFIG, optimizer=optimizer, lr=lr, model_options={"norm": norm})
    pair = train_pair(config, data=digits)
    with torch.random.fork_rng():
        torch.manual_seed(derived_seed(config.seed, "weights/trunk"))
        trunk = build_model("mlp", digits, norm=norm)
    for end in ("a", "b"):
        model = copy.deepcopy(trunk)
        optim: torch.optim.Optimizer
        if optimizer == "sgd":
            optim = torch.optim.SGD(model.parameters(), config.lr, momentum=0.9, weight_decay=5e-4, foreach=False)
        else:
            optim = torch.optim.AdamW(model.parameters(), config.lr, weight_decay=5e-4, foreach=False)
        step = 0
        for purpose, steps in (("trunk", 10), (end, 30)):
            batches = Batches(
                digits.train_x, digits.train_y, 16, config.augmentation, seed=config.seed, purpose=purpose
            )
            for inputs, labels in itertools.chain(*batches.chunks(steps)):
                optim.param_groups[0]["lr"] = config.lr * min(1, (step + 1) / 5)
                optim.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()
                optim.step()
                step += 1
            if purpose == "trunk":
                torch.testing.assert_close(pair.trunk, dict(model.state_dict()), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(pair.states[end], dict(model.state_dict()), rtol=1e-3, atol=1e-4)


def test_state_dicts_are_on_the_cpu_and_share_no_memory(digits: Data) -> None:
    pair = train_pair(replace(CONFIG, anneal_steps=4, ema_decay=0.9), data=digits)
    assert list(pair.states) == ["trunk", "a", "b", "annealed_a", "annealed_b", "ema"]
    storages = {tensor.untyped_storage().data_ptr() for state in pair.states.values() for tensor in state.values()}
    assert len(storages) == sum(map(len, pair.states.values()))


def test_steps_and_history(digits: Data) -> None:
    seen: list[tuple[int, int]] = []
    config = replace(CONFIG, anneal_steps=6)
    pair = train_pair(config, data=digits, progress=lambda done, total: seen.append((done, total)))
    assert pair.steps == {"trunk": 10, "a": 30, "annealed_a": 6, "b": 30, "annealed_b": 6}
    assert seen[-1] == (82, 82)
    assert pair.history["trunk"]["step"] == [4, 8, 10]
    assert pair.history["trunk"]["lr"] == pytest.approx([0.08, 0.1, 0.1])
    assert pair.history["a"]["step"] == [14, 18, 22, 26, 30, 34, 38, 40]
    assert pair.history["annealed_a"]["lr"] == pytest.approx([0.1 * (1 - 3 / 6), 0.1 * (1 - 5 / 6)])
    assert pair.trunk is not None
    square = sum(float(value.double().square().sum()) for value in pair.trunk.values() if value.ndim >= 2)
    assert pair.history["trunk"]["weight_norm_squared"][-1] == pytest.approx(square, rel=1e-5)
    assert pair.history["trunk"]["effective_lr"][-1] == pytest.approx(0.1 / square, rel=1e-5)


def test_independent_pairs_start_apart_and_have_no_trunk(digits: Data) -> None:
    pair = train_pair(
        replace(CONFIG, kind="independent", branch_step=0, warmup_steps=0, steps=1, lr=1e-30), data=digits
    )
    assert pair.trunk is None
    assert pair.steps == {"a": 1, "b": 1}
    assert pair.a is not None
    assert pair.b is not None
    assert torch.cosine_similarity(pair.a["1.weight"].flatten(), pair.b["1.weight"].flatten(), dim=0).abs() < 0.1


def test_moving_average_of_branch_a(digits: Data) -> None:
    config = replace(CONFIG, steps=11, ema_decay=0.75, model_options={"norm": "batch"})
    pair = train_pair(config, data=digits)
    assert pair.trunk is not None
    assert pair.a is not None
    assert pair.ema is not None
    for key, averaged in pair.ema.items():
        if averaged.is_floating_point():  # one step since the branch
            torch.testing.assert_close(averaged, 0.75 * pair.trunk[key] + 0.25 * pair.a[key])
        else:
            assert torch.equal(averaged, pair.a[key])


def test_divergence_is_recorded(digits: Data) -> None:
    pair = train_pair(replace(CONFIG, lr=1e30, model_options={"norm": "none"}), data=digits)
    assert pair.status == "diverged"
    assert pair.a is None
    assert pair.b is None


def test_history_of_a_phase_that_stopped_within_a_window(digits: Data) -> None:
    # the loss is looked at after 128 steps, which are 18 whole windows of 7
    config = replace(CONFIG, steps=200, branch_step=0, lr=1e30, model_options={"norm": "none"}, record_every=7)
    pair = train_pair(config, data=digits)
    assert pair.status == "diverged"
    assert pair.steps == {"trunk": 0, "a": 128}
    assert {len(column) for column in pair.history["a"].values()} == {18}
    assert {len(column) for column in pair.history["trunk"].values()} == {0}


def test_model_without_matrices_has_no_effective_learning_rate(digits: Data) -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(10))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images.flatten(1)[:, :10] * self.scale

    history = train_pair(CONFIG, model=lambda data: Scales(), data=digits).history["a"]
    assert set(history["weight_norm_squared"]) == {0.0}
    assert set(history["effective_lr"]) == {float("inf")}


def test_saved_pair_comes_back(digits: Data, tmp_path: Path) -> None:
    pair = train_pair(replace(CONFIG, anneal_steps=2, ema_decay=0.9), data=digits)
    pair.save(tmp_path / "deep" / "pair")
    loaded = Pair.load(tmp_path / "deep" / "pair")
    assert loaded.config == pair.config
    assert loaded.config.digest == pair.config.digest
    assert (loaded.status, loaded.steps, loaded.history, loaded.seconds) == (
        pair.status,
        pair.steps,
        pair.history,
        pair.seconds,
    )
    assert loaded.states.keys() == pair.states.keys()
    assert all(equal(loaded.states[name], pair.states[name]) for name in pair.states)


def test_diverged_pair_comes_back(digits: Data, tmp_path: Path) -> None:
    pair = train_pair(replace(CONFIG, lr=1e30, model_options={"norm": "none"}), data=digits)
    pair.save(tmp_path)
    loaded = Pair.load(tmp_path)
    assert loaded.status == "diverged"
    assert loaded.states.keys() == pair.states.keys()
    assert str(loaded.history) == str(pair.history)  # NaN is not equal to itself


def test_interrupted_saving_leaves_no_finished_pair(
    digits: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = train_pair(CONFIG, data=digits)
    pair.save(tmp_path)
    replaced = 0
    replace_file = os.replace

    def interrupted(source: str, target: str) -> None:
        nonlocal replaced
        replaced += 1
        if replaced == 2:
            raise KeyboardInterrupt
        replace_file(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pair.save(tmp_path)
    with pytest.raises(FileError, match="does not hold a finished pair"):
        Pair.load(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b.safetensors", "trunk.safetensors"]


def test_loading_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="does not hold a finished pair"):
        Pair.load(tmp_path / "none")
    (tmp_path / "pair.json").write_text('{"schema": 99}')
    with pytest.raises(FileError, match="schema 1"):
        Pair.load(tmp_path)


def test_batch_larger_than_the_data(digits: Data) -> None:
    with pytest.raises(InputError, match="batch_size is 16, larger than the 10 training examples"):
        train_pair(CONFIG, data=digits.subset(train=10))


def test_model_factory_with_dropout_and_tied_weights_is_reproducible(digits: Data) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(64, 64)
            self.second = nn.Linear(64, 64)
            self.second.weight = self.first.weight
            self.frozen = nn.Linear(64, 64).requires_grad_(False)
            self.head = nn.Linear(64, 10)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            hidden = self.second(self.first(images.flatten(1)).relu()).relu()
            return self.head(nn.functional.dropout(self.frozen(hidden), 0.2, self.training))

    pair = train_pair(CONFIG, model=lambda data: Tied(), data=digits)
    again = train_pair(CONFIG, model=lambda data: Tied(), data=digits)
    assert equal(pair.a, again.a)
    assert pair.a is not None
    assert pair.trunk is not None
    assert torch.equal(pair.a["first.weight"], pair.a["second.weight"])
    assert not torch.equal(pair.a["first.weight"], pair.trunk["first.weight"])
    assert torch.equal(pair.a["frozen.weight"], pair.trunk["frozen.weight"])


def test_threads_are_set_while_training_and_put_back(digits: Data) -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    train_pair(replace(CONFIG, threads=1), data=digits, progress=lambda *_: seen.append(torch.get_num_threads()))
    assert set(seen) == {1}
    assert torch.get_num_threads() == before


def test_the_model_learns(digits: Data) -> None:
    pair = train_pair(replace(CONFIG, steps=150), data=digits)
    losses = pair.history["a"]["loss"]
    assert losses[-1] < 0.5 < 2 < pair.history["trunk"]["loss"][0]
