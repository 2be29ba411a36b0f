"""What all scans have in common: checkpoints and progress."""

from __future__ import annotations

import copy
import functools
import io
import json
import math
import sys

import numpy as np
import pytest
import rich.console
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from isthmus.errors import DependencyError, EvaluationError, FileError, InputError
from isthmus.flat import FlatState
from isthmus.path import Evaluator, scan_line
from isthmus.path.checkpoint import Checkpoint, Finished
from isthmus.path.identity import state_digest, tensor_digest


class Scalar(nn.Module):
    """The model f(x) = w."""

    def __init__(self, w: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([w]))

    def forward(self, x):
        return self.w.expand(len(x))


class Counted:
    """The loss w, which says how often it was asked for, and may stop the scan at a call."""

    def __init__(self, stop_at: int | None = None, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.seen: list[float] = []
        self.stop_at = stop_at
        self.error = error

    def __call__(self, model: Scalar) -> float:
        if len(self.seen) + 1 == self.stop_at:
            raise self.error("stop")
        self.seen.append(model.w.item())
        return self.seen[-1]


def ends() -> tuple[Scalar, Scalar, Scalar]:
    return Scalar(), Scalar(0.0), Scalar(1.0)


def classifier(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def examples(seed: int = 0, samples: int = 30) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 4, generator=generator), torch.randint(3, (samples,), generator=generator)


class TestCheckpoint:
    @pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
    def test_an_interrupted_scan_goes_on(self, tmp_path, error):
        whole = scan_line(*ends(), Counted(), 11)
        with pytest.raises((KeyboardInterrupt, EvaluationError)) as caught:
            scan_line(*ends(), Counted(stop_at=8, error=error), 11, checkpoint=tmp_path / "scan")
        assert len(caught.value.partial.alphas) == 7
        counted = Counted()
        resumed = scan_line(*ends(), counted, 11, checkpoint=tmp_path / "scan")
        assert len(counted.seen) == 3 + 4  # the marks, and the points that were missing
        assert resumed.alphas.tolist() == whole.alphas.tolist()
        assert resumed.values["data"]["loss"].tolist() == whole.values["data"]["loss"].tolist()
        assert resumed.complete

    def test_a_finished_scan_evaluates_the_marks_alone(self, tmp_path):
        def scan(evaluator):
            return scan_line(classifier(0), classifier(1), classifier(2), {"val": evaluator}, 9, **options)

        options = {"bn_data": examples(1)[0], "representation": "0", "checkpoint": tmp_path / "scan"}
        first, again = (scan(Evaluator(examples())) for _ in range(2))
        for metric in ("loss", "accuracy"):
            assert np.array_equal(first.values["val"][metric], again.values["val"][metric])
        assert first.summary == again.summary
        assert first.ensemble == again.ensemble
        assert first.disagreement == again.disagreement
        assert first.cka == again.cka
        assert np.array_equal(first.correct["val"], again.correct["val"])
        assert len((tmp_path / "scan").read_text().splitlines()) == 1 + 9
        others = [0, 4, 8]
        assert np.array_equal(np.delete(first.seconds, others), np.delete(again.seconds, others))

    def test_a_longer_scan_takes_the_points_that_are_there(self, tmp_path):
        scan_line(*ends(), Counted(), 5, checkpoint=tmp_path / "scan")
        counted = Counted()
        result = scan_line(*ends(), counted, 9, checkpoint=tmp_path / "scan")
        assert sorted(counted.seen) == [0, 0.125, 0.375, 0.5, 0.625, 0.875, 1]
        assert len(result.alphas) == 9
        shorter = scan_line(*ends(), Counted(), 3, checkpoint=tmp_path / "scan")
        assert shorter.alphas.tolist() == [0, 0.5, 1]

    def test_progress_counts_points_of_the_file(self, tmp_path):
        scan_line(*ends(), Counted(), 5, checkpoint=tmp_path / "scan")
        seen = []
        scan_line(*ends(), Counted(), 5, checkpoint=tmp_path / "scan", progress=lambda *args: seen.append(args[:2]))
        assert seen == [(done, 5) for done in range(1, 6)]

    @pytest.mark.parametrize("lost", [1, 5, 20])
    def test_a_cut_off_line_is_evaluated_again(self, tmp_path, lost):
        path = tmp_path / "scan"
        scan_line(*ends(), Counted(), 5, checkpoint=path)
        content = path.read_bytes()
        path.write_bytes(content[:-lost])
        counted = Counted()
        result = scan_line(*ends(), counted, 5, checkpoint=path)
        assert counted.seen == [0, 1, 0.5, 0.75]
        assert result.values["data"]["loss"].tolist() == [0, 0.25, 0.5, 0.75, 1]
        before, after = (text.decode().splitlines()[:-1] for text in (content, path.read_bytes()))
        assert before == after
        assert json.loads(path.read_text().splitlines()[-1])["point"] == 0.75

    def test_a_last_line_of_rubbish_is_dropped_and_any_other_is_an_error(self, tmp_path):
        path = tmp_path / "scan"
        scan_line(*ends(), Counted(), 5, checkpoint=path)
        header, *lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join([header, *lines[:-1], "\0\0\0\n"]))
        counted = Counted()
        scan_line(*ends(), counted, 5, checkpoint=path)
        assert counted.seen[3:] == [0.75]
        path.write_text("".join([header, lines[0], '{"point": 0.3}\n', *lines[1:]]))
        with pytest.raises(FileError, match=r"line 3 of the checkpoint .* is damaged \(KeyError: 'values'\)"):
            scan_line(*ends(), Counted(), 5, checkpoint=path)

    @pytest.mark.parametrize("content", ["a letter\n", '{"kind": "path result"}\n', "[1]\n", "no line"])
    def test_other_files_are_left_alone(self, tmp_path, content):
        (tmp_path / "scan").write_text(content)
        with pytest.raises(FileError, match="scan is no checkpoint of a scan"):
            scan_line(*ends(), Counted(), 5, checkpoint=tmp_path / "scan")
        assert (tmp_path / "scan").read_text() == content

    def test_an_empty_file_is_a_new_checkpoint(self, tmp_path):
        (tmp_path / "scan").touch()
        scan_line(*ends(), Counted(), 5, checkpoint=tmp_path / "scan")
        assert len((tmp_path / "scan").read_text().splitlines()) == 6

    def test_files_of_another_schema_and_missing_folders_are_named(self, tmp_path):
        path = tmp_path / "scan"
        scan_line(*ends(), Counted(), 3, checkpoint=path)
        path.write_text(path.read_text().replace('"schema":1', '"schema":9'))
        with pytest.raises(FileError, match="has schema 9, expected 1"):
            scan_line(*ends(), Counted(), 3, checkpoint=path)
        with pytest.raises(FileError, match="No such file or directory"):
            scan_line(*ends(), Counted(), 3, checkpoint=tmp_path / "no" / "scan")

    def test_what_decides_a_result_must_be_the_same(self, tmp_path):
        def scan(**changed):
            given = {
                "models": [classifier(0), classifier(1), classifier(2)],
                "evaluate": {"val": Evaluator(examples())},
                "bn_data": examples(1)[0],
            } | changed
            scan_line(*given.pop("models"), given.pop("evaluate"), 3, checkpoint=tmp_path / "scan", **given)

        scan()
        scan(models=[classifier(5), classifier(1), classifier(2)])  # the model's own weights decide nothing
        scan(evaluate={"val": Evaluator(examples(), batch_size=7)})
        changes = {
            "models.b was": {"models": [classifier(0), classifier(1), classifier(3)]},
            "bn_data was": {"bn_data": examples(2)[0]},
            'bn was "reset" and is "keep"': {"bn": "keep"},
            "bn_batch_size was 256 and is 16": {"bn_batch_size": 16},
            "splits.test was null and is {": {"evaluate": {"test": Evaluator(examples())}},
            "splits.val.inputs was": {"evaluate": {"val": Evaluator(examples(3))}},
            "splits.val.metrics.accuracy was .* and is null": {
                "evaluate": {"val": Evaluator(examples(), metrics=["loss"])}
            },
            'splits.val.metrics.loss.name was .*cross_entropy" and is': {
                "evaluate": {"val": Evaluator(examples(), loss=lambda outputs, targets: outputs.sum(1))}
            },
            'splits.val.autocast was null and is "bfloat16"': {
                "evaluate": {"val": Evaluator(examples(), dtype=torch.bfloat16)}
            },
        }
        for message, changed in changes.items():
            with pytest.raises(InputError, match=rf"belongs to another scan: .*{message}"):
                scan(**changed)

    def test_metrics_of_a_function_must_be_those_of_the_file(self, tmp_path):
        def evaluate(model):
            return {name: model.w.item()}

        name = "loss"
        scan_line(*ends(), evaluate, 5, checkpoint=tmp_path / "scan")
        name = "error"
        with pytest.raises(InputError, match=r"got the metrics \['loss'\], expected \['error'\]"):
            scan_line(*ends(), evaluate, 5, checkpoint=tmp_path / "scan")

    @given(
        points=st.lists(
            st.floats(allow_nan=False, allow_infinity=False)
            | st.tuples(st.text(), st.tuples(st.floats(0, 1), st.integers())),
            unique=True,
            max_size=4,
        ),
        value=st.floats(),
        seconds=st.floats(0, 1e9),
        bn_seconds=st.none() | st.floats(0, 1e9),
    )
    def test_points_and_values_come_back_exactly(self, tmp_path_factory, points, value, seconds, bn_seconds):
        path = tmp_path_factory.mktemp("checkpoint") / "scan"
        finished = Finished({"val": {"loss": value}}, seconds, bn_seconds)
        with Checkpoint(path, {"scan": "test"}) as checkpoint:
            assert checkpoint.found == {}
            for point in points:
                checkpoint.append(point, finished)
        with Checkpoint(path, {"scan": "test"}) as checkpoint:
            assert list(checkpoint.found) == points
            for found in checkpoint.found.values():
                assert (found.seconds, found.bn_seconds) == (seconds, bn_seconds)
                back = found.values["val"]["loss"]
                assert back == value or (math.isnan(back) and math.isnan(value))

    def test_points_are_in_the_file_at_once(self, tmp_path):
        lines = []

        def look(*_):
            lines.append(len((tmp_path / "scan").read_text().splitlines()))

        scan_line(*ends(), Counted(), 5, checkpoint=tmp_path / "scan", progress=look)
        assert lines == [2, 3, 4, 5, 6]


