#!/usr/bin/env bash
# Everything that needs a Hopper GPU: build, tests of every GPU kernel, compute-sanitizer, benchmarks with their bars.
#   tools/gpu_check.sh [output folder] [build folder]
# All parts run, whatever fails; the last lines say what did. Needs nvcc, ninja, compute-sanitizer and, for what runs in
# Python, one with pytest and a CUDA build of torch ($PYTHON, default python3).
#   DSPATTN_FUSED_CASES   random problems per row of the fused kernels (default here 300)
#   DSPATTN_GPU_PARTS     some of: build tests sanitizers bench (default all), or single checks by the names that the
#                         summary has: "sanitizers-means cuda_decode_gpu_tests"
#   DSPATTN_GPU_JOBS      tests and sanitizers side by side (default as many as there are cores)
# Most of a test's time is its oracle's, on the CPU, and most of a sanitizer's its own: so they run side by side. What
# fills the GPU's memory ("Large") and what is timed runs alone.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-out/gpu}")
build=$(realpath -m "${2:-build-gpu}")
python=${PYTHON:-python3}
parts=" ${DSPATTN_GPU_PARTS:-build tests sanitizers bench} "
most=${DSPATTN_GPU_JOBS:-$(nproc)}
# Tests skip themselves elsewhere, which is not passing.
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1)
[[ $capability = 9.* ]] || {
  echo "gpu_check: needs a Hopper GPU (compute capability 9.0), got \"${capability:-none}\"" >&2
  exit 2
}
mkdir -p "$out"
rm -f "$out"/*.status

checks=()           # names, in the order of the summary
declare -A jobs_of  # the numbers of the jobs of each
commands=()         # of each job
declare -A known=([build]=1 [tests]=1 [sanitizers]=1 [bench]=1)

# wanted GROUP NAME: whether a check is to run, asked once for each.
wanted() {
  known[$2]=1
  [[ $parts = *" $1 "* || $parts = *" $2 "* ]] || return 1
  checks+=("$2")
  jobs_of[$2]=
}

# job NAME COMMAND...: one more job of that check.
job() {
  local name=$1
  shift
  jobs_of[$name]+=" ${#commands[@]}"
  commands+=("$(printf '%q ' "$@")")
}

# A job's output goes to job<number>.txt; its exit status and seconds to job<number>.status.
run_job() {
  local started=$SECONDS
  eval "${commands[$1]}" > "$out/job$1.txt" 2>&1
  echo "$? $((SECONDS - started))" > "$out/job$1.status"
}

# run_jobs MOST: those that have not run yet, so many side by side.
next_job=0
run_jobs() {
  local running=0
  while [ $next_job -lt ${#commands[@]} ] || [ $running -gt 0 ]; do
    if [ $next_job -lt ${#commands[@]} ] && [ $running -lt "$1" ]; then
      run_job $next_job &
      next_job=$((next_job + 1))
      running=$((running + 1))
    else
      wait -n
      running=$((running - 1))
    fi
  done
}

# The outputs of a check's jobs become <name>.txt. Passed has what ended well and tested something.
report() {
  local name number status seconds longest verdict failed=0 summary=()
  for name in "${checks[@]}"; do
    verdict=passed longest=0
    : > "$out/$name.txt"
    for number in ${jobs_of[$name]}; do
      if read -r status seconds 2> /dev/null < "$out/job$number.status"; then
        if [ "$status" -ne 0 ]; then verdict=FAILED; fi
        if [ "$seconds" -gt $longest ]; then longest=$seconds; fi
      elif [ $verdict = passed ]; then
        verdict=unfinished
      fi
      printf '\n### %s\n' "${commands[number]}" >> "$out/$name.txt"
      if [ -e "$out/job$number.txt" ]; then cat "$out/job$number.txt" >> "$out/$name.txt"; fi
      rm -f "$out/job$number.txt" "$out/job$number.status"
    done
    if [ $verdict = passed ] && grep -q '^\[=====' "$out/$name.txt" &&
      ! grep -qE '^\[  PASSED  \] [1-9]' "$out/$name.txt"; then
      verdict=FAILED
      echo "gpu_check: no test ran" >> "$out/$name.txt"
    fi
    if [ $verdict != passed ]; then
      failed=$((failed + 1))
      printf '=== %s\n' "$name"
      grep -E '^========= (Error|ERROR|Race|Barrier|Invalid|Uninit)|FAILED|Failure|rror:' "$out/$name.txt" | head -n 20
      tail -n 8 "$out/$name.txt"
    fi
    summary+=("$(printf '%-40s %-10s %4d s' "$name" $verdict "$longest")")
  done
  printf '\n=== summary (outputs in %s; seconds of the longest of what ran side by side)\n' "$out"
  printf '%s\n' "${summary[@]}"
  echo "$((${#checks[@]} - failed)) of ${#checks[@]} passed in $SECONDS s"
  [ "$failed" -eq 0 ]
}

# Asked to end, it says what it knows and takes what still runs with it.
ended_early() {
  trap '' TERM INT
  report
  kill 0
  exit 1
}
trap ended_early TERM INT

# The operators for Python are built where there is a torch to build them against; no emulator where there is the real
# thing.
configure_and_build() {
  local torch=OFF
  if "$python" -c 'import torch' 2> /dev/null; then torch=ON; fi
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DDSPATTN_TORCH=$torch \
    -DDSPATTN_EMULATOR=OFF -DPython_EXECUTABLE="$(command -v "$python")" && cmake --build "$build"
}

verify() { "$build/apps/dspattn" verify --device cuda --count 500 --seed 1 "$@"; }

listing_and_bench() {
  "$build/apps/dspattn" kernels --device cuda --dtype bf16 --n 4096 --d 128 &&
    "$build/apps/dspattn" bench --device cuda --dtype bf16 --n 1024,4096 --d 128 --heads 16 --pattern 2:4,1:2
}

if wanted build build; then job build configure_and_build; fi
run_jobs 1

# Reduced sets: random problems of two rows of the fused kernel, a graph, whole blocks by three warpgroups and by pairs of
# CTAs, mask tensors, many packed sequences, pairs for unequal lengths, means of V, lengths of any content (34 problems
# for each of six rows), few queries, the tf32 rows, the backward, the pipeline. Each under all four tools.
reduced=(
  'masks cuda_fused_gpu_tests *MaskTensors*/*2_4_bf16_d128:*RandomProblems/*1_2_fp16_d192'
  'means cuda_fused_gpu_tests *RandomMeans/*2_4_bf16_d64:*RandomMeans/*1_2_bf16_d128:*RandomMeans/*1_2_fp16_d64:*RestRow.MoreItems*2_4_bf16_d128'
  'many_items cuda_fused_gpu_tests *ManySequences*/*2_4_bf16_d128:*ManySequences*/*1_2_bf16_d64'
  'backward cuda_backward_gpu_tests *RandomProblems/*2_4_bf16_d64:*RandomProblems/*1_2_fp16_d128:*Packed*/*2_4_bf16_d256'
  'general cuda_general_gpu_tests *General.*Random*/bf16_2_4:*General.*Random*/fp16_other:*General.*Random*/fp32_1_2'
  'general_backward cuda_general_gpu_tests *Backward*Random*/bf16_2_4:*Backward*Random*/fp16_other:*Backward*Random*/fp32_1_2'
  'lengths cuda_fused_gpu_tests *DeviceLengthsOf*'
  'random cuda_fused_gpu_tests *RandomProblems/*2_4_bf16_d64:*FromAGraph*'
  'random_fp16 cuda_fused_gpu_tests *RandomProblems/*1_2_fp16_d128'
  'whole_blocks cuda_fused_gpu_tests *WholeBlocks*/*1_2_bf16_d64:*WholeBlocks*/*2_4_bf16_d128'
  'lengths_in_pairs cuda_fused_gpu_tests *InPairs/*1_2_bf16_d128'
  'few_queries cuda_decode_gpu_tests *Random*/*bf16_d128:*Random*/*fp32_d64:*Graph*/*bf16_d64:*EveryNumber*/*fp16_d64'
  'tf32 cuda_fused_tf32_gpu_tests *RandomProblems/*'
  'pipeline cuda_pipeline_tests *EveryKernelOnSmallProblems:*ANanScore*:*EmptyProblems*'
)
for line in "${reduced[@]}"; do
  read -r set program filter <<< "$line"
  wanted sanitizers "sanitizers-$set" || continue
  for tool in racecheck memcheck synccheck initcheck; do
    job "sanitizers-$set" env DSPATTN_FUSED_CASES=16 DSPATTN_DECODE_CASES=12 DSPATTN_LENGTH_CASES=34 timeout 500 \
      compute-sanitizer --tool $tool --error-exitcode 9 "$build/tests/cuda/$program" --gtest_filter="$filter"
  done
