#!/usr/bin/env bash
# Builds libsezm.a and build/lammps_plugin/sezmplugin.so for the LAMMPS of scripts/setup_lammps.sh.
# Prints the path of the plugin on standard output and what it does on standard error.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "build_plugin: $*" >&2; }
die() { say "error: $*"; exit 1; }

export PATH="$PATH:$HOME/.cargo/bin"
command -v cargo >/dev/null || die "no cargo: install Rust from https://rustup.rs"
command -v c++ >/dev/null || command -v g++ >/dev/null || die "no C++ compiler (Debian: apt install g++)"

venv=$(./scripts/setup_lammps.sh)
build="$PWD/build/lammps_plugin"

say "building the library and the plugin (the first time takes a few minutes)"
"$venv/bin/cmake" -S lammps_plugin -B "$build" -G Ninja -DCMAKE_MAKE_PROGRAM="$venv/bin/ninja" \
  -DLAMMPS_PYTHON="$venv/bin/python" >&2 || die "cmake could not configure the plugin"
"$venv/bin/cmake" --build "$build" >&2 || die "the build failed"
say "built $build/sezmplugin.so"
echo "$build/sezmplugin.so"