class TestDigest:
    def test_every_bit_counts(self):
        state = {"w": torch.zeros(5), "n": torch.tensor(3), "h": torch.ones(2, dtype=torch.bfloat16)}
        digest = state_digest(FlatState.from_state_dict(state))
        assert digest == state_digest(FlatState.from_state_dict(dict(reversed(state.items()))))
        others = [
            state | {"w": torch.tensor([0.0, 0, 0, 0, -0.0])},
            state | {"n": torch.tensor(4)},
            state | {"h": torch.ones(2)},
            {"v" if key == "w" else key: value for key, value in state.items()},
            state | {"w": torch.zeros(1, 5)},
        ]
        assert len({digest, *(state_digest(FlatState.from_state_dict(other)) for other in others)}) == 6

    @pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float16, torch.complex64])
    def test_tensors_of_any_kind(self, dtype):
        tensor = torch.tensor([[0, 1], [2, 3]]).to(dtype)
        digest = tensor_digest(tensor)
        assert digest == tensor_digest(tensor.t().contiguous().t())
        assert digest != tensor_digest(tensor.reshape(4))
        assert digest != tensor_digest(torch.zeros_like(tensor))
        assert tensor_digest(tensor[0, 0]) != tensor_digest(tensor[:0])


class TestProgress:
    def test_a_bar_shows_points_losses_and_the_time_left(self, monkeypatch):
        shown = io.StringIO()
        terminal = functools.partial(rich.console.Console, file=shown, force_terminal=True, width=120)
        monkeypatch.setattr(rich.console, "Console", lambda stderr: terminal())
        evaluate = {"val": lambda m: m.w.item(), "test": lambda m: {"error": 1 + m.w.item(), "other": 0.0}}
        scan_line(*ends(), evaluate, 5, progress=True)
        assert "val loss 0.7500, test error 1.7500, points" in shown.getvalue()
        assert "5/5" in shown.getvalue()
        assert "left" in shown.getvalue()

    def test_no_bar_where_there_is_no_terminal(self, capfd):
        scan_line(*ends(), Counted(), 5, progress=True)
        assert "points" not in "".join(capfd.readouterr())
        scan_line(*ends(), Counted(), 5, progress=False)
        assert capfd.readouterr() == ("", "")

    def test_a_bar_without_rich_names_the_extra(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "rich.progress", None)
        with pytest.raises(DependencyError, match=r"A progress bar needs the package .*isthmus\[lab\]"):
            scan_line(*ends(), Counted(), 5, progress=True)


