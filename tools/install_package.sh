#!/usr/bin/env bash
# Builds the Python package and installs it into .venv. Flags are those of the release preset, so that objects ccache has
# from there serve here; a second run compiles only what changed.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/environment.sh
export CXX=${CXX:-c++}  # as the presets call it: to ccache g++ is another compiler
pip_install --no-build-isolation --no-deps --force-reinstall --config-settings=cmake.define.DSPATTN_WERROR=ON \
  "--config-settings=cmake.define.DSPATTN_GPU_CODE=${DSPATTN_GPU_CODE:-all}" .
