"""Evaluation on resident data."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from isthmus.errors import InputError
from isthmus.path import (
    Evaluator,
    accuracy,
    cross_entropy,
    scan_line,
    scan_plane,
    squared_error,
    token_accuracy,
    token_cross_entropy,
)

INPUTS = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 0.0], [5.0, 5.5], [1.0, -1.0]])
TARGETS = torch.tensor([0, 1, 1, 0, 1])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(INPUTS, TARGETS, strict=True))


def expected_loss() -> float:
    chosen = [math.exp(x[y]) / sum(math.exp(v) for v in x) for x, y in zip(INPUTS.tolist(), TARGETS, strict=True)]
    return -sum(map(math.log, chosen)) / len(chosen)


@pytest.mark.parametrize("batch_size", [None, 1, 2, 3, 5, 100])
def test_means_are_over_samples_whatever_the_batches(batch_size):
    found = Evaluator((INPUTS, TARGETS), batch_size=batch_size)(nn.Identity())
    assert found["loss"] == pytest.approx(expected_loss(), rel=1e-6)
    assert found["accuracy"] == 2 / 5  # of equal logits the first wins


@pytest.mark.parametrize("kind", ["tensors", "dataset", "loader"])
def test_every_kind_of_data_is_the_same_data(kind):
    dataset = TensorDataset(INPUTS, TARGETS)
    loader = DataLoader(dataset, batch_size=2)
    evaluator = Evaluator({"tensors": (INPUTS, TARGETS), "dataset": dataset, "loader": loader}[kind])
    assert torch.equal(evaluator.inputs, INPUTS)
    assert torch.equal(evaluator.targets, TARGETS)
    assert len(evaluator) == 5


def test_items_with_plain_numbers_are_collated():
    class Items(torch.utils.data.Dataset):
        def __len__(self):
            return 5

        def __getitem__(self, index):
            return INPUTS[index], int(TARGETS[index])

    assert torch.equal(Evaluator(Items()).targets, TARGETS)


def test_a_shuffling_loader_is_drawn_from_once():
    loader = DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=2, shuffle=True)
    evaluator = Evaluator(loader)
    first = evaluator.outputs(nn.Identity())
    assert torch.equal(evaluator.outputs(nn.Identity()), first)
    assert sorted(map(tuple, first.tolist())) == sorted(map(tuple, INPUTS.tolist()))


def test_score_of_outputs_is_the_evaluation():
    evaluator = Evaluator((INPUTS, TARGETS), batch_size=2)
    model = nn.Linear(2, 3)
    assert evaluator.score(evaluator.outputs(model)) == pytest.approx(evaluator(model), rel=1e-6)


def test_known_outputs_are_scored_in_the_batches_of_a_call():
    # Mean weighted by class in each batch, which is no mean over samples of the data.
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0]))
    evaluator = Evaluator((INPUTS, TARGETS), loss=weighted, metrics=["loss"], batch_size=2)
    expected = sum(len(t) * weighted(x, t).item() for x, t in zip(INPUTS.split(2), TARGETS.split(2), strict=True)) / 5
    assert evaluator(nn.Identity())["loss"] == pytest.approx(expected)
    assert evaluator.score(INPUTS) == evaluator(nn.Identity())
    assert expected != pytest.approx(weighted(INPUTS, TARGETS).item(), rel=1e-3)


def test_there_is_no_barrier_between_a_model_and_itself_by_any_metric():
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0]))
    model = nn.Linear(2, 2)
    result = scan_line(model, model, model, Evaluator((INPUTS, TARGETS), loss=weighted, batch_size=2), 5)
    assert len(set(result.values["data"]["loss"].tolist())) == 1


def test_own_metrics_per_sample_or_as_a_batch_mean():
    metrics = {
        "per_sample": lambda outputs, targets: outputs[:, 0],
        "batch_mean": lambda outputs, targets: outputs[:, 0].mean(),
        "per_element": lambda outputs, targets: outputs,
    }
    found = Evaluator((INPUTS, TARGETS), metrics=metrics, batch_size=2)(nn.Identity())
    assert found["per_sample"] == found["batch_mean"] == pytest.approx(8 / 5)
    assert found["per_element"] == pytest.approx(INPUTS.double().mean().item())


def test_own_loss_takes_the_place_of_cross_entropy():
    evaluator = Evaluator((INPUTS, INPUTS + 2), loss=nn.functional.mse_loss, metrics=["loss"], batch_size=2)
    assert evaluator(nn.Identity()) == {"loss": pytest.approx(4)}


def test_sums_are_float64():
    # In float32 a running sum of 2^24 would swallow each further 1.
    losses = torch.cat([torch.tensor([2.0**24]), torch.ones(1000)])
    evaluator = Evaluator((losses, losses), metrics={"loss": lambda o, t: o}, batch_size=1)
    assert evaluator(nn.Identity())["loss"] == (2**24 + 1000) / 1001


def test_nan_outputs_give_nan_loss_and_are_not_correct():
    outputs = torch.tensor([[math.nan, 0.0], [1.0, 0.0]])
    assert accuracy(outputs, torch.tensor([0, 0])).tolist() == [False, True]
    assert math.isnan(Evaluator((outputs, torch.tensor([0, 0])))(nn.Identity())["loss"])


def test_batches_count_by_their_samples():
    # Batch losses 10 (two samples) and 9 (one): (2 * 10 + 9) / 3.
    losses = torch.tensor([8.0, 12.0, 9.0])
    for metric in (lambda o, t: o, lambda o, t: o.mean()):
        assert Evaluator((losses, losses), metrics={"loss": metric}, batch_size=2)(nn.Identity())["loss"] == 29 / 3


def test_weighted_metrics_are_weighted_means_over_the_data():
    values, weights = torch.tensor([[1.0, 5.0], [2.0, 7.0], [4.0, 9.0]]), torch.tensor([[1.0, 0], [0.5, 0], [2, 1]])
    evaluator = Evaluator((values, weights), metrics={"loss": lambda o, t: (o, t)}, batch_size=2)
    assert evaluator(nn.Identity())["loss"] == (1 + 1 + 8 + 9) / (1 + 0.5 + 2 + 1)
    with pytest.raises(InputError, match=r"weights of shape \(3,\)"):
        Evaluator((values, weights), metrics={"loss": lambda o, t: (o, t[:, 0])})(nn.Identity())


def test_regression():
    outputs, targets = torch.tensor([[1.0, 2.0], [0.0, -1.0], [3.0, 3.0]]), torch.zeros(3, 2)
    assert Evaluator((outputs, targets), task="regression", batch_size=2)(nn.Identity()) == {
        "loss": pytest.approx((1 + 4 + 0 + 1 + 9 + 9) / 6)
    }
    assert squared_error(outputs, targets).tolist() == [[1, 4], [0, 1], [9, 9]]
    with pytest.raises(InputError, match=r"\(3, 1\) with targets of shape \(3,\)"):
        squared_error(outputs[:, :1], targets[:, 0])


def test_language_modelling_counts_tokens():
    # Token 1 has probability 3/4 whatever came before, token 0 1/4. The labels of what is predicted, by sequence:
    # 1 1 0, then 1 and two that are not counted.
    logits = torch.tensor([0.0, math.log(3)]).expand(2, 4, 2)
    targets = torch.tensor([[0, 1, 1, 0], [0, 1, -100, -100]])
    found = Evaluator((logits, targets), task="language_modelling", batch_size=1)(nn.Identity())
    assert found["loss"] == pytest.approx(-(3 * math.log(3 / 4) + math.log(1 / 4)) / 4)
    assert found["accuracy"] == 3 / 4
    losses, counted = token_cross_entropy(logits, targets)
    assert counted.tolist() == [[True, True, True, False], [True, False, False, False]]
    assert losses.shape == counted.shape
    assert not losses[~counted].any()
    assert torch.equal(token_accuracy(logits, targets)[1], counted)
    with pytest.raises(InputError, match=r"\(n, length, vocabulary\)"):
        token_cross_entropy(logits[:, :3], targets)


def test_data_without_a_token_to_predict_has_no_mean():
    targets = torch.full((2, 4), -100)
    assert math.isnan(Evaluator((torch.zeros(2, 4, 3), targets), task="language_modelling")(nn.Identity())["loss"])


@pytest.mark.parametrize("classes", [1, 2, 10, 15, 16, 17, 40])
def test_cross_entropy_is_that_of_every_number_of_classes(classes):
    torch.manual_seed(0)
    outputs, targets = 20 * torch.randn(33, classes, dtype=torch.double), torch.randint(classes, (33,))
    expected = [
        math.log(sum(math.exp(z - row[y]) for z in row)) for row, y in zip(outputs.tolist(), targets, strict=True)
    ]
    torch.testing.assert_close(cross_entropy(outputs, targets), torch.tensor(expected, dtype=torch.double))
    outputs[0], outputs[1, 0], targets[2] = 1e30, math.nan, -100
    found = cross_entropy(outputs.float(), targets).tolist()
    assert found[0] == pytest.approx(math.log(classes))
    assert math.isnan(found[1])
    assert found[2] == 0
    soft = torch.full((33, classes), 1 / classes)
    outputs = torch.zeros(33, classes)
    torch.testing.assert_close(cross_entropy(outputs, soft), torch.full((33,), math.log(classes)))


def test_dense_predictions_average_per_sample():
    logits = torch.zeros(2, 3, 4)
    logits[0, 1] = 1
    found = Evaluator((logits, torch.ones(2, 4, dtype=torch.long)))(nn.Identity())
    assert found["accuracy"] == 0.5
    losses = cross_entropy(logits, torch.ones(2, 4, dtype=torch.long))
    assert losses.shape == (2, 4)
    assert found["loss"] == pytest.approx(losses.double().mean().item())


def test_models_run_in_evaluation_mode_and_have_their_modes_back():
    model = nn.Sequential(nn.Dropout(0.9), nn.BatchNorm1d(2))
    model[1].eval()
    evaluator = Evaluator((INPUTS, TARGETS))
    assert torch.equal(evaluator.outputs(model), model[1](INPUTS))
    assert (model.training, model[0].training, model[1].training) == (True, True, False)
    assert model[1].num_batches_tracked == 0


def test_scans_report_what_autocast_changes_at_their_models():
    torch.manual_seed(0)
    models = [nn.Linear(2, 2) for _ in range(3)]
    low, high = Evaluator((INPUTS, TARGETS), dtype=torch.bfloat16), Evaluator((INPUTS, TARGETS))

    def expected(model: nn.Module) -> dict[str, float]:
        values, exact = low(model), high(model)
        return {name: values[name] - exact[name] for name in exact}

    line = scan_line(*models, {"low": low, "high": high}, 3).choices["splits"]
    assert line["low"]["autocast_difference"] == {"a": expected(models[1]), "b": expected(models[2])}
    assert line["low"]["autocast"] == "bfloat16"
    assert line["high"]["autocast_difference"] == {}
    assert any(expected(models[1]).values())
    plane = scan_plane(models[0], models[0], models[1:], low, (3, 3)).choices["splits"]["data"]
    named = dict(zip(("base", "A", "B"), models, strict=True))
    assert plane["autocast_difference"] == {name: expected(model) for name, model in named.items()}


class Counting(nn.Module):
    """Adds to its outputs how often it was called, as three kinds of buffers know it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(1))
        self.register_buffer("transient", torch.zeros(1), persistent=False)
        self.register_buffer("replaced", torch.zeros(1))
        self.register_buffer("late", None)

    def forward(self, x):
        self.kept += 1
        self.transient += 1
        self.replaced = self.replaced + 1
        self.late = torch.ones(1)
        return x + self.kept + self.transient + self.replaced