def test_weights_that_one_evaluator_changes_are_written_again_for_the_next():
    def pruned(model: nn.Module) -> float:
        with torch.no_grad():
            model.weight.zero_()
        return 0.0

    def weight(model: nn.Module) -> float:
        return model.weight.item()

    ends = [{"weight": torch.full((1, 1), value)} for value in (2.0, 4.0)]
    result = scan_line(nn.Linear(1, 1, bias=False), *ends, {"pruned": pruned, "plain": weight}, 3)
    assert result.values["plain"]["loss"].tolist() == [2.0, 3.0, 4.0]


@pytest.mark.parametrize("replace", ["half", "data"])
def test_an_evaluator_that_replaces_the_data_of_a_weight_is_named(replace):
    def evaluate(model: nn.Module) -> float:
        if replace == "half":
            model.half().float()
        else:
            model.weight.data = model.weight.data / 2
        return 0.0

    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    with pytest.raises(EvaluationError, match=r"data of 'weight' was replaced"):
        scan_line(model, copy.deepcopy(model), copy.deepcopy(model), evaluate, 3)
    assert torch.equal(model.weight, before)


def test_callables_see_evaluation_mode_even_after_one_that_left_it():
    modes = []

    def train(model: nn.Module) -> float:
        modes.append(model.training)
        model.train()
        return 0.0

    model = nn.Linear(1, 1)
    scan_line(model, copy.deepcopy(model), copy.deepcopy(model), {"first": train, "second": train}, 3)
    assert modes == [False] * 6


