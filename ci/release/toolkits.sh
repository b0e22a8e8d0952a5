#!/usr/bin/env bash
# Installs NVIDIA's compilers for CUDA 12.9 and 13.0 on an Ubuntu runner, x86_64 or aarch64: /usr/local/cuda-12.9 and /usr/local/cuda-13.0,
# where ci/wheels.sh looks. Root, and NVIDIA's package server must be reachable. Machines that reach PyPI and Debian only: ci/cuda12.sh.
set -euo pipefail
[ "$(id -u)" = 0 ] || { echo "error: this installs packages; run it with sudo" >&2; exit 1; }
. /etc/os-release
[ "${ID:-}" = ubuntu ] || { echo "error: NVIDIA's packages here are those for Ubuntu, and this is ${PRETTY_NAME:-another system}; set CUDA12_HOME and CUDA13_HOME" >&2; exit 1; }
case "$(uname -m)" in
  x86_64) arch=x86_64 ;;
  aarch64) arch=sbsa ;;
  *) echo "error: NVIDIA has no toolkit for $(uname -m)" >&2; exit 1 ;;
esac

keyring=$(mktemp --suffix=.deb)
trap 'rm -f "$keyring"' EXIT
curl -fsSL --retry 3 -o "$keyring" "https://developer.download.nvidia.com/compute/cuda/repos/ubuntu${VERSION_ID/./}/$arch/cuda-keyring_1.1-1_all.deb"
dpkg -i "$keyring"
apt-get -qq update
apt-get install -qq -y --no-install-recommends cuda-nvcc-12-9 cuda-cudart-dev-12-9 cuda-cccl-12-9 cuda-cuobjdump-12-9 \
  cuda-nvcc-13-0 cuda-cudart-dev-13-0 cuda-cccl-13-0 cuda-cuobjdump-13-0
for home in /usr/local/cuda-12.9 /usr/local/cuda-13.0; do "$home/bin/nvcc" --version | grep release; done