def test_buffers_that_the_forward_pass_changes_come_back():
    model, metrics = Counting(), {"loss": lambda outputs, targets: outputs[:, 0]}
    before = model.replaced
    evaluator = Evaluator((torch.zeros(3, 1), torch.zeros(3)), metrics=metrics, batch_size=1)
    assert evaluator(model) == evaluator(model) == {"loss": (3 + 6 + 9) / 3}
    assert model.kept.item() == model.transient.item() == model.replaced.item() == 0
    assert model.replaced is before
    assert model.late is None


def test_autocast():
    model = nn.Linear(2, 2)
    seen = []
    model.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    outputs = Evaluator((INPUTS, TARGETS), dtype=torch.bfloat16).outputs(model)
    assert set(seen) == {torch.bfloat16}
    assert outputs.dtype == torch.float32
    torch.testing.assert_close(outputs, model(INPUTS), rtol=0.03, atol=0.03)


def test_what_autocast_changes_is_told():
    model = nn.Linear(2, 2)
    low, high = Evaluator((INPUTS, TARGETS), dtype=torch.bfloat16), Evaluator((INPUTS, TARGETS))
    values, exact = low(model), high(model)
    assert values["loss"] != exact["loss"]
    assert low.autocast_difference(model, values) == {name: values[name] - exact[name] for name in exact}


