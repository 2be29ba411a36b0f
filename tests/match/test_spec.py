"""Specs as data: notation, checks, and where each position of an axis comes from."""

import pytest
import torch

from isthmus.errors import InputError
from isthmus.match import Group, PermutationSpec
from isthmus.match.spec import Factor

SHAPES = {"c.weight": (2, 1, 3, 3), "c.bias": (2,), "f.weight": (3, 6), "g.weight": (4, 5), "count": ()}
AXES = {
    "c.weight": ("c", None, None, None),
    "c.bias": ["c"],
    "f.weight": ("f", ("c", 3)),  # flattened feature maps of 3 places
    "g.weight": (None, ["f", "c"]),  # two feature maps, one after the other
}


@pytest.fixture
def state():
    return {key: torch.zeros(shape) for key, shape in SHAPES.items()}


def test_sizes_follow_from_the_shapes(state):
    spec = PermutationSpec.from_dict(AXES, state)
    assert spec.groups == {"c": Group("c", 2), "f": Group("f", 3)}
    assert spec.axes["f.weight"] == (((Factor(3, "f"),),), ((Factor(2, "c"), Factor(3, None)),))
    assert spec.axes["g.weight"][1] == ((Factor(3, "f"),), (Factor(2, "c"),))
    spec.check(state)


def test_sizes_follow_in_any_order():
    state = {"after": torch.zeros(7, 12), "before": torch.zeros(3)}
    spec = PermutationSpec.from_dict({"after": (["g", "f"], ("g", "f")), "before": ("f",)}, state)
    assert {name: group.size for name, group in spec.groups.items()} == {"f": 3, "g": 4}


def test_running_statistics_are_told_from_weights():
    state = {key: torch.zeros(3) for key in ("bn.weight", "bn.running_mean", "bn.running_var")}
    spec = PermutationSpec.from_dict(dict.fromkeys(state, ("c",)), state)
    assert spec.statistics == {"bn.running_mean", "bn.running_var"}


def test_indices_of_products_and_concatenations(state):
    spec = PermutationSpec.from_dict(AXES, state)
    indices = spec.indices({"c": torch.tensor([1, 0]), "f": torch.tensor([2, 0, 1])})
    assert indices["c.weight"][0].tolist() == [1, 0]
    assert indices["c.weight"][1:] == (None, None, None)
    assert indices["f.weight"][1].tolist() == [3, 4, 5, 0, 1, 2]
    assert indices["g.weight"][0] is None
    assert indices["g.weight"][1].tolist() == [2, 0, 1, 4, 3]


def test_groups_that_are_left_out_stay(state):
    indices = PermutationSpec.from_dict(AXES, state).indices({"c": torch.tensor([1, 0])})
    assert indices["f.weight"][0] is None
    assert indices["g.weight"][1].tolist() == [0, 1, 2, 4, 3]
    assert PermutationSpec.from_dict(AXES, state).indices({})["g.weight"] == (None, None)


def test_columns_move_within_their_new_head():
    state = {"q.weight": torch.zeros(6, 1)}
    spec = PermutationSpec.from_dict(
        {"q.weight": (("heads", "columns"), None)}, state, within={"columns": "heads"}, sizes={"heads": 2}
    )
    permutation = {"heads": torch.tensor([1, 0]), "columns": torch.tensor([[2, 0, 1], [0, 1, 2]])}
    # The new head 0 is the old head 1, positions 3 to 5, in the order 2, 0, 1.
    assert spec.indices(permutation)["q.weight"][0].tolist() == [5, 3, 4, 0, 1, 2]


def test_axes_of_one_kind_share_an_index(state):
    indices = PermutationSpec.from_dict(AXES, state).indices({"c": torch.tensor([1, 0])})
    assert indices["c.weight"][0] is indices["c.bias"][0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extra": ("c",)}, "the state dict lacks 'extra'"),
        ({"c.bias": None}, "lacks 'c.bias'"),
        ({"c.bias": ("c", None)}, "one item for each of its 1 dimensions"),
        ({"c.bias": "c"}, "one item for each of its 1 dimensions"),
        ({"g.weight": ("c", ["f", "c"])}, "axis 0 of 'g.weight' has length 4"),
        ({"f.weight": ("f", ("c", 2))}, "axis 1 of 'f.weight' has length 6"),
        ({"g.weight": (("x", "y"), None)}, "the size of the group '[xy]' does not follow"),
    ],
)
def test_hand_written_specs_are_checked(state, changes, message):
    axes = {key: entry for key, entry in {**AXES, **changes}.items() if entry is not None}
    with pytest.raises(InputError, match=message):
        PermutationSpec.from_dict(axes, state)


