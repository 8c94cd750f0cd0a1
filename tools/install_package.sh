#!/usr/bin/env bash
# Builds the Python package and installs it into .venv. Flags are those of the release preset, so that objects ccache has
# from there serve here; a second run compiles only what changed.
#   tools/install_package.sh        with the kernels of every card, where nvcc is found
#   tools/install_package.sh here   what this machine can run: without a GPU no kernels, which saves several minutes
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/environment.sh
export CXX=${CXX:-c++}  # as the presets call it: to ccache g++ is another compiler
if [ "${1:-}" = here ] && ! nvidia-smi -L >/dev/null 2>&1; then
  DSPATTN_CUDA=${DSPATTN_CUDA:-OFF}
  echo "setup: the Python package, without GPU kernels as there is no GPU here (make package compiles them)"
else
  echo "setup: the Python package (the first time several minutes where nvcc is found: kernels of every card)"
fi
pip_install --no-build-isolation --no-deps --force-reinstall --config-settings=cmake.define.DSPATTN_WERROR=ON \
  "--config-settings=cmake.define.DSPATTN_CUDA=${DSPATTN_CUDA:-ON}" \
  "--config-settings=cmake.define.DSPATTN_GPU_CODE=${DSPATTN_GPU_CODE:-all}" .
