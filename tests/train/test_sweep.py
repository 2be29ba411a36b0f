import dataclasses
import json

import numpy as np
import pytest
import torch

from isthmus.errors import FileError, InputError, IsthmusError
from isthmus.io import load_state
from isthmus.norms import reset_statistics
from isthmus.train import Augmentation, TrainConfig, build_model, load_data, sweep
from isthmus.train.sweep import SweepConfig, run_sweep

TINY = TrainConfig(
    model_options={"widths": [8]}, batch_size=32, steps=12, branch_step=4, anneal_steps=3, ema_decay=0.5, min_accuracy=0
)


def tiny(base=TINY, **axes):
    return SweepConfig(base, **({"lr": [0.05, 0.2], "pairs": 2, "points": 3} | axes))


def plain(record):
    """A record without what differs from run to run."""
    values = record.to_dict()
    if values["path"]:
        del values["path"]["seconds"]
    return json.dumps({key: value for key, value in values.items() if key != "seconds"}, sort_keys=True)


def test_grid_order_and_noise_scales_by_hand():
    config = SweepConfig(TINY, lr=[0.1, 0.2], batch_size=[10, 20], momentum=[0.5], augmentation=[{"noise": 0.5}])
    assert [(s.lr, s.batch_size) for s in config.scales] == [(0.1, 10), (0.1, 20), (0.2, 10), (0.2, 20)]
    assert [s.noise_scale for s in config.scales] == pytest.approx([0.02, 0.01, 0.04, 0.02])
    assert config.scales[0].weight_decay == TINY.weight_decay
    assert config.scales[0].augmentation == {"noise": 0.5}
    assert config.configs[3].augmentation == Augmentation(noise=0.5)
    assert config.base.threads == 1
    assert {c.seed for c in config.configs} == {TINY.seed}


@pytest.mark.parametrize(
    ("base", "formula"),
    [
        (TINY, "lr / (batch size · (1 − momentum))"),
        (dataclasses.replace(TINY, noise_exponent=2.0), "lr / (batch size · (1 − momentum)^2)"),
        (dataclasses.replace(TINY, optimizer="adamw", momentum=0, noise_rule="adam"), "lr / √(batch size)"),
    ],
)
def test_noise_formula(base, formula):
    assert SweepConfig(base).noise_formula == formula


def test_dict_and_toml(tmp_path):
    config = SweepConfig(TINY, lr=[0.1, 0.2], augmentation=[{}, {"crop": 1}], pairs=3, points=5)
    assert SweepConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    (tmp_path / "grid.toml").write_text(
        """
        pairs = 3
        points = 5
        [base]
        steps = 12
        branch_step = 4
        anneal_steps = 3
        ema_decay = 0.5
        batch_size = 32
        min_accuracy = 0
        model_options = {widths = [8]}
        [grid]
        lr = [0.1, 0.2]
        augmentation = [{}, {crop = 1}]
        """
    )
    assert SweepConfig.from_toml(tmp_path / "grid.toml") == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"base": {"steps": 5}, "grid": {"learning_rate": [1]}}, "no 'learning_rate'"),
        ({"base": {"steps": 5, "momentun": 0.5}}, "did you mean 'momentum'"),
        ({"base": {"steps": 5}, "pair": 3}, "did you mean 'pairs'"),
        ({"base": {"steps": 5}, "grid": {"lr": "0.1"}}, "lr is '0.1', expected a list"),
        ({"base": {"steps": 5}, "grid": {"lr": [0.1, -1]}}, "lr is -1, expected a positive number"),
        ({"base": {"steps": 5}, "grid": {"lr": [0.1, 0.1]}}, "lr has 0.1 twice"),
        ({"base": {"steps": 5}, "pairs": 0}, "pairs is 0"),
        ({"base": {"steps": 5}, "points": 2}, "points is 2"),
        ({"base": {"steps": 5, "optimizer": "adamw"}}, "name the rule"),
        ({"base": 5}, "base is 5, expected a table"),
        ({}, "steps is None and epochs is None"),
    ],
)
def test_configurations_that_cannot_be(values, message):
    with pytest.raises(InputError, match=message):
        SweepConfig.from_dict(values)


