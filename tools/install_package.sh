#!/usr/bin/env bash
# Builds the Python package and installs it into .venv. Flags are those of the release preset, so that objects ccache has
# from there serve here; a second run compiles only what changed.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/environment.sh
export CXX=${CXX:-c++}  # as the presets call it: to ccache g++ is another compiler
echo "setup: the Python package (the first time several minutes where nvcc is found: kernels of every card)"
pip_install --no-build-isolation --no-deps --force-reinstall --config-settings=cmake.define.DSPATTN_WERROR=ON \
  "--config-settings=cmake.define.DSPATTN_CUDA=${DSPATTN_CUDA:-ON}" \
  "--config-settings=cmake.define.DSPATTN_GPU_CODE=${DSPATTN_GPU_CODE:-all}" .
