#!/usr/bin/env bash
# Puts a CUDA 12 toolkit that can compile the kernels into DIR (default build/cuda12), from Debian's and PyPI's packages. No root, no GPU.
#
#   bash ci/cuda12.sh [DIR]      then: CUDA_HOME=DIR make kernels
#
# Front end: nvcc 12.5 of Debian's nvidia-cuda-toolkit; neither PyPI nor Debian has a newer one of CUDA 12. Assembler: ptxas 12.9 of PyPI's
# nvidia-cuda-nvcc-cu12, since ptxas 12.5 serialises the wgmma of every variant (C7515, C7518) and spills in two, and 12.6 and 12.8 serialise
# those of the forward kernels for 128. A machine with NVIDIA's own toolkit 12.9 or newer needs none of this: point CUDA_HOME there.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
target=${1:-$(dirname "$here")/build/cuda12}
PYTHON=${PYTHON:-python3}
DEBIAN_SUITE=experimental
TOOLKIT=nvidia-cuda-toolkit
TOOLKIT_VERSION='12.5*'
PTXAS=nvidia-cuda-nvcc-cu12==12.9.86
RUNTIME=nvidia-cuda-runtime-cu12==12.9.79
HEADERS="nvidia-cuda-runtime-cu12==12.5.82 nvidia-cuda-nvcc-cu12==12.5.82 nvidia-cuda-cccl-cu12==12.5.39.post1"
# Changes when this file would make another toolkit.
stamp="$TOOLKIT $TOOLKIT_VERSION $PTXAS $RUNTIME $HEADERS"

if [ "$(cat "$target/assembled" 2>/dev/null)" = "$stamp" ]; then
    echo "CUDA 12 toolkit is in $target"
    exit 0
fi
for program in apt-get dpkg-deb "$PYTHON"; do
    command -v "$program" >/dev/null || { echo "error: $program is missing; on a system without Debian's packages install NVIDIA's CUDA 12.9 or newer and set CUDA_HOME" >&2; exit 1; }
done
[ "$(uname -m)" = x86_64 ] || { echo "error: this assembles an x86_64 toolkit; on $(uname -m) install NVIDIA's CUDA 12.9 or newer and set CUDA_HOME" >&2; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

. "$here/private_apt.sh"
private_apt "$work/apt" deb "$DEBIAN_SUITE non-free" -o APT::Architecture=amd64
mkdir deb
(cd deb && "${apt[@]}" download "$TOOLKIT=$TOOLKIT_VERSION" && dpkg-deb -x "$TOOLKIT"_*.deb x)

get() { # FOLDER REQUIREMENT: the unpacked wheel
    PIP_CONSTRAINT=/dev/null "$PYTHON" -m pip download -q --progress-bar off --no-deps --only-binary=:all: \
        --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --platform any -d "wheels/$1" "$2" 2>pip.log || { cat pip.log >&2; exit 1; }
    "$PYTHON" -m zipfile -e "wheels/$1"/*.whl "$1"
}
get ptxas "$PTXAS"
get runtime "$RUNTIME"
number=0
for requirement in $HEADERS; do
    number=$((number + 1))
    get "headers$number" "$requirement"
done

from=deb/x/usr
home=cuda
mkdir -p $home/bin/crt $home/nvvm/bin $home/nvvm/libdevice $home/include $home/lib64
cp $from/lib/nvidia-cuda-toolkit/bin/nvcc $from/bin/{cudafe++,nvlink,fatbinary,bin2c,cuobjdump,nvdisasm} $home/bin/
[ ! -e $from/bin/__nvcc_device_query ] || cp $from/bin/__nvcc_device_query $home/bin/
cp ptxas/nvidia/cuda_nvcc/bin/ptxas $home/bin/
cp $from/lib/nvidia-cuda-toolkit/bin/crt/* $home/bin/crt/
cp $from/lib/nvidia-cuda-toolkit/bin/cicc $home/nvvm/bin/
cp -L $from/lib/nvidia-cuda-toolkit/libdevice/* $home/nvvm/libdevice/
cp runtime/nvidia/cuda_runtime/lib/* $home/lib64/
ln -sf libcudart.so.12 $home/lib64/libcudart.so
for folder in headers*/nvidia/*/include; do cp -r "$folder/." $home/include/; done
find $home -name __init__.py -delete
chmod +x $home/bin/* $home/nvvm/bin/*
cat >$home/bin/nvcc.profile <<'PROFILE'
TOP                = $(_HERE_)/..
CICC_PATH          = $(TOP)/nvvm/bin
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
LD_LIBRARY_PATH   += $(TOP)/lib64:
PATH              += $(TOP)/nvvm/bin:$(_HERE_):
INCLUDES          +=  "-isystem" "$(TOP)/include" $(_SPACE_)
LIBRARIES         =+ $(_SPACE_) "-L$(TOP)/lib64"
PROFILE
echo "$stamp" >$home/assembled

rm -rf "$target"
mkdir -p "$(dirname "$target")"
mv $home "$target"
"$target/bin/nvcc" --version | tail -2 | head -1
"$target/bin/ptxas" --version | tail -2 | head -1
echo "CUDA 12 toolkit is in $target ($(du -sh "$target" | cut -f1)): CUDA_HOME=$target make kernels"
