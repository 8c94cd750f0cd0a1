#!/usr/bin/env bash
# Every check and test, step by step, with a summary at the end. `make test` calls it after the set-up.
#
#   tools/test.sh                 all steps
#   tools/test.sh format build    only these
set -uo pipefail
cd "$(dirname "$0")/.."
. tools/environment.sh
python=.venv/bin/python

# name: what it checks. In this order; a step that needs the release build comes after it.
all_steps=(format lint includes build unit cli python tidy asan tsan fuzz)

step_format() { tools/format.sh; }

step_lint() { .venv/bin/ruff check . && .venv/bin/ruff format --check --exclude '*.md' . && .venv/bin/mypy; }

step_includes() { $python tools/check_includes.py; }

# Warnings are errors. With nvcc on the machine this also compiles every CUDA file.
step_build() { cmake --preset release && cmake --build --preset release; }

step_unit() { ctest --preset release --parallel "$(nproc)"; }

step_cli() { DSPATTN_CLI=$PWD/build/release/apps/dspattn $python -m pytest -q tests/cli tests/tools bench; }

step_python() { tools/install_package.sh && $python -m pytest -q tests/python; }

step_tidy() { tools/tidy.sh; }

# Address, leak and undefined-behaviour checks over the C++ tests and the program, then data races over the C++ tests.
# Their presets leave out the test that measures memory: a sanitizer's own memory is many times the library's.
step_asan() {
  cmake --preset asan && cmake --build --preset asan && ctest --preset asan --parallel "$(nproc)" &&
    DSPATTN_CLI=$PWD/build/asan/apps/dspattn $python -m pytest -q tests/cli \
        -k "not verify_on_a_fixed_seed and not on_a_gpu"
}

# The test programs that start threads.
step_tsan() {
  cmake --preset tsan && cmake --build --preset tsan --target cpu_fast_tests apps_tests &&
    ctest --preset tsan --parallel "$(nproc)" -L '^(cpu_fast_tests|apps_tests)$'
}

step_fuzz() { cmake --preset fuzz && cmake --build --preset fuzz --target fuzzers && tools/fuzz.sh build/fuzz; }

# Of all steps, those that keep one core busy run beside the others, in this order; what they print comes between two of
# those.
steps=("$@")
beside=()
[ ${#steps[@]} -gt 0 ] || { steps=("${all_steps[@]}"); beside=(lint cli python); }
for step in "${steps[@]}"; do
  declare -F "step_$step" >/dev/null ||
    { echo "test: expected steps among ${all_steps[*]}, got \"$step\"" >&2; exit 2; }
done

results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
trap 'trap - TERM; kill 0' INT TERM  # what runs beside, too
started=$SECONDS

run_step() {
  local begun=$SECONDS verdict=FAILED
  if "step_$1"; then verdict=passed; fi
  printf '%-10s %-7s %4d s\n' "$1" $verdict $((SECONDS - begun)) > "$results/$1"
}

run_beside() {
  local step
  for step in "${beside[@]}"; do
    if [ $step != lint ]; then
      until [ -e "$results/build" ]; do sleep 1; done
    fi
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
