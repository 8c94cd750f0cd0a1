#!/usr/bin/env bash
# Everything that needs a Hopper GPU: build, tests of every GPU kernel, compute-sanitizer, benchmarks with their bars.
#   tools/gpu_check.sh [output folder] [build folder]
# All parts run, whatever fails, but for a build that does; the last lines, also in summary.txt, say what did. Needs nvcc,
# ninja, compute-sanitizer and, for what runs in Python, one with pytest and a CUDA build of torch ($PYTHON, default
# python3).
#   DSPATTN_FUSED_CASES      random problems per row of the fused kernels (default here 300)
#   DSPATTN_GPU_PARTS        some of: build tests sanitizers bench (default all), or single checks by the names that the
#                            summary has: "sanitizers-means cuda_decode_gpu_tests"
#   DSPATTN_GPU_JOBS         tests and sanitizers side by side (default as many as there are cores)
#   DSPATTN_GPU_JOB_SECONDS  how long one of them may take (default 400): one that hangs takes nothing else with it
#   DSPATTN_GPU_SECONDS      how long all may take (default no limit): what has not ended then is ended, and said
#   COMPUTE_SANITIZER        which one (default that on the path). racecheck needs 2026.3, of CUDA 13.4 (also `pip install
#                            nvidia-cuda-sanitizer-api`): earlier ones report what barriers order (docs/checking.md)
# Most of a test's time is its oracle's, on the CPU, and most of a sanitizer's its own: so they run side by side, in shards,
# the longest first. What is timed runs alone, after them.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-out/gpu}")
build=$(realpath -m "${2:-build-gpu}")
python=${PYTHON:-python3}
parts=" ${DSPATTN_GPU_PARTS:-build tests sanitizers bench} "
most=${DSPATTN_GPU_JOBS:-$(nproc)}
sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
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
commands=() order=()  # of each job; order: "rank number"
declare -A known=([build]=1 [tests]=1 [sanitizers]=1 [bench]=1)

# wanted GROUP NAME: whether a check is to run, asked once for each.
wanted() {
  known[$2]=1
  [[ $parts = *" $1 "* || $parts = *" $2 "* ]] || return 1
  checks+=("$2")
  jobs_of[$2]=
}

# job RANK NAME COMMAND...: one more job of that check. Those with the lowest ranks begin first.
job() {
  local rank=$1 name=$2
  shift 2
  jobs_of[$name]+=" ${#commands[@]}"
  order+=("$rank ${#commands[@]}")
  commands+=("$(printf '%q ' "$@")")
}

# run_job NUMBER SECONDS: its output goes to job<number>.txt; its exit status and seconds to job<number>.status. In a
# process group of its own (timeout makes one), which ends as a whole.
run_job() {
  local started=$SECONDS status
  timeout -k 10 "$2" bash -c "${commands[$1]}" > "$out/job$1.txt" 2>&1 &
  trap 'kill $! 2> /dev/null; exit' TERM
  wait $!
  status=$?
  if [ $status -eq 124 ] || [ $status -eq 137 ]; then echo "gpu_check: ended after $2 s" >> "$out/job$1.txt"; fi
  echo "$status $((SECONDS - started))" > "$out/job$1.status"
}

out_of_time() { [ -n "${DSPATTN_GPU_SECONDS:-}" ] && [ $SECONDS -ge "$DSPATTN_GPU_SECONDS" ]; }

running=()  # processes of jobs
end_running() {
  for pid in "${running[@]}"; do kill "$pid" 2> /dev/null; done
  wait "${running[@]}" 2> /dev/null
  running=()
}