def test_a_shuffled_loader_of_bn_data_leaves_the_random_state():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    loader = DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=4, shuffle=True)  # without targets
    before = torch.get_rng_state()
    result = scan_line(model, copy.deepcopy(model), copy.deepcopy(model), lambda m: 0.0, 3, bn_data=loader)
    assert torch.equal(torch.get_rng_state(), before)
    assert result.choices["bn_samples"] == 8


def test_two_batches_as_bn_data_are_not_taken_for_inputs_and_targets():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    with pytest.raises(InputError, match=r"torch.cat joins batches"):
        scan_line(model, model, model, lambda m: 0.0, 3, bn_data=[torch.randn(4, 2), torch.randn(4, 2)])


def test_a_checkpoint_knows_the_architecture_and_the_functions(tmp_path):
    def scaled(model: nn.Module, factor: float) -> float:
        return factor

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    ends = [copy.deepcopy(model.state_dict()) for _ in range(2)]
    file = tmp_path / "scan.jsonl"
    scan_line(model, *ends, functools.partial(scaled, factor=1.0), 3, checkpoint=file)
    with pytest.raises(InputError, match="architecture"):
        scan_line(
            nn.Sequential(nn.Linear(2, 2), nn.Tanh()), *ends, functools.partial(scaled, factor=1.0), 3, checkpoint=file
        )
    with pytest.raises(InputError, match="function"):
        scan_line(model, *ends, functools.partial(scaled, factor=2.0), 3, checkpoint=file)
    with pytest.raises(InputError, match="function"):
        scan_line(model, *ends, lambda m: 0.0, 3, checkpoint=file)
