#!/usr/bin/env bash
# Builds, checks and labels the wheels that are published.
#
#   bash ci/wheels.sh [--no-container] [--out DIR] [--cuda 12|13|both] [--torch 2.N ...] [--variants FILTER] [--index URL]
#
# DIR/*.whl            one wheel for every torch, with the kernels of each CUDA major (DIR is dist/ when not given)
# DIR/whl/<label>/     the same libraries for one torch each, and the pages that pip --index-url reads
#
# Built by cibuildwheel in a container (docker/manylinux), or with --no-container by this machine's g++ with the libraries of Debian 11.
# Both end in the same checks: what counts is what the symbols in the files say. No GPU is needed; nvcc is, see ci/wheel/README.md.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
PYTHON=${PYTHON:-python3}
venv=$root/build/wheel-tools

if ! cmp -s "$root/ci/wheel/requirements.txt" "$venv/installed" 2>/dev/null; then
    rm -rf "$venv"
    "$PYTHON" -m venv "$venv"
    PIP_CONSTRAINT=/dev/null "$venv/bin/python" -m pip install -q --progress-bar off -r "$root/ci/wheel/requirements.txt"
    cp "$root/ci/wheel/requirements.txt" "$venv/installed"
fi
PATH=$venv/bin:$PATH exec "$venv/bin/python" "$root/ci/wheel/make_wheels.py" "$@"
