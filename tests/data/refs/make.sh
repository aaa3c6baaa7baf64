#!/usr/bin/env bash
# Makes reference values with the reference implementation (make.py says which).
#
#   tests/data/refs/make.sh small tests/data/refs     what is committed; names after the folder choose some
#   tests/data/refs/make.sh full DIR                  full-size models; test them with SEZM_REFS_EXTRA=DIR
#   tests/data/refs/make.sh water tests/data/refs     values of models/water-smoke.pt of the reference data
#
# SEZM_REF_PYTHON: a Python with deepmd-kit 3.2.0. SEZM_SHARED: the reference data (default ../shared beside the checkout).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
shared=${SEZM_SHARED:-$here/../../../../shared}
[ -f "$shared/reference/make_ref.py" ] || { echo "make: error: no reference/make_ref.py in $shared; set SEZM_SHARED" >&2; exit 1; }
export SEZM_SHARED="$shared" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "${SEZM_REF_PYTHON:-python3}" "$here/make.py" "$@"
