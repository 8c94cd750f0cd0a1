#!/usr/bin/env bash
# Everything the build, the tests and the demo need: Debian packages (only those missing) and a virtual environment.
# Safe to run twice; the second run takes a moment. `make setup` calls it.
#
#   tools/setup.sh            all of it
#   tools/setup.sh packages   Debian packages alone
#   tools/setup.sh python     the virtual environment alone
#
# PYTHON=python3.12 chooses the interpreter of the virtual environment (3.10 or later).
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/environment.sh

fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }
say() { printf 'setup: %s\n' "$*"; }

read_list() { sed -e 's/#.*//' -e 's/[[:space:]]//g' -e '/^$/d' "$1"; }

missing_packages() {
  local line package
  while read -r line; do
    package=${line#\?}
    [ "$(dpkg-query -W -f='${db:Status-Status}\n' "$package" 2>/dev/null | head -1)" = installed ] && continue
    [ "$line" = "$package" ] || apt-cache show "$package" >/dev/null 2>&1 || continue
    echo "$package"
  done < <(read_list requirements/debian.txt)
}

install_packages() {
  command -v dpkg-query >/dev/null ||
    fail "this is no Debian or Ubuntu; install what requirements/debian.txt lists, then run tools/setup.sh python"
  local missing
  missing=$(missing_packages | tr '\n' ' ')
  [ -n "${missing// /}" ] || { say "Debian packages: all present"; return; }
  say "Debian packages to install: $missing"
  local root=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null ||
      fail "not root and no sudo; as root run: apt-get install $missing"
    root=(sudo)
  fi
  "${root[@]}" apt-get update -qq || say "apt-get update failed; trying with the package lists at hand"
  # shellcheck disable=SC2086  # one word per package
  "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null ||
    fail "apt-get could not install: $missing"
}

# The first interpreter that is 3.10 or later and can make virtual environments.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10 /usr/bin/python3}; do
    "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null &&
      { echo "$candidate"; return; }
  done
  fail "no Python 3.10 or later with the venv module found (tried ${PYTHON:-python3 and python3.10 to 3.13})"
}

install_python() {
  local stamp=.setup/python list wanted
  list=(requirements/build.txt requirements/python.txt requirements/checks.txt)
  wanted=$(cat "${list[@]}" | sha256sum | cut -d' ' -f1)
  if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    say "virtual environment: up to date"
    return
  fi
  if ! .venv/bin/python -c '' 2>/dev/null; then
    local python
    python=$(find_python)
    say "virtual environment: .venv with $("$python" --version)"
    rm -rf .venv
    "$python" -m venv .venv
  fi
  say "Python packages of ${list[*]} (the first time a few minutes: PyTorch is large)"
  # Of 11,000 modules a quarter is ever imported: to compile all, as pip does, takes it more than half of its time. What
  # PyTorch always imports is compiled now, for processes that may write none (tools/environment.sh).
  pip_install --no-compile "${list[@]/#/-r}" ||
    fail "pip could not install the packages of ${list[*]}; is the network reachable?"
  .venv/bin/python -c 'import torch' || fail "PyTorch is installed and cannot be imported: above is why"
  # Debian 12 and Ubuntu 24.04 have a CMake that is new enough; elsewhere the virtual environment gets one.
  cmake_is_new_enough || pip_install 'cmake>=3.25,<5' ||
    fail "CMake 3.25 or later is needed and could not be installed"
  mkdir -p .setup
  echo "$wanted" >"$stamp"
}

case "${1:-all}" in
  packages) install_packages ;;
  python) install_python ;;
  all) install_packages; install_python ;;
  *) fail "expected packages, python or nothing, got \"$1\"" ;;
esac
