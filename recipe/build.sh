#!/usr/bin/env bash
# Builds the outputs of recipe.yaml with the project's own setup.py: the compiled part, or everything else.
# It must not know where compilers lie: the build environment brings them, CUDA_HOME and PATH name them.
set -euo pipefail

# The copied sources have no git history; the version is the package's, said the way a source distribution says it.
if [ ! -e .git ] && [ ! -e PKG-INFO ]; then
  printf 'Metadata-Version: 2.1\nName: magi-attention\nVersion: %s\n' "$PKG_VERSION" >PKG-INFO
  printf '"""Written by the build."""\n__version__ = "%s"\n' "$PKG_VERSION" >magi_attention/_version.py
fi

# This toolkit and no other: another one that lies around would give kernels of another CUDA.
export MAGI_BUILD_CUDA="${CUDA_HOME:-$BUILD_PREFIX}"

install_project() { "$PYTHON" -m pip install . -v --no-deps --no-build-isolation --no-index; }

case "$PKG_NAME" in
  libmagi-attention)
    MAGI_BUILD_KERNELS=1 install_project
    package="$SP_DIR/magi_attention"
    find "$package" -type f ! -name '*.so' ! -name _build.json -delete
    find "$package" -type d -empty -delete
    rm -rf "$SP_DIR"/magi_attention-*.dist-info
    ;;
  magi-attention)
    # What libmagi-attention put into the package's folder stays its own. Its planner, where setuptools looks for the one that it would
    # compile, is newer than every source, so nothing is compiled twice.
    printf '[build]\nbuild_lib = build/lib\n' >setup.cfg
    install -D "$SP_DIR/magi_attention/_solver.so" build/lib/magi_attention/_solver.so
    MAGI_BUILD_KERNELS=0 install_project
    ;;
  *)
    echo "error: build.sh knows no output $PKG_NAME; recipe.yaml has libmagi-attention and magi-attention" >&2
    exit 1
    ;;
esac
