#!/usr/bin/env bash
# Builds docker/Dockerfile for CUDA 12 and 13 on this machine, runs the images without network, volume and GPU, checks them and removes them.
# Without a registry the base is a Debian made by debootstrap (root, about a minute, kept in build/images); `--help` lists options.
# Nothing is published from here: .github/workflows/release.yml builds on NVIDIA's images.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHONPATH=ci exec "${PYTHON:-python3}" -m images "$@"
