# Front of the build: a few named targets. `make help` lists them.
# Every target that needs tools, libraries or Python packages sets them up first; a second run finds them in place.

SHELL := /bin/bash
RUN := . tools/environment.sh &&
PREFIX ?= /usr/local

.DEFAULT_GOAL := help
.PHONY: help setup build package test check demo format tidy fuzz plots install clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 18

setup:  ## install the Debian and Python packages that are missing
	@tools/setup.sh

build: setup  ## the library and the command-line program, in build/release
	@$(RUN) cmake --preset release -DDSPATTN_CUDA=ON -DDSPATTN_GPU_CODE=all && cmake --build --preset release --target dspattn dspattn_cli

package: setup  ## the Python package, built and installed into .venv
	@tools/install_package.sh

demo: setup  ## two real models with dense, 2:4 and 1:2 attention: a table and pictures in out/demo
	@tools/install_package.sh here
	@.venv/bin/python -m dspattn.demo $(DEMO)

test: setup  ## build everything, run the C++, command-line and Python tests; STEPS="build unit" runs some steps
	@tools/test.sh $(or $(STEPS),test)

check: setup  ## for contributors: format, lint, clang-tidy, sanitizers, fuzzers, the emulated GPU, long tests, every family of transformers; STEPS too
	@tools/test.sh $(or $(STEPS),check families)

format: setup  ## rewrite the C++ and CUDA sources in the project's format
	@tools/format.sh --fix

tidy: setup  ## clang-tidy on the C++ sources
	@tools/test.sh tidy

fuzz: setup  ## run the fuzzers; SECONDS_EACH=600 for longer
	@tools/test.sh fuzz

plots: setup  ## redraw the pictures and tables of docs/ from the committed measurements
	@.venv/bin/python experiments/quality/plot.py && .venv/bin/python experiments/quality/tables.py
	@! test -e experiments/quality/results/gpu || .venv/bin/python experiments/quality/gpu_figures.py
	@.venv/bin/python -m experiments.theory plots
	@.venv/bin/python -m bench.pipeline.plot && .venv/bin/python -m bench.pipeline.tables
	@.venv/bin/python -m bench.forward.plot bench/results/forward_h200.json docs/images/forward_h200.png
	@.venv/bin/python -m bench.forward.tables && .venv/bin/python -m bench.forward.fp32_table
	@.venv/bin/python -m bench.forward.contention --table
	@.venv/bin/python -m bench.clients.flux_table
	@.venv/bin/python experiments/parallel/simulate.py --write

install: build  ## install the library and the program into PREFIX (default /usr/local)
	@$(RUN) cmake --install build/release --prefix $(PREFIX)

clean:  ## remove what was built; the virtual environment stays
	rm -rf build