# run_jobs MOST SECONDS: those that have not run yet, so many side by side, none longer than that.
run_jobs() {
  local number rank pid alive next=0 sorted=()
  mapfile -t sorted < <(printf '%s\n' "${order[@]}" | sort -s -n -k 1,1)
  order=()
  while ! out_of_time; do
    if [ $next -lt ${#sorted[@]} ] && [ ${#running[@]} -lt "$1" ]; then
      read -r rank number <<< "${sorted[next]}"
      next=$((next + 1))
      [ -n "$number" ] || continue
      run_job "$number" "$2" &
      running+=($!)
      continue
    fi
    [ ${#running[@]} -gt 0 ] || return 0
    sleep 0.2  # wait -n misses a job that ends just before it
    alive=()
    for pid in "${running[@]}"; do
      if kill -0 "$pid" 2> /dev/null; then alive+=("$pid"); fi
    done
    running=("${alive[@]}")
  done
  end_running
}

# The outputs of a check's jobs become <name>.txt, what they took jobs.txt. Passed has what ended well and tested
# something.
report() {
  local name number status seconds longest verdict failed=() summary=()
  : > "$out/jobs.txt"
  for name in "${checks[@]}"; do
    verdict=passed longest=0
    : > "$out/$name.txt"
    for number in ${jobs_of[$name]}; do
      seconds=0
      if read -r status seconds 2> /dev/null < "$out/job$number.status"; then
        if [ "$status" -ne 0 ]; then verdict=FAILED; fi
        if [ "$seconds" -gt $longest ]; then longest=$seconds; fi
      else
        status=unfinished
        if [ $verdict = passed ]; then verdict=unfinished; fi
      fi
      printf '%6d s  %-10s  %s  %s\n' "$seconds" "$status" "$name" "${commands[number]}" >> "$out/jobs.txt"
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
      failed+=("$name")
      printf '=== %s\n' "$name"
      grep -E '^========= (Error|ERROR|Race|Barrier|Invalid|Uninit)|FAILED|Failure|rror:|BELOW|gpu_check:' \
        "$out/$name.txt" | head -n 20
      tail -n 8 "$out/$name.txt"
    fi
    summary+=("$(printf '%-40s %-10s %4d s' "$name" $verdict "$longest")")
  done
  sort -rn -o "$out/jobs.txt" "$out/jobs.txt"
  {
    printf '\n=== summary (outputs in %s; seconds of the longest of what ran side by side)\n' "$out"
    printf '%s\n' "${summary[@]}"
    if out_of_time; then echo "ended after the $DSPATTN_GPU_SECONDS s that were given"; fi
    if [ ${#failed[@]} -gt 0 ]; then echo "again: DSPATTN_GPU_PARTS=\"${failed[*]}\""; fi
    echo "$((${#checks[@]} - ${#failed[@]})) of ${#checks[@]} passed in $SECONDS s"
  } | tee "$out/summary.txt"
  [ ${#failed[@]} -eq 0 ]
}

# Asked to end, it says what it knows and takes what still runs with it.
ended_early() {
  trap '' TERM INT
  end_running
  report
  exit 1
}
trap ended_early TERM INT

# The operators for Python are built where there is a torch to build them against; no emulator and no code for other cards
# where there is the real thing.
configure_and_build() {
  local torch=OFF
  if "$python" -c 'import torch' 2> /dev/null; then torch=ON; fi
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DDSPATTN_TORCH=$torch \
    -DDSPATTN_EMULATOR=OFF -DDSPATTN_GPU_CODE=hopper -DPython_EXECUTABLE="$(command -v "$python")" && cmake --build "$build"
}

verify() { "$build/apps/dspattn" verify --device cuda --count 500 --seed 1 "$@"; }

# compute-sanitizer, of a version whose reports mean something.
sanitize() {
  local tool=$1 version
  shift
  if [ "$tool" = racecheck ]; then
    version=$("$sanitizer" --version | sed -n 's/^Version \([0-9.]*\).*/\1/p')
    printf '%s\n' 2026.3 "${version:-0}" | sort -C -V || {
      echo "gpu_check: racecheck needs compute-sanitizer 2026.3 or later (COMPUTE_SANITIZER), got ${version:-none}"
      return 1
    }
  fi
  # Now and then the tool loses track of a launch, says so, and fails: that says nothing of the program. Again, then.
  local attempt status printed
  printed=$(mktemp)
  for attempt in 1 2 3; do
    "$sanitizer" --tool "$tool" --error-exitcode 9 "$@" 2>&1 | tee "$printed"
    status=${PIPESTATUS[0]}
    grep -q '^=* *Internal Sanitizer Error' "$printed" || break
    echo "gpu_check: $sanitizer failed itself (run $attempt of at most 3)"
  done
  rm "$printed"
  return "$status"
}

listing_and_bench() {
  "$build/apps/dspattn" kernels --device cuda --dtype bf16 --n 4096 --d 128 &&
    "$build/apps/dspattn" bench --device cuda --dtype bf16 --n 1024,4096 --d 128 --heads 16 --pattern 2:4,1:2
}

export build python sanitizer
export -f configure_and_build verify sanitize listing_and_bench

if wanted build build; then
  job 0 build configure_and_build
  run_jobs 1 1500
  read -r status _ 2> /dev/null < "$out/job0.status" && [ "$status" -eq 0 ] || { report; exit 1; }
fi

# Reduced sets: random problems of two rows of the fused kernel, a graph, whole blocks by three warpgroups and by pairs of
# CTAs, mask tensors, many packed sequences, pairs for unequal lengths, means of V, lengths of any content (34 problems
# for each of six rows), few queries, the tf32 rows, the backward, the pipeline. Each under all four tools, of which
# racecheck takes longest: the number says in how many shards.
reduced=(
  'masks 2 cuda_fused_gpu_tests *MaskTensors*/*2_4_bf16_d128:*RandomProblems/*1_2_fp16_d192'
  'means 4 cuda_fused_gpu_tests *RandomMeans/*2_4_bf16_d64:*RandomMeans/*1_2_bf16_d128:*RandomMeans/*1_2_fp16_d64:*RestRow.MoreItems*2_4_bf16_d128'
  'many_items 2 cuda_fused_gpu_tests *ManySequences*/*2_4_bf16_d128:*ManySequences*/*1_2_bf16_d64'
  'backward 3 cuda_backward_gpu_tests *RandomProblems/*2_4_bf16_d64:*RandomProblems/*1_2_fp16_d128:*Packed*/*2_4_bf16_d256'
  'general 3 cuda_general_gpu_tests *General.*Random*/bf16_2_4:*General.*Random*/fp16_other:*General.*Random*/fp32_1_2'
  'general_backward 3 cuda_general_gpu_tests *Backward*Random*/bf16_2_4:*Backward*Random*/fp16_other:*Backward*Random*/fp32_1_2'
  'lengths 8 cuda_fused_gpu_tests *DeviceLengthsOf*'
  'random 2 cuda_fused_gpu_tests *RandomProblems/*2_4_bf16_d64:*FromAGraph*'
  'random_fp16 1 cuda_fused_gpu_tests *RandomProblems/*1_2_fp16_d128'
  'whole_blocks 2 cuda_fused_gpu_tests *WholeBlocks*/*1_2_bf16_d64:*WholeBlocks*/*2_4_bf16_d128'
  'lengths_in_pairs 1 cuda_fused_gpu_tests *InPairs/*1_2_bf16_d128'
  'few_queries 4 cuda_decode_gpu_tests *Random*/*bf16_d128:*Random*/*fp32_d64:*Graph*/*bf16_d64:*EveryNumber*/*fp16_d64'
  'tf32 3 cuda_fused_tf32_gpu_tests *RandomProblems/*'
  'pipeline 3 cuda_pipeline_tests *EveryKernelOnSmallProblems:*ANanScore*:*EmptyProblems*'
)
for line in "${reduced[@]}"; do
  read -r set racecheck_shards program filter <<< "$line"
  wanted sanitizers "sanitizers-$set" || continue
  for tool in racecheck memcheck synccheck initcheck; do
    shards=1 rank=3
    if [ $tool = racecheck ]; then shards=$racecheck_shards rank=0; fi
    for ((shard = 0; shard < shards; shard++)); do
      job $rank "sanitizers-$set" DSPATTN_FUSED_CASES=16 DSPATTN_DECODE_CASES=12 DSPATTN_LENGTH_CASES=34 \
        GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard \
        sanitize $tool "$build/tests/cuda/$program" --gtest_filter="$filter"
    done
  done
done

# Every test program in shards; those that need no GPU run as well. Tests of the fused forward take longest, by far.
for program in "$build"/tests/cuda/cuda_*_tests; do
  name=$(basename "$program")
  wanted tests "$name" || continue
  case $name in
    cuda_fused_gpu_tests) shards=$((3 * most)) rank=1 ;;
    *general_gpu* | *backward_gpu*) shards=$((2 * most)) rank=2 ;;
    *decode_gpu*) shards=$most rank=4 ;;
    *) shards=4 rank=5 ;;
  esac
  for ((shard = 0; shard < shards; shard++)); do
    job $rank "$name" env DSPATTN_FUSED_CASES="${DSPATTN_FUSED_CASES:-300}" \
      DSPATTN_DECODE_CASES="${DSPATTN_DECODE_CASES:-100}" GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard "$program"
  done
done
if wanted tests command_line; then
  job 4 command_line verify --pass forward
  job 4 command_line verify --pass backward
  job 4 command_line verify --pass forward --max-queries 16 --max-n 3000
  job 5 command_line listing_and_bench
fi
if wanted tests pipeline_torch; then
  job 4 pipeline_torch env DSPATTN_BENCH_LIBRARY="$build/bench/libdspattn_bench_shim.so" "$python" -m pytest -q \
    bench/pipeline/test_on_a_gpu.py
fi
if [ -e "$build/python/dspattn_torch.so" ] && wanted tests operators; then
  for file in test_cuda test_random test_caching test_parallel_cuda; do
    job 2 operators env PYTHONPATH=python DSPATTN_TORCH_LIBRARY="$build/python/dspattn_torch.so" "$python" -m pytest -q -rs \
      "tests/python/$file.py"
  done
fi
# What the forward is promised, its other bars, and the other kernels'.
benches=('forward bench.forward.measure --parts table,sustained --peers cudnn --idle 0.25'
  'forward_fp32 bench.forward.fp32'
  'forward_others bench.forward.measure --parts d256,grouping,fp16,gqa,varlen,memory,mask'
  'few_queries bench.decode.measure' 'backward bench.backward.measure' 'general bench.general.measure'
  'general_backward bench.general.measure --pass backward')
for line in "${benches[@]}"; do known[${line%% *}]=1; done
for part in $parts; do
  [ -n "${known[$part]:-}" ] || { echo "gpu_check: expected parts among ${!known[*]}, got \"$part\"" >&2; exit 2; }
done
run_jobs "$most" "${DSPATTN_GPU_JOB_SECONDS:-400}"

export DSPATTN_BENCH_LIBRARY=$build/bench/libdspattn_bench_shim.so
rank=0
for line in "${benches[@]}"; do
  read -r name module_and_arguments <<< "$line"
  wanted bench "$name" || continue
  read -ra module_and_arguments <<< "$module_and_arguments"
  rank=$((rank + 1))
  job $rank "$name" "$python" -m "${module_and_arguments[@]}" --out "$out/$name.json" --check
done
run_jobs 1 1500

report
