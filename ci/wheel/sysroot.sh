#!/usr/bin/env bash
# Makes DIR/bin/g++: this machine's g++ with the C and C++ libraries of Debian 11 (glibc 2.31), so that what it builds runs on older systems.
#
#   bash ci/wheel/sysroot.sh [DIR]      then: CXX=DIR/bin/g++ CC=DIR/bin/g++ NVCC_CCBIN=DIR/bin/g++ python -m build
#
# Takes seconds where a container takes minutes. What a library needs in the end is read from its symbols (inspect_wheel.py), not from here.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
target=${1:-$root/build/sysroot}
SUITE=bullseye
GCC=10  # of that suite
PACKAGES="libc6 libc6-dev linux-libc-dev libstdc++6 libgcc-s1 libstdc++-$GCC-dev libgcc-$GCC-dev"
stamp="$SUITE $PACKAGES $target"

if [ "$(cat "$target/assembled" 2>/dev/null)" = "$stamp" ]; then
    echo "old libraries for g++ are in $target"
    exit 0
fi
for program in apt-get dpkg-deb g++; do
    command -v "$program" >/dev/null || { echo "error: $program is missing; build in a container instead: bash ci/wheels.sh without --no-container" >&2; exit 1; }
done
triplet=$(g++ -dumpmachine)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
. "$root/ci/private_apt.sh"
private_apt "$work/apt" deb "$SUITE main"
mkdir -p "$work"/deb "$work"/made/bin
(cd "$work/deb" && "${apt[@]}" download $PACKAGES)
for package in "$work"/deb/*.deb; do dpkg-deb -x "$package" "$work/made/root"; done
rm -rf "$work/made/root/usr/share" "$work/made/root/etc"
# Absolute links would lead to this machine's own libraries.
find "$work/made/root" -type l -lname '/*' | while read -r link; do
    ln -sfn "$(realpath -m --relative-to="$(dirname "$link")" "$work/made/root$(readlink "$link")")" "$link"
done

mkdir -p "$(dirname "$target")"
rm -rf "$target"
mv "$work/made" "$target"
cat >"$target/bin/g++" <<WRAPPER
#!/bin/sh
# Written by ci/wheel/sysroot.sh.
root="$target/root"
exec $(command -v g++) "--sysroot=\$root" -nostdinc++ -isystem "\$root/usr/include/c++/$GCC" -isystem "\$root/usr/include/$triplet/c++/$GCC" \\
    "-L\$root/usr/lib/gcc/$triplet/$GCC" "-L\$root/usr/lib/$triplet" "\$@"
WRAPPER
chmod +x "$target/bin/g++"
echo "$stamp" >"$target/assembled"
echo "old libraries for g++ are in $target ($(du -sh "$target" | cut -f1)): glibc $(basename "$target"/root/lib/"$triplet"/libc-2*.so | tr -dc '0-9.' | sed 's/^-//; s/\.$//')"
