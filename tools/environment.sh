# Sourced by the other scripts: which programs they use. The working directory is the repository.
# The virtual environment comes last on the path, so that the system's CMake serves when it is new enough.

cmake_is_new_enough() {
  local version
  version=$(cmake --version 2>/dev/null | sed -n '1s/[^0-9]*\([0-9.]*\).*/\1/p')
  [ -n "$version" ] && [ "$(printf '3.25\n%s\n' "$version" | sort -V | head -1)" = 3.25 ]
}

if cmake_is_new_enough; then
  export PATH="$PATH:$PWD/.venv/bin"
else
  export PATH="$PWD/.venv/bin:$PATH"
fi
# Objects compiled in one build folder serve the others: paths are hashed relative to the repository.
# What a source includes ccache reads from the file that the compiler writes for ninja, instead of running the preprocessor.
export CCACHE_BASEDIR="$PWD" CCACHE_NOHASHDIR=1 CCACHE_DEPEND=1

# Python modules are compiled when they are first imported, once, also where the environment says that Python writes none
# (PYTHONDONTWRITEBYTECODE, as in many containers): there every process would compile all of PyTorch that it imports, for
# ten seconds.
unset PYTHONDONTWRITEBYTECODE

# pip_install ARGUMENTS...: pip in the virtual environment. Package sources that a machine's settings name and that are not
# there make it warn once for every package; what else it says stays.
pip_install() {
  { .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@" 2>&1 >&3 |
    sed "/^WARNING: Location '.*' is ignored/d" >&2; } 3>&1
}
