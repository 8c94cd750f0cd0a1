#!/usr/bin/env bash
# Checks that every C++ and CUDA source is formatted as .clang-format says; with --fix, formats them.
set -euo pipefail
cd "$(dirname "$0")/.."
formatter=.venv/bin/clang-format
[ -x "$formatter" ] || { echo "format: $formatter is missing; run make setup" >&2; exit 1; }

mapfile -t sources < <(git ls-files --cached --others --exclude-standard -- '*.h' '*.cpp' '*.cu' '*.cuh' | sort -u)
if [ "${1:-}" = --fix ]; then
  "$formatter" -i "${sources[@]}"
else
  "$formatter" --dry-run --Werror "${sources[@]}" ||
    { echo "format: some sources are not formatted; make format rewrites them" >&2; exit 1; }
  echo "format: ${#sources[@]} sources are formatted"
fi