def test_inference_tensors_are_data_like_any_other():
    with torch.inference_mode():
        inputs = INPUTS.clone()
    assert Evaluator((inputs, TARGETS))(nn.Identity())["accuracy"] == 2 / 5


def test_a_model_that_writes_into_its_input_is_refused():
    with pytest.raises(InputError, match="writes into its input"):
        Evaluator((INPUTS.clone(), TARGETS))(nn.ReLU(inplace=True))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((INPUTS, TARGETS[:3]), "as many inputs as targets"),
        ((INPUTS[:0], TARGETS[:0]), "at least one"),
        (TensorDataset(INPUTS), "1 parts"),
        (DataLoader(TensorDataset(INPUTS, TARGETS, TARGETS)), "3 parts"),
        (INPUTS, "a Tensor"),
        (([1.0], [2.0]), "as tensors"),
        (TensorDataset(INPUTS[:0], TARGETS[:0]), "no example"),
        (Stream(), "no length"),
    ],
)
def test_bad_data_is_named(data, message):
    with pytest.raises(InputError, match=message):
        Evaluator(data)


def test_bad_options_are_named():
    with pytest.raises(InputError, match="batch_size"):
        Evaluator((INPUTS, TARGETS), batch_size=0)
    with pytest.raises(InputError, match=r"batch_size .* an integer of at least 1, got 2\.5"):
        Evaluator((INPUTS, TARGETS), batch_size=2.5)
    with pytest.raises(InputError, match="loss= is given, and metrics= leaves it out, which measures other"):
        Evaluator((INPUTS, TARGETS), loss=cross_entropy, metrics={"other": accuracy})
    with pytest.raises(InputError, match="which measures accuracy"):
        Evaluator((INPUTS, TARGETS), loss=cross_entropy, metrics=["accuracy"])
    with pytest.raises(InputError, match="'precision'; known by name are loss, accuracy"):
        Evaluator((INPUTS, TARGETS), metrics=["loss", "precision"])
    with pytest.raises(InputError, match="at least one metric"):
        Evaluator((INPUTS, TARGETS), metrics=[])
    with pytest.raises(InputError, match="task='translation'"):
        Evaluator((INPUTS, TARGETS), task="translation")
    with pytest.raises(InputError, match="'accuracy'; known by name are loss"):
        Evaluator((INPUTS, INPUTS), task="regression", metrics=["accuracy"])
    with pytest.raises(InputError, match="share_first_layer='always'"):
        Evaluator((INPUTS, TARGETS), share_first_layer="always")
    with pytest.raises(InputError, match=r"'odd' returned shape \(2,\)"):
        Evaluator((INPUTS, TARGETS), metrics={"odd": lambda o, t: o[0]})(nn.Identity())


