#!/usr/bin/env bash
# clang-tidy (see .clang-tidy) over the C++ sources of the library and the program, warnings as errors.
# Needs a configured build folder for the compile commands; makes a CPU-only one when there is none.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/environment.sh

cmake --preset tidy >/dev/null
mapfile -t sources < <(git ls-files --cached --others --exclude-standard -- 'src/*.cpp' 'apps/*.cpp' | sort -u)
printf '%s\0' "${sources[@]}" | xargs -0 -n 1 -P "$(nproc)" clang-tidy --quiet -p build/tidy 2> >(grep -v 'warnings generated\|^Suppressed\|^Use -header-filter\|treated as error' >&2)
echo "tidy: ${#sources[@]} sources are clean"
