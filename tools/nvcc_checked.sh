#!/usr/bin/env bash
# Runs the CUDA compiler and fails when ptxas reports what makes these kernels slow or hang: serialised wgmma (C751x, C752x)
# or register spills. Usage: nvcc_checked.sh <nvcc command line>
set -uo pipefail
log=$("$@" 2>&1)
status=$?
# Per-kernel resource usage is only interesting when something is wrong with it.
bad=$(grep -E "C75[0-9][0-9]|[1-9][0-9]* bytes spill" <<<"$log" || true)
grep -vE "^ptxas info|bytes stack frame|^$" <<<"$log" >&2
if [ -n "$bad" ]; then
  echo "error: ptxas serialises wgmma or spills registers:" >&2
  echo "$bad" >&2
  exit 1
fi
exit $status
