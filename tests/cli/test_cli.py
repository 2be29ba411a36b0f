import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

import isthmus
from isthmus import _dispatch, cli
from isthmus.cli import console, demo
from isthmus.cli.app import app
from isthmus.io import save_state
from isthmus.train import Pair, TrainConfig, load_data
from isthmus.train.sweep import SweepConfig, run_sweep

TINY = TrainConfig(
    model_options={"widths": [8]}, batch_size=32, steps=12, branch_step=4, anneal_steps=3, ema_decay=0.5, min_accuracy=0
)
GRID = """
pairs = 2
points = 3
[base]
steps = 12
branch_step = 4
batch_size = 32
min_accuracy = 0
model_options = {widths = [8]}
[grid]
lr = [0.05, 0.2]
momentum = [0.0, 0.9]
"""


def run(*arguments):
    """Exit code, standard output and standard error of the command; other exceptions than its own come through."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr("warnings.showwarning", None)  # the command sets it; this puts it back


@pytest.fixture
def tiny_demo(monkeypatch):
    monkeypatch.setitem(demo.PRESETS, "digits", demo.Preset(TINY, (0.05, 0.1, 0.2), 1.0))


@pytest.fixture(scope="module")
def pair_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    run_sweep(SweepConfig(TINY, pairs=1, points=3), folder)
    return folder / "pairs" / "scale00" / "pair00"


def test_version():
    assert run("--version")[:2] == (0, f"isthmus {isthmus.__version__}\n")


def test_info_shows_every_backend_and_why():
    code, out, _ = run("info")
    assert code == 0
    for row in _dispatch.describe():
        line = next(line for line in out.splitlines() if row.name in line and row.reason in line)
        assert ("yes" if row.available else "no") in line
    assert torch.__version__ in out


def test_demo_writes_all_it_says(tiny_demo):
    code, out, _ = run("demo", "--pairs", 2, "--workers", 1)
    assert code == 0
    assert "3 noise scales, 2 pairs each, into isthmus-demo" in out
    assert "Critical S not resolved" in out
    for name in ("results.json", "results.csv", "gain.png", "gain.pdf", "paths.png", "paths.pdf", "sweep.json"):
        assert os.path.getsize(f"isthmus-demo/{name}") > 0
    results = json.loads(open("isthmus-demo/results.json").read())  # noqa: SIM115
    assert [scale["lr"] for scale in results["scales"]] == [0.05, 0.1, 0.2]
    assert all(len(scale["gain"]) == 2 for scale in results["scales"])
    assert results["config"]["base"]["steps"] == 12
    assert Pair.load("isthmus-demo/pairs/scale02/pair01").config.lr == 0.2


def test_demo_started_again_with_another_configuration(tiny_demo, monkeypatch):
    assert run("demo", "--pairs", 1, "--workers", 1, "--out", "here")[0] == 0
    other = demo.Preset(dataclasses.replace(TINY, steps=13), (0.05, 0.1, 0.2), 1.0)
    monkeypatch.setitem(demo.PRESETS, "digits", other)
    code, _, err = run("demo", "--pairs", 1, "--out", "here")
    assert code == 1
    assert err.splitlines()[-1].startswith("error: the folder here holds a sweep of another configuration: base.steps")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--data", "mnist"], "there is no demo on 'mnist'"),
        (["demo", "--data", "fashion-mnist"], "give --root"),
        (["demo", "--root", "x"], "leave --root out"),
        (["demo", "--data", "fashion-mnist", "--root", "none", "--pairs", "1", "--workers", "1"], "none"),
        (["demo", "--device", "cuda:77"], "the device 'cuda:77' cannot be used here"),
        (["demo", "--device", "gpu"], "the device 'gpu' cannot be used here"),
        (["sweep", "none.toml"], "none.toml"),
        (["scan", "none"], "does not hold a finished pair"),
        (["scan", "a.safetensors", "b.safetensors"], "give --model and --data"),
        (["scan", "a", "b", "c"], "3 paths were given"),
        (["scan", "a", "b", "--model", "mlp", "--data", "digits"], "error: "),
        (["scan", "a", "b", "--model", "mpl", "--data", "digits"], "did you mean 'mlp'"),
        (["scan", "a", "b", "--model", "mlp", "--data", "nowhere:data"], "nowhere"),
        (["scan", "a", "--dtype", "f8"], "--dtype is 'f8', expected f32, bf16, f16"),
    ],
)
def test_errors_are_one_line(arguments, message):
    code, out, err = run(*arguments)
    assert code == 1
    assert "Traceback" not in out + err
    (line,) = (line for line in err.splitlines() if line.strip())
    assert line.startswith("error: ")
    assert message in line


def test_wrong_usage_exits_with_2():
    assert run("demo", "--pairs", "0")[0] == 2
    assert run("nothing")[0] == 2


def test_sweep_from_a_file(tmp_path):
    (tmp_path / "grid.toml").write_text(GRID)
    code, out, _ = run("sweep", "grid.toml", "--workers", 1, "--together", 4)
    assert code == 0
    rows = [line.split()[:4] for line in out.splitlines() if line.strip().startswith("0.")]
    noise = [("0.05", "0", "0.00156"), ("0.2", "0", "0.00625"), ("0.05", "0.9", "0.0156"), ("0.2", "0.9", "0.0625")]
    assert rows == [[lr, "32", momentum, s] for lr, momentum, s in noise]
    assert len(json.loads((tmp_path / "isthmus-sweep/results.json").read_text())["pairs"]) == 8
    saved = json.loads((tmp_path / "isthmus-sweep/pairs/scale03/pair01/pair.json").read_text())
    assert saved["execution"]["together"] == 4


def test_scan_of_a_pair(pair_folder, tmp_path):
    code, out, _ = run("scan", pair_folder, "--points", 5, "--out", "found")
    assert code == 0
    path = json.loads((tmp_path / "found/path.json").read_text())
    assert path["alphas"] == [0.0, 0.25, 0.5, 0.75, 1.0]
    record = json.loads((pair_folder / "record.json").read_text())["path"]
    for split in ("val", "test"):
        for metric in ("loss", "accuracy"):
            assert path["values"][split][metric][::2] == pytest.approx(record["values"][split][metric], rel=1e-6)
    assert (tmp_path / "found/path.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "found/path.csv").read_text().startswith("split,alpha,metric,value")
    accuracy = f"{path['values']['test']['accuracy'][2]:.4f}"
    assert any(accuracy in line and "accuracy" in line for line in out.splitlines())


def test_scan_in_bf16_says_so(pair_folder, tmp_path):
    assert run("scan", pair_folder, "--points", 3, "--dtype", "bf16")[0] == 0
    assert "bfloat16" in (tmp_path / "isthmus-scan/path.json").read_text()


def test_scan_of_two_files_with_factories_of_the_users(pair_folder, tmp_path):
    """Modules in the working folder are found, and files of another architecture are refused by key."""
    (tmp_path / "mine.py").write_text(
        "from isthmus.train import MLP, load_data\n"
        "def data():\n    return load_data('digits').subset(test=50)\n"
        "def small(data):\n    return MLP(64, [8], 10, norm='layer')\n"
        "def large(data):\n    return MLP(64, [9], 10, norm='layer')\n"
    )
    files = [pair_folder / "a.safetensors", pair_folder / "b.safetensors"]
    code, _, err = run("scan", *files, "--model", "mine:small", "--data", "mine:data", "--points", 3)
    assert (code, err.count("error")) == (0, 0)
    path = json.loads((tmp_path / "isthmus-scan/path.json").read_text())
    data = load_data("digits")
    assert path["choices"]["splits"]["test"]["samples"] == 50
    assert path["choices"]["splits"]["val"]["samples"] == len(data.val_x)
    code, _, err = run("scan", *files, "--model", "mine:large", "--data", "mine:data")
    assert code == 1
    assert "expected (9, 64)" in err


def test_scan_keeps_or_resets_batch_norm(tmp_path):
    config = SweepConfig(dataclasses.replace(TINY, model_options={"widths": [8], "norm": "batch"}), pairs=1, points=3)
    run_sweep(config, tmp_path / "sweep")
    found = {}
    for policy in ("auto", "reset", "keep"):
        assert run("scan", tmp_path / "sweep/pairs/scale00/pair00", "--points", 3, "--bn", policy)[0] == 0
        path = json.loads((tmp_path / "isthmus-scan/path.json").read_text())
        found[policy] = path["values"]["test"]["loss"]
        assert path["choices"]["bn"] == ("keep" if policy == "keep" else "reset")
    assert found["auto"] == found["reset"] != found["keep"]


def test_scan_of_a_diverged_pair(tmp_path):
    run_sweep(SweepConfig(dataclasses.replace(TINY, lr=1e30), pairs=1, points=3), tmp_path / "sweep")
    code, _, err = run("scan", tmp_path / "sweep/pairs/scale00/pair00")
    assert code == 1
    assert "diverged while training" in err


def test_scan_of_a_truncated_file(pair_folder, tmp_path):
    content = (pair_folder / "a.safetensors").read_bytes()
    (tmp_path / "half.safetensors").write_bytes(content[: len(content) // 2])
    code, _, err = run("scan", "half.safetensors", pair_folder / "b.safetensors", "--model", "mlp", "--data", "digits")
    assert code == 1
    assert "half.safetensors" in err.splitlines()[-1]


def test_an_interrupted_scan_keeps_its_points(tmp_path, monkeypatch):
    (tmp_path / "interrupting.py").write_text(
        "import isthmus.train, torch\n"
        "class Model(torch.nn.Sequential):\n"
        "    def forward(self, x):\n"
        "        self.calls = getattr(self, 'calls', 0) + 1\n"
        "        if self.calls == 7:\n            raise KeyboardInterrupt\n"
        "        return super().forward(x)\n"
        "def model(data):\n    return Model(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"
    )
    for name in "ab":
        save_state(tmp_path / f"{name}.safetensors", {"1.weight": torch.randn(10, 64), "1.bias": torch.zeros(10)})
    files = ["a.safetensors", "b.safetensors"]
    code, _, err = run("scan", *files, "--model", "interrupting:model", "--data", "digits", "--points", 9)
    assert code == 130
    path = json.loads((tmp_path / "isthmus-scan/path.json").read_text())
    assert not path["complete"]
    assert f"{len(path['alphas'])} points are kept in isthmus-scan/path.json; run the same command again" in err


def test_an_interrupt_says_how_to_go_on(tiny_demo, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(console, "run_sweep", interrupted)
    code, _, err = run("demo")
    assert code == 130
    assert "run the same command again to go on; finished pairs are kept in isthmus-demo" in err


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_lab_packages_one_line_names_the_extra(package, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as exited:
        cli.main()
    assert exited.value.code == 1
    assert capsys.readouterr().err == (
        f"error: the isthmus command needs the package '{package}', which is not installed here. "
        "Install it with: pip install 'isthmus[lab]'\n"
    )


def test_importing_the_command_needs_no_lab_package():
    """The entry point itself must come up, so that it can say what is missing."""
    code = "import sys; sys.modules['typer'] = sys.modules['rich'] = None; import isthmus.cli"
    subprocess.run([sys.executable, "-c", code], check=True)


def children(process):
    try:
        listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process)], capture_output=True, text=True).stdout
    except FileNotFoundError:
        pytest.skip("there is no ps to list processes with")
    return [int(pid) for pid in listed.split()]


def alive(process):
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")


def test_ctrl_c_stops_every_process_and_the_next_run_goes_on(tmp_path):
    """A real interrupt of a sweep in two processes: exit 130, no process left, nothing half-written, then resumed."""
    (tmp_path / "grid.toml").write_text(GRID.replace("steps = 12", "steps = 400"))
    command = [sys.executable, "-c", "from isthmus.cli import main; main()", "sweep", "grid.toml", "--workers", "2"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
    records = "isthmus-sweep/pairs/*/*/record.json"
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(records)) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    workers = children(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the command and to its processes
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "run the same command again" in err
    assert not list(tmp_path.rglob("*.tmp"))
    assert len(workers) >= 2
    deadline = time.monotonic() + 10  # multiprocessing's own resource tracker ends a moment after the command
    while any(alive(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [worker for worker in workers if alive(worker)]
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob(records)}
    assert 1 <= len(kept) < 8
    subprocess.run([*command[:-1], "1"], cwd=tmp_path, check=True, capture_output=True)
    assert len(list(tmp_path.glob(records))) == 8
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
