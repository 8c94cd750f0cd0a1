#!/usr/bin/env bash
# Checks and tests, step by step, with a summary at the end. `make test` and `make check` call it after the set-up.
#
#   tools/test.sh                 what `make test` runs
#   tools/test.sh check families  what `make check` runs
#   tools/test.sh test check      both, as continuous integration
#   tools/test.sh format build    only these steps
set -uo pipefail
cd "$(dirname "$0")/.."
. tools/environment.sh
python=.venv/bin/python

# In this order; a step that needs the release build comes after it.
test_steps=(build unit cli python)
check_steps=(build format lint includes emulated long tidy asan tsan fuzz)

# Where no kernel can run, `make test` compiles none, and `make check` each for one card rather than for all: that takes up
# to half of its time. A build folder that is there keeps what it has.
configured() { sed -n "s/^$1:[A-Z]*=//p" build/release/CMakeCache.txt 2>/dev/null; }
has_gpu() { nvidia-smi -L >/dev/null 2>&1; }
if [ -z "${DSPATTN_CUDA:-}" ]; then
  DSPATTN_CUDA=$(configured DSPATTN_CUDA)
  if [[ " $* " == *" check "* ]] || [ -n "${DSPATTN_GPU_CODE:-}" ] || has_gpu; then DSPATTN_CUDA=ON; fi
fi
if [ -z "${DSPATTN_GPU_CODE:-}" ]; then
  DSPATTN_GPU_CODE=$(configured DSPATTN_GPU_CODE)
  if [ -z "$DSPATTN_GPU_CODE" ] && ! has_gpu; then DSPATTN_GPU_CODE=one; fi
fi
export DSPATTN_CUDA=${DSPATTN_CUDA:-OFF} DSPATTN_GPU_CODE=${DSPATTN_GPU_CODE:-all}

# Warnings are errors. With nvcc on the machine `make check` compiles every CUDA file here, and what the step emulated
# needs besides: beside the last of nvcc's long units a core would be idle.
step_build() {
  local targets=(all)
  if wanted emulated; then targets+=(emulated); fi
  cmake --preset release "-DDSPATTN_CUDA=$DSPATTN_CUDA" "-DDSPATTN_GPU_CODE=$DSPATTN_GPU_CODE" &&
    cmake --build --preset release --target "${targets[@]}"
}

step_unit() { ctest --preset release --parallel "$(nproc)"; }

# The log says which tests take long.
pytest=($python -m pytest -q --durations=12 --durations-min=2)

# cli_tests PRESET ARGUMENTS...: the tests of the program, as that preset built it.
cli_tests() {
  DSPATTN_CLI=$PWD/build/$1/apps/dspattn "${pytest[@]}" tests/cli --ignore tests/cli/test_on_a_gpu.py "${@:2}"
}

# What of bench needs the package comes with the tests of that.
on_the_package=(bench/clients bench/decode/test_generate.py)

step_cli() { cli_tests release tests/tools bench "${on_the_package[@]/#/--ignore=}"; }

# PyTorch's threads that have nothing to do sleep: beside other steps, spinning takes their time.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
step_python() { tools/install_package.sh && "${pytest[@]}" tests/python "${on_the_package[@]}"; }

step_format() { tools/format.sh; }

step_lint() { .venv/bin/ruff check . && .venv/bin/ruff format --check --exclude '*.md' . && .venv/bin/mypy; }

step_includes() { $python tools/check_includes.py; }

# The GPU kernels, compiled for the emulated multiprocessor: their tests, and the program on it.
step_emulated() {
  cmake --build --preset release --target emulated &&
    ctest --preset emulated --parallel "$(nproc)" && "${pytest[@]}" tests/cli/test_on_a_gpu.py
}

# The tests in Python that take long, on the package that the step python installed. Only files with such tests are read:
# to import all of them takes ten seconds.
step_long() {
  local files
  mapfile -t files < <(grep -l 'pytest\.mark\.long' tests/python/test_*.py)
  { wanted python || tools/install_package.sh; } && "${pytest[@]}" "${files[@]}" -m long
}

# Every family that transformers has, two to three minutes on one core: `make check` runs it, continuous integration does not.
step_families() {
  { wanted python || wanted long || tools/install_package.sh; } &&
    $python -m pytest -q -rs tests/python/test_every_family.py -m rare
}

step_tidy() { tools/tidy.sh; }

