# The two commands that matter: `make demo` and `make test`. Both install what they need into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := build/peers
SOURCES := pyproject.toml setup.py CMakeLists.txt $(shell find csrc -type f)
# Keep idle threads asleep: on a busy machine, threads that spin while they wait spoil every timing.
BENCH := OMP_WAIT_POLICY=passive $(PEERS)/bin/python -m pytest benchmarks -o python_files="bench_*.py" -o python_functions="bench_*" --benchmark-storage=.benchmarks

.PHONY: demo test test-slow test-gpu-compile test-floor lint format bench bench-compare bench-gpu wheel wheel-check sanitize cuda-compile clean

demo: $(VENV)/.lab
	$(BIN)/isthmus demo

test: $(VENV)/.test
	$(BIN)/python -m pytest

test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -m slow

# Every Triton kernel, compiled ahead of time for three architectures; it needs no GPU.
test-gpu-compile: $(VENV)/.test
	$(BIN)/python -m pytest -m gpu_compile

# The oldest torch that pyproject.toml admits, in an environment of its own.
test-floor:
	$(PYTHON) -m venv build/floor
	build/floor/bin/python -m pip install --quiet "torch==2.13.0" numpy pytest hypothesis
	build/floor/bin/python -m pip install --quiet --no-deps .
	cd tests && ../build/floor/bin/python -m pytest --rootdir=. -q test_ops.py test_ops_values.py test_flat.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	find csrc tests/csrc -type f | xargs $(BIN)/clang-format --dry-run -Werror

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find csrc tests/csrc -type f | xargs $(BIN)/clang-format -i

# Runs every benchmark, prints one table, and stores the run for bench-compare.
bench: $(PEERS)/.installed
	$(BENCH) --benchmark-save=bench

bench-compare: $(PEERS)/.installed
	$(BENCH) --benchmark-save=bench
	$(PEERS)/bin/python -m benchmarks.compare .benchmarks

# For a machine with a GPU: checks every op there, measures it, and prints a table.
bench-gpu: $(PEERS)/.installed
	$(PEERS)/bin/python -m benchmarks.gpu

wheel: $(VENV)/.dev
	$(BIN)/python -m build --wheel

# The wheel, in an empty environment with torch alone.
wheel-check: wheel
	rm -rf build/wheel-check
	$(PYTHON) -m venv build/wheel-check
	build/wheel-check/bin/python -m pip install --quiet dist/*.whl
	cd build && wheel-check/bin/python ../tests/installed.py

# The extension's tests under AddressSanitizer and UndefinedBehaviorSanitizer.
sanitize: $(VENV)/.dev
	tests/sanitize.sh $(abspath $(BIN)/python)

# Every CUDA source for every architecture, with warnings as errors; with a compiler from pip where there is none.
cuda-compile:
	tests/cuda_compile.sh $(PYTHON)

clean:
	rm -rf build dist $(VENV)

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "isthmus needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)

# One stamp for each extra of pyproject.toml; a change of the sources installs again.
$(VENV)/.%: $(SOURCES) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable ".[$*]"
	touch $@

# The tools that benchmarks compare with bring many requirements: they stay out of .venv.
$(PEERS)/.installed: $(SOURCES)
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --editable ".[test,peers]"
	touch $@
