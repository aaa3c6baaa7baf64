#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Writes cuau.ref: what the reference implementation says of two small structures, in double precision.

  python make_reference.py MODEL.pt > cuau.ref      (needs deepmd-kit with PyTorch, and make_ref.py of the reference data)

Format, one value list a line: `frame NAME N PERIODIC`, `cell` (9), `energy`, `virial` (9), then a line an atom:
type, position (3), energy, force (3), virial (9). Units: Å, eV, eV/Å.
"""
import os
import sys

sys.path.insert(0, os.path.join(os.environ.get("SEZM_SHARED", "../shared"), "reference"))
import numpy as np
import torch
from make_ref import evaluate, load


def structures():
    """A sheared cell that is smaller than the cutoff, and a cluster in free space."""
    cell = np.array([[3.9, 0.0, 0.0], [0.5, 4.0, 0.0], [-0.4, 0.3, 3.8]])
    fractional = np.array([[0.02, 0.01, 0.03], [0.52, 0.49, 0.01], [0.47, 0.02, 0.51], [-0.02, 0.53, 0.48]])
    yield "cell", ["Cu", "Au", "Cu", "Au"], fractional @ cell, cell
    positions = np.array([[0.0, 0.0, 0.0], [2.5, 0.1, -0.2], [1.1, 2.4, 0.3], [0.9, 0.8, 2.2], [-3.1, 1.0, 4.0]])
    yield "cluster", ["Au", "Cu", "Cu", "Au", "Cu"], positions, None


def numbers(values):
    return " ".join(repr(float(v)) for v in np.ravel(values))


state = torch.load(sys.argv[1], map_location="cpu", weights_only=True)
state = state.get("model", state)
params = state["_extra_state"]["model_params"]
model = load(params, state, "float64")
print(f"# {os.path.basename(sys.argv[1])} by the reference implementation in double precision: see make_reference.py")
for name, elements, positions, cell in structures():
    answer, types = evaluate(model, list(params["type_map"]), (elements, positions, cell))
    print("frame", name, len(types), int(cell is not None))
    print("cell", numbers(np.zeros(9) if cell is None else cell))
    print("energy", numbers(answer["energy"]))
    print("virial", numbers(answer["virial"]))
    for i, kind in enumerate(types):
        per_atom = (positions[i], answer["atom_energy"][i], answer["force"][i], answer["atom_virial"][i])
        print(kind, " ".join(map(numbers, per_atom)))