# Address, leak and undefined-behaviour checks over the C++ tests and the program, then data races over the C++ tests.
# Their presets leave out the test that measures memory: a sanitizer's own memory is many times the library's.
# On aarch64 the search for leaks takes 3 s a process, whatever it does (4.3 with GCC 12): there the tests in C++ search
# (tests/apps/program_test.cpp runs every command in one process), and the program's hundreds of processes do not.
step_asan() {
  cmake --preset asan && cmake --build --preset asan && ctest --preset asan --parallel "$(nproc)" || return
  local leaks=1
  if [ "$(uname -m)" = aarch64 ]; then leaks=0; fi
  ASAN_OPTIONS=detect_leaks=$leaks cli_tests asan -k "not verify_on_a_fixed_seed"
}

# The test programs that start threads.
step_tsan() {
  cmake --preset tsan && cmake --build --preset tsan --target cpu_fast_tests verify_tests &&
    ctest --preset tsan --parallel "$(nproc)" -R '^(cpu_fast_tests|verify_tests)$'
}

step_fuzz() { cmake --preset fuzz && cmake --build --preset fuzz --target fuzzers && tools/fuzz.sh build/fuzz; }

wanted() { [[ " ${steps[*]} " == *" $1 "* ]]; }

steps=()
for word in "${@:-test}"; do
  case $word in
    test) group=("${test_steps[@]}") ;;
    check) group=("${check_steps[@]}") ;;
    *) group=("$word") ;;
  esac
  for step in "${group[@]}"; do
    declare -F "step_$step" >/dev/null || {
      echo "test: expected test, check or steps among ${test_steps[*]} ${check_steps[*]:1} families, got \"$step\"" >&2
      exit 2
    }
    wanted "$step" || steps+=("$step")
  done
done

# Steps that keep one core busy run beside those that keep all busy, in this order; what they print comes between two of
# those. tsan is one for most of its time, as asan is at its end, when nothing else was left; fuzz is not, for those beside
# take longer than the others together. With one or two steps there is nothing to run beside.
beside=()
if [ ${#steps[@]} -gt 2 ]; then
  for step in lint python long families tsan; do
    if wanted $step; then beside+=($step); fi
  done
fi

results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
trap 'trap - TERM; kill 0' INT TERM  # what runs beside, too
started=$SECONDS
own_process=$$

run_step() {
  local begun=$SECONDS verdict=FAILED
  # In a shell of its own: what `times` counts there is this step's processor time.
  (
    "step_$1"
    status=$?
    times > "$results/$1.times"
    exit $status
  ) && verdict=passed
  # Two lines, of the shell and of its children, each "0m1.2s 0m0.3s": user and system.
  local used
  used=$(awk -F '[ms ]+' '{ s += 60 * ($1 + $3) + $2 + $4 } END { printf "%d", s + 0.5 }' "$results/$1.times")
  printf '%-10s %-7s %5d s %5d CPU s\n' "$1" $verdict $((SECONDS - begun)) "$used" > "$results/$1"
}

# A killed script runs no trap: what runs beside it looks whether it is still there.
end_if_alone() { kill -0 $own_process 2>/dev/null || { rm -rf "$results"; exit 1; }; }

run_beside() {
  local step
  for step in "${beside[@]}"; do
    if [ $step != lint ] && wanted build; then
      until [ -e "$results/build" ]; do end_if_alone; sleep 1; done
    fi
    end_if_alone
    run_step $step > "$results/$step.txt" 2>&1
    mv "$results/$step.txt" "$results/$step.printed"
  done
}

print_finished() {
  local printed
  for printed in "$results"/*.printed; do
    [ -e "$printed" ] || continue
    printf '\n=== %s\n' "$(basename "$printed" .printed)"
    cat "$printed"
    rm "$printed"
  done
}

run_beside &
for step in "${steps[@]}"; do
  [[ " ${beside[*]} " != *" $step "* ]] || continue
  printf '\n=== %s\n' "$step"
  run_step "$step"
  print_finished
done
wait
print_finished

failed=0
printf '\n=== summary\n'
for step in "${steps[@]}"; do
  cat "$results/$step" || echo "$step did not end"
  if ! grep -q passed "$results/$step"; then failed=$((failed + 1)); fi
done
if [ "$failed" -eq 0 ]; then
  echo "All ${#steps[@]} steps passed in $((SECONDS - started)) s."
else
  echo "$failed of ${#steps[@]} steps FAILED; their output is above, under \"=== <step>\"."
  exit 1
fi
