#!/usr/bin/env bash
# Makes FOLDER a CUDA toolkit of one major version inside an image: that of the base image, or one of packages. Needs PYTHON with pip.
#
#   bash toolkit.sh 13 /opt/cuda
set -euo pipefail
major=$1 target=$2
here=$(cd "$(dirname "$0")" && pwd)

for nvcc in "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" /usr/local/cuda-"$major"*/bin/nvcc; do
  if [ -x "$nvcc" ] && "$nvcc" --version | grep -q "release $major\."; then
    ln -s "$(dirname "$(dirname "$(readlink -f "$nvcc")")")" "$target"
    echo "toolkit of the base image: $("$nvcc" --version | grep release)"
    exit 0
  fi
done

case "$major" in
  13)
    packages="nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime nvidia-cuda-cccl"
    wanted=""
    for package in $packages; do wanted="$wanted $package==13.0.*"; done
    # shellcheck disable=SC2086
    "$PYTHON" -m pip install --no-cache-dir -q --progress-bar off --no-deps --target /opt/cuda-packages $wanted
    ln -s /opt/cuda-packages/nvidia/cu13 "$target"
    ;;
  12)
    PYTHON="$PYTHON" bash "$here/cuda12.sh" "$target"
    ;;
  *)
    echo "error: there are kernels for CUDA 12 and 13, not for $major; build with --build-arg CUDA=13" >&2
    exit 1
    ;;
esac
"$target/bin/nvcc" --version | grep release
