#!/usr/bin/env bash
# The package for aarch64 (case I20). On an aarch64 machine: installs wheels as a user would, imports, self-tests. Elsewhere: cross-compiles
# planner and kernels, looks at what they need, and imports them under qemu where the pieces for that can be had.
#
#   bash ci/aarch64.sh --wheel DIR                        aarch64 machine; DIR holds the wheels (bash ci/wheels.sh --cuda 13 --out DIR)
#   bash ci/aarch64.sh [--work DIR] [--variants FILTER] [--no-run]    any machine with aarch64-linux-gnu-g++ and nvcc
#
# Needs for the second: apt-get install g++-aarch64-linux-gnu qemu-user-static (and root for the emulated Debian; --no-run goes without).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
PYTHONPATH="$root/ci" exec "${PYTHON:-python3}" -m release.aarch64 "$@"
