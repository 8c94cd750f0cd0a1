#!/usr/bin/env bash
# Everything that needs a Hopper GPU: build, tests on every row of the fused kernel, compute-sanitizer, benchmark.
#   tools/gpu_check.sh [output folder] [build folder]
# DSPATTN_FUSED_CASES sets the random problems per row (300 for the full check).
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-out/gpu}")
build=${2:-build-gpu}
mkdir -p "$out"
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release
cmake --build "$build" --target cuda_fused_gpu_tests cuda_fused_tile_tests dspattn_bench_shim
DSPATTN_FUSED_CASES=${DSPATTN_FUSED_CASES:-300} "$build/tests/cuda/cuda_fused_gpu_tests" | tee "$out/tests.txt"
for tool in memcheck racecheck synccheck initcheck; do
  DSPATTN_FUSED_CASES=2 compute-sanitizer --tool $tool --error-exitcode 1 \
    "$build/tests/cuda/cuda_fused_gpu_tests" --gtest_filter='*2_4_bf16_d64:*1_2_fp16_d128' | tee "$out/$tool.txt"
done
export DSPATTN_BENCH_LIBRARY=$build/bench/libdspattn_bench_shim.so
DSPATTN_COMMIT=${DSPATTN_COMMIT:-$(git describe --always --dirty)} python3 bench/fused_forward.py --out "$out/forward.json"
