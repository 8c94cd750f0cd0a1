#!/usr/bin/env bash
# Everything that needs a Hopper GPU: build, tests of every GPU kernel, compute-sanitizer, benchmark with its bars.
#   tools/gpu_check.sh [output folder] [build folder]
# All parts run, whatever fails; the last lines say what did. Needs nvcc, ninja, compute-sanitizer and, for the benchmark,
# a Python with a CUDA build of torch ($PYTHON, default python3). About ten minutes.
#   DSPATTN_FUSED_CASES   random problems per row of the fused kernel (default here 300)
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-out/gpu}")
build=$(realpath -m "${2:-build-gpu}")
python=${PYTHON:-python3}
mkdir -p "$out"
summary=()
failed=0

part() { # name, command...: its output goes to <name>.txt, and the end of it to the terminal
  local name=$1 started=$SECONDS
  shift
  if "$@" > "$out/$name.txt" 2>&1; then verdict=passed; else verdict=FAILED; failed=$((failed + 1)); fi
  printf '=== %s\n' "$name"
  tail -n 12 "$out/$name.txt"
  summary+=("$(printf '%-36s %-7s %4d s' "$name" $verdict $((SECONDS - started)))")
}

configure_and_build() {
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release && cmake --build "$build"
}
part build configure_and_build

# Every test program of tests/cuda; those that need no GPU run as well.
for program in "$build"/tests/cuda/cuda_*_tests; do
  name=$(basename "$program")
  part "$name" env DSPATTN_FUSED_CASES="${DSPATTN_FUSED_CASES:-300}" "$program"
done

# Reduced sets: short problems of two rows of the fused kernel, of the tf32 rows, and of the pipeline.
declare -A reduced=(
  [cuda_fused_gpu_tests]='*RandomProblems/*2_4_bf16_d64:*RandomProblems/*1_2_fp16_d128:*FromAGraph*'
  [cuda_fused_tf32_gpu_tests]='*RandomProblems/*'
  [cuda_pipeline_tests]='*WritesTheBytesOfTheCpu:*ANanScore*:*EmptyProblems*'
)
for program in "${!reduced[@]}"; do
  [ -x "$build/tests/cuda/$program" ] || continue
  for tool in memcheck racecheck synccheck initcheck; do
    part "$tool-$program" env DSPATTN_FUSED_CASES=8 timeout 300 \
      compute-sanitizer --tool $tool --error-exitcode 9 "$build/tests/cuda/$program" --gtest_filter="${reduced[$program]}"
  done
done

export DSPATTN_BENCH_LIBRARY=$build/bench/libdspattn_bench_shim.so
part forward "$python" bench/fused_forward.py --out "$out/forward.json" --check
[ ! -f bench/fused_fp32.py ] || part forward_fp32 "$python" bench/fused_fp32.py --out "$out/forward_fp32.json"
export DSPATTN_BUILD=$build
part pipeline_torch "$python" -m pytest -q tests/cuda

printf '\n=== summary (outputs in %s)\n' "$out"
printf '%s\n' "${summary[@]}"
[ "$failed" -eq 0 ] || { echo "$failed parts FAILED"; exit 1; }
