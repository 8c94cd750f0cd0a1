#!/usr/bin/env bash
# Runs the CUDA compiler and fails when ptxas reports what makes these kernels slow or hang: serialised wgmma (C751x, C752x)
# or register spills. -DDSPATTN_MAY_SPILL_BYTES=N allows a kernel so many; the test cuda_machine_code then sees to it that
# none are in loops over key tiles. Usage: nvcc_checked.sh <nvcc command line>
set -uo pipefail
log=$("$@" 2>&1)
status=$?
# Per-kernel resource usage is only interesting when something is wrong with it.
allowed=0
for argument in "$@"; do
  case $argument in
    -DDSPATTN_MAY_SPILL_BYTES=*) allowed=${argument#*=} ;;
  esac
done
bad=$(awk -v allowed="$allowed" '
  /C75[0-9][0-9]/ { print; next }
  match($0, /[0-9]+ bytes spill stores/) && substr($0, RSTART) + 0 > allowed' <<<"$log")
grep -vE "^ptxas info|bytes stack frame|^$" <<<"$log" >&2
if [ -n "$bad" ]; then
  echo "error: ptxas serialises wgmma or spills registers:" >&2
  echo "$bad" >&2
  exit 1
fi
exit $status
