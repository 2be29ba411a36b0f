from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from isthmus.errors import FileError, InputError
from isthmus.flat import FlatState
from isthmus.io import load_metadata, load_state, save_state

pytest.importorskip("safetensors")


def assert_same(loaded: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
    assert loaded.keys() == state.keys()
    for key, tensor in state.items():
        assert loaded[key].dtype == tensor.dtype
        assert torch.equal(loaded[key], tensor)


def test_tensors_and_metadata_come_back(tmp_path: Path) -> None:
    weight = torch.arange(12.0).view(3, 4)
    state = {
        "weight": weight,
        "tied": weight,
        "transposed": weight.t(),
        "overlapping": weight[1:],
        "half": torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 3),
        "flag": torch.tensor([True, False]),
    }
    path = tmp_path / "state.safetensors"
    save_state(path, state, {"role": "trunk"})
    assert_same(load_state(path), state)
    assert load_metadata(path)["role"] == "trunk"
    assert os.listdir(tmp_path) == ["state.safetensors"]


def test_views_of_a_flat_state_come_back(tmp_path: Path) -> None:
    state = {"a": torch.randn(5), "b": torch.randn(3, 3)}
    save_state(tmp_path / "flat", FlatState.from_state_dict(state).to_state_dict())
    assert_same(load_state(tmp_path / "flat"), state)


@pytest.mark.parametrize("length", [0, 4, 40, -1])
def test_truncated_file_is_named(tmp_path: Path, length: int) -> None:
    path = tmp_path / "state.safetensors"
    save_state(path, {"a": torch.ones(100)})
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(FileError, match=r"state\.safetensors is not a whole safetensors file"):
        load_state(path)
    with pytest.raises(FileError, match=r"state\.safetensors"):
        load_metadata(path)


def test_missing_file_and_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"there is no file .*none"):
        load_state(tmp_path / "none")
    with pytest.raises(FileError, match="there is no file"):
        load_state(tmp_path)


def test_what_the_format_cannot_hold_is_refused_and_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    save_state(path, {"a": torch.ones(2)})
    with pytest.raises(InputError, match="'s' is a tensor of layout"):
        save_state(path, {"s": torch.eye(2).to_sparse()})
    with pytest.raises(InputError, match="complex128"):
        save_state(path, {"c": torch.ones(2, dtype=torch.complex128)})
    assert_same(load_state(path), {"a": torch.ones(2)})
    assert os.listdir(tmp_path) == ["state.safetensors"]


def test_disk_error_is_a_file_error(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no-such-folder"):
        save_state(tmp_path / "no-such-folder" / "state", {"a": torch.ones(2)})
