"""Batches of data: what of them is a model's input, and how a model is called with it."""

import pytest
import torch
from torch import nn

from isthmus.batches import inputs_of, run, size_of, split, with_targets
from isthmus.errors import InputError
from isthmus.norms import reset_statistics


class Named(nn.Module):
    """A model whose arguments have names that must be given."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def forward(self, *, x, scale=1.0):
        return self.norm(scale * x)


X = torch.tensor([[1.0], [3.0], [5.0]])


@pytest.mark.parametrize("batch", [X, (X, "targets"), [X], (X, "targets", "weights")], ids=["x", "xy", "list", "xyz"])
def test_a_tensor_is_the_one_argument(batch):
    assert inputs_of(batch) is X
    assert torch.equal(run(nn.Identity(), inputs_of(batch)), X)


@pytest.mark.parametrize("batch", [{"x": X, "scale": 2.0}, ({"x": X, "scale": 2.0}, "targets")], ids=["x", "xy"])
def test_a_mapping_holds_the_arguments_by_name(batch):
    model = Named()
    model.norm.running_mean += 2
    assert size_of(inputs_of(batch)) == 3
    assert torch.allclose(run(model.eval(), inputs_of(batch)), 2 * X - 2, atol=1e-4)
    assert reset_statistics(model, [batch]) == 3
    assert model.norm.running_mean.item() == 6
    assert model.norm.running_var.item() == 16


def test_inputs_and_targets():
    assert with_targets((X, 5, 6)) == (X, 5)
    assert with_targets(({"x": X}, 5)) == ({"x": X}, 5)
    for batch, came in ((X, "Tensor"), ([X], "list"), ({"x": X}, "dict")):
        with pytest.raises(InputError, match=rf"{came} without targets, expected \(inputs, targets\)"):
            with_targets(batch)


def test_a_tensor_is_split():
    assert [len(part) for part in split(X, 2)] == [2, 1]
    assert list(split([(X, 1), {"x": X}], 2)) == [X, {"x": X}]
    with pytest.raises(InputError, match="batch_size is 0, expected at least 1"):
        list(split(X, 0))


def test_other_batches_are_refused():
    with pytest.raises(InputError, match="a batch of type int, expected a tensor of inputs, a mapping"):
        inputs_of(3)
    with pytest.raises(InputError, match="a batch of type tuple whose first item is of type list"):
        inputs_of(([1], X))
    with pytest.raises(InputError, match="a batch of type list, expected"):
        inputs_of([])
    with pytest.raises(InputError, match="data is a mapping, expected a tensor or an iterable of batches"):
        list(split({"x": X}, 2))
    with pytest.raises(InputError, match="without a tensor whose first dimension counts the examples"):
        size_of({"scale": 1.0})


def test_one_batch_is_not_taken_for_several():
    with pytest.raises(InputError, match=r"One batch goes in a list: \[\(inputs, targets\)\]"):
        list(split((torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)), 2))
    with pytest.raises(InputError, match="inputs and targets"):
        list(split([torch.zeros(4, 2), torch.zeros(4)], 2))
    assert [len(batch) for batch in split([torch.zeros(4, 2), torch.zeros(3, 2)], 2)] == [4, 3]