done

# Every test program in parts; those that need no GPU run as well.
large=()
for program in "$build"/tests/cuda/cuda_*_tests; do
  name=$(basename "$program")
  wanted tests "$name" || continue
  large+=("$name")
  for ((shard = 0; shard < most; shard++)); do
    job "$name" env DSPATTN_FUSED_CASES="${DSPATTN_FUSED_CASES:-300}" DSPATTN_DECODE_CASES="${DSPATTN_DECODE_CASES:-100}" \
      GTEST_TOTAL_SHARDS="$most" GTEST_SHARD_INDEX=$shard "$program" --gtest_filter='-*Large*'
  done
done
if wanted tests command_line; then
  job command_line verify --pass forward
  job command_line verify --pass backward
  job command_line verify --pass forward --max-queries 16 --max-n 3000
  job command_line listing_and_bench
fi
if wanted tests pipeline_torch; then
  job pipeline_torch env DSPATTN_BENCH_LIBRARY="$build/bench/libdspattn_bench_shim.so" "$python" -m pytest -q \
    bench/pipeline/test_on_a_gpu.py
fi
if [ -e "$build/python/dspattn_torch.so" ] && wanted tests operators; then
  job operators env PYTHONPATH=python DSPATTN_TORCH_LIBRARY="$build/python/dspattn_torch.so" "$python" -m pytest -q -rs \
    tests/python/test_cuda.py
fi
benches=('forward bench.forward.measure' 'few_queries bench.decode.measure' 'backward bench.backward.measure'
  'forward_fp32 bench.forward.fp32' 'general bench.general.measure'
  'general_backward bench.general.measure --pass backward')
for line in "${benches[@]}"; do known[${line%% *}]=1; done
for part in $parts; do
  [ -n "${known[$part]:-}" ] || { echo "gpu_check: expected parts among ${!known[*]}, got \"$part\"" >&2; exit 2; }
done
run_jobs "$most"
for name in "${large[@]}"; do job "$name" "$build/tests/cuda/$name" --gtest_filter='*Large*'; done
run_jobs 1

export DSPATTN_BENCH_LIBRARY=$build/bench/libdspattn_bench_shim.so
for line in "${benches[@]}"; do
  read -r name module_and_arguments <<< "$line"
  wanted bench "$name" || continue
  read -ra module_and_arguments <<< "$module_and_arguments"
  job "$name" "$python" -m "${module_and_arguments[@]}" --out "$out/$name.json" --check
done
run_jobs 1

report
