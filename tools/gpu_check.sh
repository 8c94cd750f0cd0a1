#!/usr/bin/env bash
# Everything that needs a Hopper GPU: build, tests of every GPU kernel, compute-sanitizer, benchmarks with their bars.
#   tools/gpu_check.sh [output folder] [build folder]
# All parts run, whatever fails; the last lines say what did. Needs nvcc, ninja, compute-sanitizer and, for what runs in
# Python, one with pytest and a CUDA build of torch ($PYTHON, default python3). About ten minutes on 16 cores.
#   DSPATTN_FUSED_CASES   random problems per row of the fused kernels (default here 300)
#   DSPATTN_GPU_PARTS     some of: build tests sanitizers bench (default all)
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-out/gpu}")
build=$(realpath -m "${2:-build-gpu}")
python=${PYTHON:-python3}
parts=" ${DSPATTN_GPU_PARTS:-build tests sanitizers bench} "
# Tests skip themselves elsewhere, which is not passing.
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1)
[[ $capability = 9.* ]] || { echo "gpu_check: needs a Hopper GPU (compute capability 9.0), got \"${capability:-none}\"" >&2; exit 2; }
mkdir -p "$out"
summary=()
failed=0

wanted() { [[ $parts = *" $1 "* ]]; }

run() { # name, command...: its output goes to <name>.txt, and the end of it to the terminal
  local name=$1 started=$SECONDS verdict
  shift
  if "$@" > "$out/$name.txt" 2>&1; then verdict=passed; else verdict=FAILED; failed=$((failed + 1)); fi
  printf '=== %s\n' "$name"
  tail -n 12 "$out/$name.txt"
  summary+=("$(printf '%-40s %-7s %4d s' "$name" $verdict $((SECONDS - started)))")
}

configure_and_build() { cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release && cmake --build "$build"; }

if wanted build; then run build configure_and_build; fi

if wanted tests; then
  # Those that need no GPU run as well.
  for program in "$build"/tests/cuda/cuda_*_tests; do
    run "$(basename "$program")" env DSPATTN_FUSED_CASES="${DSPATTN_FUSED_CASES:-300}" "$program"
  done
  run pipeline_torch env DSPATTN_BUILD="$build" "$python" -m pytest -q tests/cuda
fi

if wanted sanitizers; then
  # Reduced sets: short problems of two rows of the fused kernel, pairs of thread blocks, the tf32 rows, the pipeline.
  declare -A reduced=(
    [cuda_fused_gpu_tests]='*RandomProblems/*2_4_bf16_d64:*RandomProblems/*1_2_fp16_d128:*FromAGraph*:*InPairs/*1_2_bf16_d128'
    [cuda_fused_tf32_gpu_tests]='*RandomProblems/*'
    [cuda_pipeline_tests]='*EveryKernelOnSmallProblems:*ANanScore*:*EmptyProblems*'
  )
  for program in "${!reduced[@]}"; do
    [ -x "$build/tests/cuda/$program" ] || continue
    for tool in memcheck racecheck synccheck initcheck; do
      run "$tool-$program" env DSPATTN_FUSED_CASES=8 timeout 300 compute-sanitizer --tool $tool --error-exitcode 9 \
        "$build/tests/cuda/$program" --gtest_filter="${reduced[$program]}"
    done
  done
fi

if wanted bench; then
  export DSPATTN_BENCH_LIBRARY=$build/bench/libdspattn_bench_shim.so
  run forward "$python" bench/fused_forward.py --out "$out/forward.json" --check
  run forward_fp32 "$python" bench/fused_fp32.py --out "$out/forward_fp32.json" --check
fi

printf '\n=== summary (outputs in %s)\n' "$out"
printf '%s\n' "${summary[@]}"
[ "$failed" -eq 0 ] || { echo "$failed parts FAILED"; exit 1; }
