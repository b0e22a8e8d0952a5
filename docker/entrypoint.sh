#!/bin/sh
# Starts the command of an image after one look at the host's driver. It must not look at GPUs: without any, everything but they works.
#
# CUDA of major M runs on the driver branches from FIRST_DRIVER_M on. An older driver needs NVIDIA's compatibility library, which
# only the images of NVIDIA bring and which only data-centre GPUs accept. On a driver that is new enough it is never used: it would take the
# place of a newer libcuda. What is changed is LD_LIBRARY_PATH of the command, nothing else.
#
#   MAGI_IMAGE_CUDA            major version of the image, set by the Dockerfile
#   MAGI_COMPAT_FOLDER         where the compatibility library lies (default: where NVIDIA's images have it)
#   MAGI_DRIVER_VERSION_FILE   what the kernel module says (default /proc/driver/nvidia/version)
set -eu

FIRST_DRIVER_12=525
FIRST_DRIVER_13=580

say() { printf 'magi-attention image: %s\n' "$*" >&2; }

driver_version() {
  file="${MAGI_DRIVER_VERSION_FILE:-/proc/driver/nvidia/version}"
  if [ -r "$file" ]; then
    # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 ..." and, of open modules, "... Module for x86_64  580.65.06  ..."
    sed -n 's/^NVRM version:[^0-9]*[^ ]*.*[[:space:]]\([0-9]\{3,4\}\.[0-9][0-9.]*\)[[:space:]].*/\1/p' "$file" | head -n 1
  elif command -v nvidia-smi >/dev/null 2>&1; then
    nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1
  fi
}

# LD_LIBRARY_PATH without the folders of a compatibility library.
without_compat() {
  printf '%s' "${LD_LIBRARY_PATH:-}" | tr ':' '\n' | { grep -v -x -F -e "$compat" || true; } | grep -v '/compat/*$' | paste -s -d ':' - || true
}

major="${MAGI_IMAGE_CUDA:-13}"
case "$major" in
  12) first=$FIRST_DRIVER_12 ;;
  13) first=$FIRST_DRIVER_13 ;;
  *) say "MAGI_IMAGE_CUDA=$major is neither 12 nor 13; build the image with --build-arg CUDA=13"; exit 2 ;;
esac
compat="${MAGI_COMPAT_FOLDER:-/usr/local/cuda/compat}"
version="$(driver_version)"
branch="${version%%.*}"

LD_LIBRARY_PATH="$(without_compat)"
if [ -n "$branch" ] && [ "$branch" -lt "$first" ]; then
  if [ -e "$compat/libcuda.so.1" ]; then
    LD_LIBRARY_PATH="$compat${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    say "driver $version is older than $first, the first for CUDA $major: using the compatibility library of $compat (data-centre GPUs only)"
  else
    say "driver $version is older than $first, the first for CUDA $major, and $compat has no compatibility library: GPUs cannot be used;" \
      "update the driver to $first or newer, or take the image for an older CUDA"
  fi
fi
if [ -n "$LD_LIBRARY_PATH" ]; then export LD_LIBRARY_PATH; else unset LD_LIBRARY_PATH; fi

exec "$@"
