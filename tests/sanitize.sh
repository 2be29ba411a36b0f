#!/usr/bin/env bash
# Run the ops' tests against an extension built with AddressSanitizer and UndefinedBehaviorSanitizer.
# usage: tests/sanitize.sh PYTHON, an interpreter whose environment has the package's test requirements and pybind11
set -euo pipefail
python=$1
cd "$(dirname "$0")/.."

build=build/sanitize
rm -rf "$build"
ISTHMUS_CUDA=0 cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Debug \
    -DCMAKE_CXX_FLAGS="-O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer" \
    -DPython_EXECUTABLE="$python" -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)"
cmake --build "$build"

# The package beside the instrumented extension, ahead of the installed one. Python's own allocations at exit are no
# leaks of ours, and Python itself is not instrumented: the sanitizer's library must be loaded before it.
mkdir -p "$build/package"
cp -r src/isthmus "$build/package/"
rm -f "$build"/package/isthmus/_cpu*.so
cp "$build"/_cpu*.so "$build/package/isthmus/"
# libstdc++ too, or the sanitizer does not see what throws.
LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libstdc++.so)" \
    ASAN_OPTIONS=detect_leaks=0 PYTHONPATH="$build/package" \
    "$python" -m pytest -q -p no:cacheprovider tests/test_ops.py tests/test_ops_values.py tests/test_flat.py \
    tests/test_permute.py tests/test_selection.py tests/test_consensus.py tests/test_random.py tests/test_spherical.py \
    tests/test_assignment.py \
    -k "not compile and not opcheck and not fork"
