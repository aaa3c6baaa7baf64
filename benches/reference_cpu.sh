#!/bin/sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# Speed and memory on the CPU against the reference implementation, both in one run.
#
#   benches/reference_cpu.sh PYTHON MODEL.pt water.lmp|diamond [ROUNDS]
#
# PYTHON: an interpreter that has deepmd-kit with PyTorch. Two threads each; see docs/performance.md.
set -eu
[ $# -ge 3 ] || { sed -n '4,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/.."
step=$(cargo bench --no-run --bench step --message-format=json | sed -n 's/.*"executable":"\([^"]*step[^"]*\)".*/\1/p' | tail -n 1)
[ -x "$step" ] || { echo "$0: the bench program was not built" >&2; exit 1; }
exec "$1" "$here/reference_cpu.py" --step "$step" --model "$2" --structure "$3" --rounds "${4:-5}"
