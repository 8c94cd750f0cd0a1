#!/usr/bin/env bash
# Everything that needs a Hopper GPU: build, tests of every GPU kernel, compute-sanitizer, benchmarks with their bars.
#   tools/gpu_check.sh [output folder] [build folder]
# All parts run, whatever fails; the last lines say what did. Needs nvcc, ninja, compute-sanitizer and, for what runs in
# Python, one with pytest and a CUDA build of torch ($PYTHON, default python3). About a quarter of an hour on 16 cores.
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
[[ $capability = 9.* ]] || {
  echo "gpu_check: needs a Hopper GPU (compute capability 9.0), got \"${capability:-none}\"" >&2
  exit 2
}
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

# The operators for Python are built where there is a torch to build them against; no emulator where there is the real
# thing.
configure_and_build() {
  local torch=OFF
  if "$python" -c 'import torch' 2> /dev/null; then torch=ON; fi
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DDSPATTN_TORCH=$torch \
    -DDSPATTN_EMULATOR=OFF -DPython_EXECUTABLE="$(command -v "$python")" && cmake --build "$build"
}

# A test program in parts side by side: most of a test's time is its oracle's, on the CPU. What fills the GPU's memory
# ("Large") runs alone afterwards.
in_parts() {
  local program=$1 parts i status=0 pids=()
  parts=$(( ($(nproc) + 1) / 2 ))
  for ((i = 0; i < parts; i++)); do
    GTEST_TOTAL_SHARDS=$parts GTEST_SHARD_INDEX=$i "$program" --gtest_filter='-*Large*' > "$out/part$i.txt" 2>&1 &
    pids+=($!)
  done
  for i in "${!pids[@]}"; do
    wait "${pids[i]}" || { status=1; grep -E 'FAILED|Failure|rror' "$out/part$i.txt"; }
    grep -hE '^\[  (PASSED|SKIPPED)' "$out/part$i.txt"
    rm "$out/part$i.txt"
  done
  "$program" --gtest_filter='*Large*' || status=1
  return $status
}

# All four tools side by side on some tests of a program. No test at all is not passing.
sanitized() {
  local program=$1 filter=$2 tool status=0
  local -A pids=()
  for tool in memcheck racecheck synccheck initcheck; do
    DSPATTN_FUSED_CASES=16 DSPATTN_DECODE_CASES=12 DSPATTN_LENGTH_CASES=34 timeout 300 compute-sanitizer --tool $tool --error-exitcode 9 "$program" \
      --gtest_filter="$filter" > "$out/$tool.txt" 2>&1 &
    pids[$tool]=$!
  done
  for tool in "${!pids[@]}"; do
    { wait "${pids[$tool]}" && grep -qE '^\[  PASSED  \] [1-9]' "$out/$tool.txt"; } ||
      { status=1; grep -E '=====|FAILED' "$out/$tool.txt" | head -n 40; }
    echo "$tool: $(grep -E '^\[  PASSED' "$out/$tool.txt") $(tail -n 1 "$out/$tool.txt")"
    rm "$out/$tool.txt"
  done
  return $status
}

command_line() {
  "$build/apps/dspattn" kernels --device cuda --dtype bf16 --n 4096 --d 128 &&
    "$build/apps/dspattn" verify --device cuda --pass forward --count 500 --seed 1 &&
    "$build/apps/dspattn" verify --device cuda --pass backward --count 500 --seed 1 &&
    "$build/apps/dspattn" verify --device cuda --pass forward --count 500 --seed 1 --max-queries 16 --max-n 3000 &&
    "$build/apps/dspattn" bench --device cuda --dtype bf16 --n 1024,4096 --d 128 --heads 16 --pattern 2:4,1:2
}

if wanted build; then run build configure_and_build; fi