def test_toml_that_cannot_be_read(tmp_path):
    with pytest.raises(FileError, match=r"none\.toml"):
        SweepConfig.from_toml(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("lr = = 3")
    with pytest.raises(FileError, match="not a TOML file"):
        SweepConfig.from_toml(tmp_path / "bad.toml")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A sweep of 2 scales with 2 pairs each: its folder, result and progress calls."""
    folder = tmp_path_factory.mktemp("sweep") / "out"
    calls = []
    result = run_sweep(tiny(), folder, progress=lambda done, total: calls.append((done, total)))
    return folder, result, calls


def test_every_pair_is_saved_evaluated_and_counted(finished):
    folder, result, calls = finished
    assert [(r.scale, r.pair, r.seed, r.status) for r in result.records] == [
        *((0, 0, 0, "ok"), (0, 1, 1, "ok"), (1, 0, 0, "ok"), (1, 1, 1, "ok"))
    ]
    assert calls == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    for scale in range(2):
        for pair in range(2):
            files = {path.name for path in (folder / "pairs" / f"scale{scale:02d}" / f"pair{pair:02d}").iterdir()}
            states = {f"{name}.safetensors" for name in ("trunk", "a", "b", "annealed_a", "annealed_b", "ema")}
            assert files == states | {"pair.json", "record.json"}
    assert len(result.records[0].path.alphas) == 3
    assert result.machine["workers"] == 1


def test_values_are_those_of_the_saved_weights(finished):
    """Losses and accuracies again, from the files, by plain torch in float64 and the definition of each method."""
    folder, result, _ = finished
    data = load_data("digits")
    model = build_model("mlp", data, widths=[8])
    record = result.records[3]
    states = {
        name: load_state(folder / "pairs" / "scale01" / "pair01" / f"{name}.safetensors")
        for name in ("a", "b", "annealed_a", "annealed_b", "ema")
    }
    states["merged"] = {key: (states["a"][key].double() + states["b"][key].double()) / 2 for key in states["a"]}
    for split, (x, y) in (("val", (data.val_x, data.val_y)), ("test", (data.test_x, data.test_y))):
        found = record.methods(split)
        assert set(found) == {*states, "ensemble"}
        logits = {}
        for name, state in states.items():
            model.double().load_state_dict(state)
            logits[name] = model.eval()(x.double()).detach()
        logits["ensemble"] = ((logits["a"].softmax(1) + logits["b"].softmax(1)) / 2).log()
        for name, values in logits.items():
            assert found[name]["loss"] == pytest.approx(torch.nn.functional.cross_entropy(values, y).item(), rel=1e-5)
            assert found[name]["accuracy"] == pytest.approx((values.argmax(1) == y).double().mean().item(), abs=1e-9)


def test_seeds_are_shared_across_scales(finished):
    """With nothing trained before the branch, the trunks of one seed are the same initial weights at every scale."""
    config = tiny(dataclasses.replace(TINY, branch_step=0), pairs=1)
    first, second = (dataclasses.replace(c, steps=1) for c in config.configs)
    trunks = [sweep.train_pair(c).trunk for c in (first, second)]
    assert all(torch.equal(trunks[0][key], trunks[1][key]) for key in trunks[0])


def no_training(*_, **__):
    raise RuntimeError("a pair that is there must not be trained again")


def test_a_finished_sweep_is_only_read(finished, monkeypatch):
    folder, result, _ = finished
    monkeypatch.setattr(sweep, "train_pair", no_training)
    monkeypatch.setattr(sweep, "scan_line", no_training)
    calls = []
    again = run_sweep(tiny(), folder, progress=lambda *call: calls.append(call))
    assert [plain(r) for r in again.records] == [plain(r) for r in result.records]
    assert calls == [(4, 4)]


def test_an_interrupted_sweep_goes_on(finished, tmp_path, monkeypatch):
    _, result, _ = finished
    train, trained = sweep.train_pair, []

    def interrupted(config, **options):
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(config.seed)
        return train(config, **options)

    monkeypatch.setattr(sweep, "train_pair", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(tiny(), tmp_path)
    assert trained == [0, 0]  # pair 0 of both scales comes first
    (tmp_path / "pairs/scale01/pair00/record.json").unlink()  # trained, but not evaluated before the interrupt
    again = []
    monkeypatch.setattr(sweep, "train_pair", lambda config, **o: again.append(config.seed) or train(config, **o))
    resumed = run_sweep(tiny(), tmp_path)
    assert again == [1, 1]
    assert [plain(r) for r in resumed.records] == [plain(r) for r in result.records]


def test_processes_give_the_same_results(finished, tmp_path):
    folder, result, _ = finished
    parallel = run_sweep(tiny(), tmp_path, workers=2)
    assert parallel.machine["workers"] == 2
    assert [plain(r) for r in parallel.records] == [plain(r) for r in result.records]
    for path in sorted(folder.rglob("*.safetensors")):
        one, two = load_state(path), load_state(tmp_path / path.relative_to(folder))
        assert all(torch.equal(one[key], two[key]) for key in one)


def test_an_error_in_a_process_arrives_here(tmp_path):
    config = tiny(dataclasses.replace(TINY, data="fashion-mnist", data_options={"root": str(tmp_path / "none")}))
    with pytest.raises(FileError, match="none"):
        run_sweep(config, tmp_path / "out", workers=2)


def test_another_configuration_in_the_same_folder_is_named(finished):
    folder, _, _ = finished
    with pytest.raises(InputError, match=r"grid\.lr is \[0\.05, 0\.2\] there and \[0\.05, 0\.3\] now.*another folder"):
        run_sweep(tiny(lr=[0.05, 0.3]), folder)
    with pytest.raises(InputError, match=r"base\.model_options\.widths is \[8\] there and \[9\] now"):
        run_sweep(tiny(dataclasses.replace(TINY, model_options={"widths": [9]})), folder)
    with pytest.raises(InputError, match="points is 3 there and 5 now"):
        run_sweep(tiny(points=5), folder)


def test_more_pairs_in_the_same_folder(tmp_path, monkeypatch):
    one = run_sweep(tiny(pairs=1, lr=[0.1]), tmp_path)
    train, trained = sweep.train_pair, []
    monkeypatch.setattr(sweep, "train_pair", lambda config, **o: trained.append(config.seed) or train(config, **o))
    two = run_sweep(tiny(pairs=2, lr=[0.1]), tmp_path)
    assert trained == [1]
    assert plain(two.records[0]) == plain(one.records[0])


def test_a_record_of_other_settings_does_not_count(tmp_path, monkeypatch):
    config = tiny(pairs=1, lr=[0.1])
    first = run_sweep(config, tmp_path)
    path = tmp_path / "pairs/scale00/pair00/record.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"digest": "other", "status": "untrained"}))
    monkeypatch.setattr(sweep, "train_pair", no_training)  # the pair itself is still the right one
    assert plain(run_sweep(config, tmp_path).records[0]) == plain(first.records[0])


def test_diverged_and_untrained_pairs_do_not_stop_the_sweep(tmp_path):
    base = dataclasses.replace(TINY, min_accuracy=0.99)
    config = tiny(base, lr=[1e30, 0.01], pairs=1)
    result = run_sweep(config, tmp_path)
    diverged, untrained = result.records
    assert (diverged.status, diverged.path, diverged.methods("test")) == ("diverged", None, {})
    assert untrained.status == "untrained"
    assert np.mean(untrained.path.summary["val"]["accuracy"].ends) < 0.99
    again = run_sweep(config, tmp_path)
    assert [plain(r) for r in again.records] == [plain(r) for r in result.records]


def test_a_batch_larger_than_the_data_is_found_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "train_pair", no_training)
    with pytest.raises(InputError, match="batch_size is 1000, larger than the"):
        run_sweep(tiny(batch_size=[8, 1000]), tmp_path)


def test_workers_must_be_positive(tmp_path):
    with pytest.raises(InputError, match="workers is 0"):
        run_sweep(tiny(), tmp_path, workers=0)


def test_a_process_that_dies_is_explained(tmp_path):
    config = tiny(dataclasses.replace(TINY, data="os:_exit", data_options={"status": 3}))
    with pytest.raises(IsthmusError, match="worker process of the sweep died"):
        run_sweep(config, tmp_path, workers=2)


def test_batch_norm_statistics_are_estimated_anew_for_every_method(tmp_path):
    base = dataclasses.replace(TINY, model_options={"widths": [8], "norm": "batch"})
    record = run_sweep(tiny(base, pairs=1, lr=[0.1]), tmp_path).records[0]
    assert record.path.choices["bn"] == "reset"
    data = load_data("digits")
    model = build_model("mlp", data, widths=[8], norm="batch")
    for name in ("a", "ema", "annealed_b"):
        model.load_state_dict(load_state(tmp_path / f"pairs/scale00/pair00/{name}.safetensors"))
        reset_statistics(model, data.train_x, 256)
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(model.eval()(data.test_x), data.test_y).item()
        assert record.methods("test")[name]["loss"] == pytest.approx(loss, rel=1e-5)


def test_global_random_state_and_threads_come_back(tmp_path):
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    run_sweep(tiny(pairs=1, lr=[0.1]), tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