def test_any_integer_is_a_batch_size():
    evaluator = Evaluator((INPUTS, TARGETS), batch_size=np.int64(2))
    assert evaluator(nn.Identity()) == Evaluator((INPUTS, TARGETS), batch_size=2)(nn.Identity())
    assert type(evaluator.choices()["batch_size"]) is int


@pytest.mark.parametrize("samples", [2, 5])  # of 2 classes; as many samples would broadcast
def test_accuracy_wants_class_indices(samples):
    soft = torch.full((samples, 2), 0.5)
    with pytest.raises(InputError, match=rf"targets of shape \({samples}, 2\).*metrics=\['loss'\]"):
        Evaluator((INPUTS[:samples], soft))(nn.Identity())
    found = Evaluator((torch.zeros(samples, 2), soft), metrics=["loss"])(nn.Identity())
    assert found == {"loss": pytest.approx(math.log(2))}


def test_models_that_do_not_return_one_tensor_are_named():
    class Two(nn.Module):
        def forward(self, x):
            return x, x

    with pytest.raises(InputError, match="a tuple"):
        Evaluator((INPUTS, TARGETS))(Two())
    with pytest.raises(InputError, match=r"shape \(10,\) for 5 inputs"):
        Evaluator((INPUTS, TARGETS))(nn.Flatten(0))


class Output:
    """What Hugging Face's models return, in short."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


@pytest.mark.parametrize(
    ("wrap", "unpack"),
    [
        (Output, None),
        (lambda x: {"out": x, "aux": None}, lambda returned: returned["out"]),
        (lambda x: (None, x), lambda returned: returned[1]),
    ],
)
def test_outputs_are_taken_out_of_what_models_return(wrap, unpack):
    class Wrapped(nn.Module):
        def forward(self, x):
            return wrap(x)

    found = Evaluator((INPUTS, TARGETS), unpack=unpack)(Wrapped())
    assert found == Evaluator((INPUTS, TARGETS))(nn.Identity())


def test_another_device_is_named():
    with pytest.raises(InputError, match="device='meta'"):
        Evaluator((INPUTS, TARGETS))(nn.Linear(2, 2, device="meta"))
