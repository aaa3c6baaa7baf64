#!/usr/bin/env python3
"""Compares the energies in a log of in.nve with those of the reference implementation.

    check.py LOG [--tolerance 1e-6]

Prints one line, `OK: ...` or `FAILED: ...`, and exits with 0 or 1.
"""
import argparse
import csv
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
# Beyond it, chaos makes rounding errors visible: no two programs agree on the far future of a trajectory.
LAST_STEP = 100


def thermo_rows(path):
    """The rows of every thermo table in a LAMMPS log: {step: {column: value}}."""
    rows, columns = {}, None
    with open(path) as log:
        for line in log:
            words = line.split()
            if words[:1] == ["Step"]:
                columns = words
            elif line.startswith("Loop time"):
                columns = None
            elif columns and len(words) == len(columns) and words[0].isdigit():
                rows[int(words[0])] = dict(zip(columns, map(float, words)))
    return rows


def reference_rows(path):
    """The rows of the reference: {step: {column: value}}."""
    with open(path) as table:
        return {int(row["# step"]): {k: float(v) for k, v in row.items()} for row in csv.DictReader(table)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("log")
    parser.add_argument("--tolerance", type=float, default=1e-6, help="eV")
    arguments = parser.parse_args()

    ours = thermo_rows(arguments.log)
    reference = reference_rows(os.path.join(HERE, "reference.nve.csv"))
    steps = [step for step in reference if step <= LAST_STEP]
    missing = [step for step in steps if step not in ours]
    if missing:
        print(f"FAILED: {arguments.log} has no thermo output for step {missing[0]}: did the run end early?")
        return 1

    worst = max(
        abs(ours[step][column] - reference[step][name])
        for step in steps
        for column, name in (("PotEng", "pe"), ("TotEng", "etotal"))
    )
    good = worst <= arguments.tolerance  # false for NaN
    print(
        f"{'OK' if good else 'FAILED'}: potential and total energy of {len(steps)} thermo lines, steps 0 to {LAST_STEP}: "
        f"{'the same 12 digits as' if worst == 0 else f'at most {worst:.1e} eV from'} the reference implementation's"
        f" (allowed: {arguments.tolerance:.0e} eV)"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
