#!/usr/bin/env bash
# Makes the image that ci/wheels.sh builds in, where no registry can be reached: Debian 11 by debootstrap, CPython from Debian's source.
#
#   bash docker/manylinux/make_image.sh [NAME]      about 5 minutes once, as root; needs debootstrap, buildah and podman
#
# The base stays as localhost/magi-debian:bullseye, so that a second run takes only what changed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
name=${1:-localhost/magi-manylinux_$(uname -m):local}
base=localhost/magi-debian:bullseye
export CONTAINERS_CONF=${CONTAINERS_CONF:-$here/containers.conf}
certificates=/etc/ssl/certs/ca-certificates.crt

for program in debootstrap buildah podman runc; do
    command -v $program >/dev/null || { echo "error: $program is missing: apt-get install -y --no-install-recommends debootstrap podman buildah runc netavark aardvark-dns" >&2; exit 1; }
done
. "$here/../../ci/private_apt.sh"
mirror=$(debian_mirror)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if ! podman image exists $base; then
    echo "debootstrap of Debian 11 from $mirror"
    debootstrap --variant=minbase --include=ca-certificates bullseye "$work/root" "$mirror" >"$work/log" || { tail "$work/log" >&2; exit 1; }
    rm -rf "$work"/root/var/cache/apt/archives/*.deb "$work"/root/var/lib/apt/lists/*
    tar -C "$work/root" -cf - . | podman import -q - $base
    rm -rf "$work/root"
fi

# The source of CPython 3.11 is bookworm's.
private_apt "$work/apt" deb-src "bookworm main"
mkdir "$work/context"
(cd "$work/context" && "${apt[@]}" source --download-only python3.11 && mv python3.11_*.orig.tar.* python.tar.xz && rm -f python3.11_*)
cp "$here/Dockerfile" "$work/context/"

mounts=()
if [ -f $certificates ]; then # an index with a certificate of its own
    printf '[global]\ncert = %s\n' $certificates >"$work/pip.conf"
    mounts=(-v "$certificates:$certificates:ro" -v "$work/pip.conf:/etc/pip.conf:ro")
fi
buildah bud --layers --isolation=chroot --network=host "${mounts[@]}" --build-arg BASE_IMAGE=$base -t "$name" "$work/context"
echo "made $name"
