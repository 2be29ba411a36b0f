#!/usr/bin/env bash
# Compile every CUDA source for each architecture with warnings as errors. Where no nvcc is at hand, one of the packages
# that NVIDIA publishes for pip serves, in an environment of its own.
# usage: tests/cuda_compile.sh PYTHON, for that environment
set -euo pipefail
python=$1
cd "$(dirname "$0")/.."

build=build/cuda
mkdir -p "$build"
nvcc=${CUDACXX:-$(command -v nvcc || true)}
if [ -z "$nvcc" ]; then
    packages=$build/nvcc
    find_nvcc() { find "$packages" -path "*/bin/nvcc" 2>/dev/null | head -1; }
    if [ -z "$(find_nvcc)" ]; then
        "$python" -m venv "$packages"
        "$packages/bin/python" -m pip install --quiet --no-deps "nvidia-cuda-nvcc==13.0.*" "nvidia-cuda-crt==13.0.*" \
            "nvidia-nvvm==13.0.*" "nvidia-cuda-runtime==13.0.*" "nvidia-cuda-cccl==13.0.*" || true
    fi
    nvcc=$(find_nvcc)
    if [ -z "$nvcc" ]; then
        echo "cuda-compile: skipped: there is no nvcc, and pip could not install one" >&2
        exit 0
    fi
fi

# The same flags as CMakeLists.txt, and no warnings.
flags=(-std=c++17 -O3 -Icsrc/cuda -fmad=false --expt-relaxed-constexpr "-DISTHMUS_CUDA_ARCHITECTURES=\"80 90 100\""
    -Werror all-warnings -Xcompiler=-Wall,-Wextra,-Werror,-ffp-contract=off)
# The longest first; as many at once as there are processors. `wait` passes a failure on.
for source in $(wc -c csrc/cuda/*.cu | sort -rn | awk '$2 != "total" { print $2 }'); do
    for architecture in 80 90 100; do
        while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n; done
        "$nvcc" "${flags[@]}" -gencode "arch=compute_$architecture,code=sm_$architecture" -c "$source" \
            -o "$build/$(basename "$source" .cu)_sm_$architecture.o" &
    done
done
while [ -n "$(jobs -p)" ]; do wait -n; done
echo "cuda-compile: every source compiles for sm_80, sm_90 and sm_100"
