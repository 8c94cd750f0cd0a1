#!/usr/bin/env bash
# Runs each fuzzer of a build folder for a bounded time: tools/fuzz.sh BUILD_FOLDER. SECONDS_EACH (default 15) says how
# long. A crashing input is left in the build folder, and its name printed.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1
seconds=${SECONDS_EACH:-15}

shopt -s nullglob
fuzzers=("$folder"/tests/fuzz/*_fuzzer)
[ ${#fuzzers[@]} -gt 0 ] || { echo "fuzz: no fuzzers in $folder/tests/fuzz" >&2; exit 1; }
for fuzzer in "${fuzzers[@]}"; do
  name=$(basename "$fuzzer")
  corpus=$folder/corpus/$name
  mkdir -p "$corpus"
  log=$folder/$name.log
  words=tests/fuzz/${name%_fuzzer}.dict
  if ! "$fuzzer" $([ -f "$words" ] && echo "-dict=$words") -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -malloc_limit_mb=512 \
    -artifact_prefix="$folder/$name-" "$corpus" >"$log" 2>&1; then
    tail -40 "$log" >&2
    echo "fuzz: $name found a failing input; run: $fuzzer <the file named above>" >&2
    exit 1
  fi
  echo "fuzz: $name, $(sed -n 's/^Done \([0-9]*\) runs in \([0-9]*\) second.*/\1 inputs in \2 s/p' "$log"), none failed"
done
