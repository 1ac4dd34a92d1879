#!/usr/bin/env bash
# Installs the Debian packages that dsacore needs, where any is missing. As root or through sudo; without either it prints
# what to install and ends with 1. `--ci` adds what continuous integration needs (Clang 16, formatter, linter, Python).
set -euo pipefail

packages=(g++ cmake ninja-build git ca-certificates libhwy-dev libtbb-dev libcli11-dev libfmt-dev nlohmann-json3-dev libgtest-dev libbenchmark-dev)
if [ "${1:-}" = --ci ]; then
  packages+=(clang-16 clang-format-16 clang-tidy-16 libclang-rt-16-dev python3 python3-venv)
fi

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -eq 0 ]; then
  as_root=()
elif command -v sudo >/dev/null; then
  as_root=(sudo)
else
  echo "These packages are missing, and neither root nor sudo is at hand. Install them with" >&2
  echo "  apt-get install ${missing[*]}" >&2
  exit 1
fi
echo "Installing: ${missing[*]}"
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