def test_a_key_twice_is_an_error(state):
    with pytest.raises(InputError, match=r"'c\.bias' twice"):
        PermutationSpec.from_dict([*AXES.items(), ("c.bias", ("c",))], state)


def test_a_group_within_another_needs_it_in_front():
    state = {"q": torch.zeros(6)}
    with pytest.raises(InputError, match="without 'heads'"):
        PermutationSpec.from_dict(
            {"q": (("columns", "heads"),)}, state, within={"columns": "heads"}, sizes={"heads": 2}
        )
    with pytest.raises(InputError, match="not in the spec"):
        PermutationSpec.from_dict({"q": ("columns",)}, state, within={"columns": "heads"})
    with pytest.raises(InputError, match="on no axis"):
        PermutationSpec.from_dict({"q": (None,)}, state, within={"columns": "heads"})


def test_a_spec_made_of_parts_is_checked_too():
    with pytest.raises(InputError, match="does not define"):
        PermutationSpec({}, {"w": (((Factor(3, "h"),),),)})
    with pytest.raises(InputError, match="has 3 units of the group 'h', which has 4 elsewhere"):
        PermutationSpec({"h": Group("h", 4)}, {"w": (((Factor(3, "h"),),),)})
    with pytest.raises(InputError, match="twice in one product"):
        PermutationSpec({"h": Group("h", 3)}, {"w": (((Factor(3, "h"), Factor(3, "h")),),)})


def test_states_are_checked(state):
    spec = PermutationSpec.from_dict(AXES, state)
    with pytest.raises(InputError, match=r"'c\.bias' of model b has shape \(3,\), but \(2,\)"):
        spec.check({**state, "c.bias": torch.zeros(3)}, name="model b")
    with pytest.raises(InputError, match="lacks 'more' of model b"):
        spec.check({**state, "more": torch.zeros(3)}, name="model b")
    with pytest.raises(InputError, match=r"model b lacks 'c\.bias'"):
        spec.check({key: tensor for key, tensor in state.items() if key != "c.bias"}, name="model b")


def test_it_prints_as_a_table(state):
    axes = PermutationSpec.from_dict(AXES, state)
    spec = PermutationSpec(axes.groups, axes.axes, frozen={("c.weight", 1): "input", ("g.weight", 0): "output"})
    assert str(spec).splitlines() == [
        "group  units  axes",
        "c      2      c.weight[0], c.bias[0], f.weight[1], g.weight[1]",
        "f      3      f.weight[0], g.weight[1]",
        "stays: c.weight[1]: input",
        "stays: g.weight[0]: output",
    ]


def test_indices_of_other_shapes():
    spec = PermutationSpec.from_dict({"w": ("a", None)}, {"w": torch.zeros(4, 2)})
    with pytest.raises(InputError, match=r"the permutation of 'a' has shape \(3,\), expected shape \(4,\)"):
        spec.indices({"a": torch.arange(3)})
    with pytest.raises(InputError, match=r"the permutation of 'b' has shape .* expected one of a"):
        spec.indices({"b": torch.arange(4)})


def test_state_dicts_cannot_be_traced():
    with pytest.raises(InputError, match=r"model is a OrderedDict, expected a torch.nn.Module.*from_dict"):
        PermutationSpec.from_model(torch.nn.Linear(2, 3).state_dict(), torch.zeros(2, 2))


def test_failed_traces_are_told_by_an_error_alone(caplog):
    model = torch.nn.Linear(3, 2)
    with pytest.raises(InputError, match=r"cannot trace Linear: .* \[2, 5\] X \[3, 2\]\. Check that"):
        PermutationSpec.from_model(model, torch.zeros(2, 5))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
