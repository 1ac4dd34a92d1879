#!/usr/bin/env bash
# The README's two commands on a Debian 12 with nothing installed: a debootstrap folder, entered by chroot. Needs root, debootstrap
# and a Debian mirror: ci/fresh-debian.sh FOLDER [MIRROR]. Takes about 20 minutes on two cores; the log is for bench/results.
set -euo pipefail
cd "$(dirname "$0")/.."
root=${1:?usage: ci/fresh-debian.sh FOLDER [MIRROR]}
mirror=${2:-http://deb.debian.org/debian}

[ -d "$root/bin" ] || debootstrap --variant=minbase bookworm "$root" "$mirror"
# What lets the guest reach the same mirror in the same way as this machine.
for file in /etc/resolv.conf /etc/hosts /etc/ssl/certs/ca-certificates.crt; do
  [ -e "$file" ] && install -D -m 644 "$file" "$root$file"
done
if [ -d /etc/apt/apt.conf.d ]; then cp /etc/apt/apt.conf.d/* "$root/etc/apt/apt.conf.d/"; fi

cleanup() { umount "$root/proc" "$root/dev" 2>/dev/null || true; }
trap cleanup EXIT
mkdir -p "$root/proc" "$root/dev"
mount -t proc proc "$root/proc"
mount --bind /dev "$root/dev"

rm -rf "$root/src"
git clone --quiet . "$root/src"
for script in demo test; do
  echo "===== scripts/$script.sh"
  start=$SECONDS
  env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb chroot "$root" /src/scripts/$script.sh
  echo "===== scripts/$script.sh: $((SECONDS - start)) s"
done
