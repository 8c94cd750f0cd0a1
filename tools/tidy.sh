#!/usr/bin/env bash
# clang-tidy (see .clang-tidy) over the C++ sources of the library and the program, warnings as errors. The preset joins
# the sources of a target: clang-tidy examines the headers of the system too before it leaves out what it finds there, and
# for each source alone that is three quarters of its time.
# Needs a configured build folder for the compile commands; makes a CPU-only one when there is none.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/environment.sh

cmake --preset tidy >/dev/null
cmake --build build/tidy --target dspattn_revision >/dev/null
# The sources of the CPU build: host code that needs CUDA's headers is compiled, but not examined here.
mapfile -t sources < <(sed -n 's/.*"file": "\(.*\)".*/\1/p' build/tidy/compile_commands.json | grep -E "^$PWD/(build/tidy/)?(src|apps)/" | sort -u)
[ ${#sources[@]} -gt 0 ] || { echo "tidy: no sources found in build/tidy/compile_commands.json" >&2; exit 1; }
# GCC's warnings and optimisations in the compile commands may be unknown to clang.
printf '%s\0' "${sources[@]}" | xargs -0 -n 1 -P "$(nproc)" clang-tidy --quiet -p build/tidy \
  --header-filter='(include/dspattn|src|apps|bench)/.*\.(h|cpp)$' \
  --extra-arg=-Wno-unknown-warning-option --extra-arg=-Wno-ignored-optimization-argument \
  2> >(grep -v 'warnings generated\|^Suppressed\|^Use -header-filter\|treated as error' >&2)
echo "tidy: ${#sources[@]} groups of sources are clean"