if wanted tests; then
  export DSPATTN_FUSED_CASES=${DSPATTN_FUSED_CASES:-300} DSPATTN_DECODE_CASES=${DSPATTN_DECODE_CASES:-100}
  # Those that need no GPU run as well.
  for program in "$build"/tests/cuda/cuda_*_tests; do
    run "$(basename "$program")" in_parts "$program"
  done
  run command_line command_line
  run pipeline_torch env DSPATTN_BENCH_LIBRARY="$build/bench/libdspattn_bench_shim.so" "$python" -m pytest -q \
    bench/pipeline/test_on_a_gpu.py
  if [ -e "$build/python/dspattn_torch.so" ]; then
    run operators env PYTHONPATH=python DSPATTN_TORCH_LIBRARY="$build/python/dspattn_torch.so" \
      "$python" -m pytest -q -rs tests/python/test_cuda.py
  fi
fi

if wanted sanitizers; then
  # Reduced sets: random problems of two rows of the fused kernel, a graph, whole blocks by three warpgroups and by
  # pairs of CTAs, mask tensors, many packed sequences, pairs for unequal lengths, means of V, lengths of any content
  # (34 problems for each of six rows), few queries, the tf32 rows, the backward, the pipeline.
  declare -A reduced=(
    [random]='cuda_fused_gpu_tests *RandomProblems/*2_4_bf16_d64:*FromAGraph*'
    [random_fp16]='cuda_fused_gpu_tests *RandomProblems/*1_2_fp16_d128'
    [whole_blocks]='cuda_fused_gpu_tests *WholeBlocks*/*1_2_bf16_d64:*WholeBlocks*/*2_4_bf16_d128'
    [masks]='cuda_fused_gpu_tests *MaskTensors*/*2_4_bf16_d128:*RandomProblems/*1_2_fp16_d192'
    [many_items]='cuda_fused_gpu_tests *ManySequences*/*2_4_bf16_d128:*ManySequences*/*1_2_bf16_d64'
    [lengths_in_pairs]='cuda_fused_gpu_tests *InPairs/*1_2_bf16_d128'
    [lengths]='cuda_fused_gpu_tests *DeviceLengthsOf*'
    [few_queries]='cuda_decode_gpu_tests *Random*/*bf16_d128:*Random*/*fp32_d64:*Graph*/*bf16_d64:*EveryNumber*/*fp16_d64'
    [means]='cuda_fused_gpu_tests *RandomMeans/*2_4_bf16_d64:*RandomMeans/*1_2_bf16_d128:*RandomMeans/*1_2_fp16_d64:*RestRow.MoreItems*2_4_bf16_d128'
    [tf32]='cuda_fused_tf32_gpu_tests *RandomProblems/*'
    [general]='cuda_general_gpu_tests *General.*Random*/bf16_2_4:*General.*Random*/fp16_other:*General.*Random*/fp32_1_2'
    [general_backward]='cuda_general_gpu_tests *Backward*Random*/bf16_2_4:*Backward*Random*/fp16_other:*Backward*Random*/fp32_1_2'
    [backward]='cuda_backward_gpu_tests *RandomProblems/*2_4_bf16_d64:*RandomProblems/*1_2_fp16_d128:*Packed*/*2_4_bf16_d256'
    [pipeline]='cuda_pipeline_tests *EveryKernelOnSmallProblems:*ANanScore*:*EmptyProblems*'
  )
  for set in "${!reduced[@]}"; do
    read -r program filter <<< "${reduced[$set]}"
    [ -x "$build/tests/cuda/$program" ] || continue
    run "sanitizers-$set" sanitized "$build/tests/cuda/$program" "$filter"
  done
fi

if wanted bench; then
  export DSPATTN_BENCH_LIBRARY=$build/bench/libdspattn_bench_shim.so
  run forward "$python" -m bench.forward.measure --out "$out/forward.json" --check
  run few_queries "$python" -m bench.decode.measure --out "$out/decode.json" --check
  run backward "$python" -m bench.backward.measure --out "$out/backward.json" --check
  run forward_fp32 "$python" -m bench.forward.fp32 --out "$out/forward_fp32.json" --check
  run general "$python" -m bench.general.measure --out "$out/general.json" --check
  run general_backward "$python" -m bench.general.measure --pass backward --out "$out/general_backward.json" --check
fi

printf '\n=== summary (outputs in %s)\n' "$out"
printf '%s\n' "${summary[@]}"
[ "$failed" -eq 0 ] || { echo "$failed parts FAILED"; exit 1; }
