from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from isthmus.errors import FileError, InputError
from isthmus.train import Data, load_data


def write_idx(path: Path, array: np.ndarray, *, magic: int = 8) -> None:
    header = bytes([0, 0, magic, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    content = header + array.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture
def fashion(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    for part, count, suffix in (("train", 50, ".gz"), ("t10k", 20, "")):
        write_idx(tmp_path / f"{part}-images-idx3-ubyte{suffix}", random.integers(0, 256, (count, 28, 28), np.uint8))
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte{suffix}", random.integers(0, 10, count, np.uint8))
    return tmp_path


def test_digits_parts_are_disjoint_standardised_and_all_of_the_set() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    data = load_data("digits")
    assert data.train_x.shape == (800, 1, 8, 8)
    assert data.val_x.shape == (200, 1, 8, 8)
    assert data.test_x.shape == (797, 1, 8, 8)
    assert data.num_classes == 10
    assert float(data.train_x.mean()) == pytest.approx(0, abs=1e-5)
    assert float(data.train_x.std(correction=0)) == pytest.approx(1, abs=1e-5)
    pixels, labels = datasets.load_digits(return_X_y=True)
    low, high = float(data.train_x.min()), float(data.train_x.max())
    found = torch.cat([x.flatten(1) for x, _ in data.parts.values()]).sub(low).mul(16 / (high - low)).round()
    together = torch.cat([found, torch.cat([y for _, y in data.parts.values()])[:, None]], 1)
    expected = np.concatenate([pixels, labels[:, None]], 1)
    assert sorted(map(tuple, together.int().tolist())) == sorted(map(tuple, expected.astype(int).tolist()))


def test_validation_is_an_option() -> None:
    pytest.importorskip("sklearn")
    assert len(load_data("digits", validation=0).val_x) == 0
    with pytest.raises(InputError, match="validation is 1000, expected 0 to 999"):
        load_data("digits", validation=1000)


def test_fashion_mnist_from_plain_and_compressed_files(fashion: Path) -> None:
    data = load_data("fashion-mnist", root=str(fashion), validation=10)
    assert data.train_x.shape == (40, 1, 28, 28)
    assert data.val_x.shape == (10, 1, 28, 28)
    assert data.test_x.shape == (20, 1, 28, 28)
    test_images = np.frombuffer((fashion / "t10k-images-idx3-ubyte").read_bytes()[16:], np.uint8).reshape(20, 1, 28, 28)
    test_labels = np.frombuffer((fashion / "t10k-labels-idx1-ubyte").read_bytes()[8:], np.uint8)
    train_images = np.frombuffer(
        gzip.decompress((fashion / "train-images-idx3-ubyte.gz").read_bytes())[16:], np.uint8
    ).reshape(50, 784)
    held_out = np.random.default_rng(0).permutation(50)[:10]
    train = np.delete(train_images, held_out, 0).astype(np.float64)
    expected = (test_images - train.mean()) / train.std()
    np.testing.assert_allclose(data.test_x.numpy(), expected, rtol=1e-4, atol=1e-5)
    assert data.test_y.tolist() == test_labels.tolist()


def test_missing_folder_file_and_option(fashion: Path) -> None:
    with pytest.raises(InputError, match="'fashion-mnist' needs the option root"):
        load_data("fashion-mnist")
    with pytest.raises(FileError, match=r"there is no folder .*nowhere"):
        load_data("fashion-mnist", root=fashion / "nowhere")
    (fashion / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(FileError, match=r"there is no t10k-labels-idx1-ubyte or t10k-labels-idx1-ubyte\.gz"):
        load_data("fashion-mnist", root=fashion)


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte.gz", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
@pytest.mark.parametrize("length", [0, 3, 12, -1])
def test_truncated_files_are_named(fashion: Path, name: str, length: int) -> None:
    path = fashion / name
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(FileError, match=name):
        load_data("fashion-mnist", root=fashion, validation=10)


def test_file_of_another_format_is_named(fashion: Path) -> None:
    write_idx(fashion / "t10k-labels-idx1-ubyte", np.zeros(20, np.uint8), magic=9)
    with pytest.raises(FileError, match="is not an IDX file of bytes with 1 dimensions"):
        load_data("fashion-mnist", root=fashion, validation=10)


def test_cifar10_from_torchvisions_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("torchvision.datasets")
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    random = np.random.default_rng(0)
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        batch = {"data": random.integers(0, 256, (8, 3072), np.uint8), "labels": random.integers(0, 10, 8).tolist()}
        (folder / name).write_bytes(pickle.dumps(batch))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    with pytest.raises(FileError, match="does not hold the whole data set CIFAR10"):
        load_data("cifar10", root=tmp_path)  # checksums differ
    monkeypatch.setattr(datasets.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr(datasets.cifar, "check_integrity", lambda *_: True)
    data = load_data("cifar10", root=tmp_path, validation=10)
    assert data.train_x.shape == (30, 3, 32, 32)
    assert data.train_x.mean((0, 2, 3)).abs().max() < 1e-5
    torch.testing.assert_close(data.train_x.std((0, 2, 3), correction=0), torch.ones(3))
    test = pickle.loads((folder / "test_batch").read_bytes())
    assert data.test_y.tolist() == test["labels"]
    pixels = torch.from_numpy(test["data"]).view(8, 3, 32, 32)
    for channel in range(3):  # standardising keeps the order of pixels within a channel
        ours = data.test_x[:, channel].flatten().argsort(stable=True)
        assert torch.equal(ours, pixels[:, channel].flatten().argsort(stable=True))


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "svhn"])
def test_missing_torchvision_files_say_how_to_get_them(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    pytest.importorskip("scipy")
    with pytest.raises(FileError, match=r"does not hold the whole data set.*download=True"):
        load_data(name, root=tmp_path)


def made_up(*, train: int = 6) -> Data:
    x, y = torch.randn(train, 4), torch.arange(train) % 3
    return Data(x, y, x[:0], y[:0], x, y, 3, "made up")


def not_data() -> int:
    return 3


def test_own_factory() -> None:
    assert load_data(f"{__name__}:made_up", train=9).train_x.shape == (9, 4)
    with pytest.raises(InputError, match=r"is a int, expected an isthmus\.train\.Data"):
        load_data(f"{__name__}:not_data")


def test_unknown_names_and_options() -> None:
    with pytest.raises(InputError, match="there is no data set 'fashion_mnist'; did you mean 'fashion-mnist'"):
        load_data("fashion_mnist")
    with pytest.raises(InputError, match=r"'digits' does not take the options \['root'\]"):
        load_data("digits", root="x")


def test_subset_takes_the_first_examples() -> None:
    data = made_up()
    part = data.subset(train=2, test=3)
    assert torch.equal(part.train_x, data.train_x[:2])
    assert torch.equal(part.test_y, data.test_y[:3])
    with pytest.raises(InputError, match="7 train examples of made up were asked for, and there are 6"):
        data.subset(train=7)


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_device_that_is_not_there(device: str) -> None:
    with pytest.raises(InputError, match=f"made up cannot go to the device '{device}'"):
        made_up().to(device)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_x": torch.ones(6, 4, dtype=torch.int64)}, "train_x of made up is torch.int64"),
        ({"test_x": torch.ones(6, 5)}, r"test_x of made up is torch.float32 of shape \(6, 5\)"),
        ({"test_y": torch.ones(6)}, "test_y of made up is torch.float32"),
        ({"train_y": torch.arange(5)}, r"train_y of made up .* expected int64 of shape \(6,\)"),
        ({"train_y": torch.arange(6)}, "labels from 0 to 5, expected 0 to 2"),
        ({"train_x": torch.ones(0, 4), "train_y": torch.arange(0)}, "the train part of made up is empty"),
    ],
)
def test_data_that_do_not_fit_are_refused(changes: dict[str, torch.Tensor], message: str) -> None:
    data = made_up()
    values = {name: getattr(data, name) for name in ("train_x", "train_y", "val_x", "val_y", "test_x", "test_y")}
    with pytest.raises(InputError, match=message):
        Data(**(values | changes), num_classes=3, name="made up")
