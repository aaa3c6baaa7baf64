#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Times sezm and the reference implementation in turns, on the same structure and the same cores.

  reference_cpu.py --step target/release/step --model MODEL.pt --structure water.lmp|diamond [--rounds 5]

Runs under a Python that has deepmd-kit (its PyTorch back end). Reference: eager, CPU, f32, energy + forces + virial,
neighbour list included, as its `model(coord, atype, box)` call does; sezm: the `step` bench program, which reports the
step with its neighbour list too. Each round times one side, then the other. Prints the median of each side, their
ratio, and each side's peak memory (VmHWM of its own process).
"""
import argparse
import copy
import json
import logging
import os
import statistics
import subprocess
import sys
import time
import warnings

import numpy as np


def read_lammps(path):
    """Elements, positions and cell of an orthogonal LAMMPS data file with types O, H."""
    lengths, atoms, in_atoms = [], [], False
    for line in open(path):
        words = line.split()
        if words[2:3] in (["xlo"], ["ylo"], ["zlo"]):
            lengths.append(float(words[1]) - float(words[0]))
        if words[:1] == ["Atoms"]:
            in_atoms = True
        elif in_atoms and len(words) == 5:
            atoms.append((int(words[0]), int(words[1]) - 1, *map(float, words[2:])))
    atoms.sort()
    return ["OH"[a[1]] for a in atoms], np.array([a[2:] for a in atoms]), np.diag(lengths)


def diamond(n=(2, 2, 3), a=3.567, sigma=0.02):
    """Diamond with n cells and a little disorder: 96 atoms."""
    base = np.array([[0, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]])
    base = np.vstack([base, base + 0.25])
    corners = [(i, j, k) for i in range(n[0]) for j in range(n[1]) for k in range(n[2])]
    positions = np.array([(b + c) * a for c in corners for b in base])
    noise = np.random.default_rng(0).normal(0, sigma, positions.shape)
    return ["C"] * len(positions), positions + noise, np.diag(np.array(n) * a)


def peak_memory():
    """VmHWM of this process, MB."""
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def reference(model_file, structure):
    """Server on stdin/stdout: for each line read, one timed evaluation; on 'end' the peak memory."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import torch
    from deepmd.pt.model.model import get_model

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    state = torch.load(model_file, map_location="cpu", weights_only=True)
    state = state.get("model", state)
    parameters = copy.deepcopy(state["_extra_state"]["model_params"])
    for net in ("descriptor", "fitting_net"):
        parameters.setdefault(net, {})["precision"] = "float32"
    model = get_model(parameters)
    prefix = "model.Default."
    model.load_state_dict({k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)})
    model.eval()
    elements, positions, cell = structure
    types = torch.tensor([[parameters["type_map"].index(e) for e in elements]])
    coordinates = torch.tensor(positions[None], dtype=torch.float64)
    box = torch.tensor(cell.reshape(1, 9), dtype=torch.float64)
    for line in sys.stdin:
        if line.strip() == "end":
            break
        start = time.perf_counter()
        out = model(coordinates, types, box=box)
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "energy": float(out["energy"])}), flush=True)
    print(json.dumps({"peak_mb": peak_memory()}), flush=True)


class Side:
    """A process that evaluates once for each line it is sent."""

    def __init__(self, command, environment):
        self.process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit(f"{self.process.args[0]} stopped with status {self.process.wait()}")
        return json.loads(answer)


def write_xyz(path, structure):
    elements, positions, cell = structure
    lattice = " ".join(repr(float(x)) for x in cell.ravel())
    with open(path, "w") as out:
        print(len(elements), file=out)
        print(f'Lattice="{lattice}" Properties=species:S:1:pos:R:3 pbc="T T T"', file=out)
        for element, xyz in zip(elements, positions):
            print(element, *(repr(float(x)) for x in xyz), file=out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--structure", required=True, help="LAMMPS data file of water, or the word diamond")
    parser.add_argument("--step", help="the sezm bench program")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args()
    structure = diamond() if a.structure == "diamond" else read_lammps(a.structure)
    if a.serve:
        return reference(a.model, structure)
    if not a.step:
        parser.error("--step is needed")
    environment = dict(os.environ, OMP_NUM_THREADS=str(a.threads), RAYON_NUM_THREADS=str(a.threads))
    xyz = f"{a.step}.{os.getpid()}.xyz"
    write_xyz(xyz, structure)
    sides = {
        "reference": Side(
            [sys.executable, __file__, "--serve", "--model", a.model, "--structure", a.structure], environment
        ),
        "sezm": Side([a.step, a.model, xyz], environment),
    }
    times = {name: [] for name in sides}
    energies = {}
    for round_number in range(a.rounds + 1):
        for name, side in sides.items():
            answer = side.ask("go")
            energies[name] = answer["energy"]
            if round_number > 0:  # the first one warms up
                times[name].append(answer["seconds"])
    peak = {name: side.ask("end")["peak_mb"] for name, side in sides.items()}
    os.remove(xyz)
    if abs(energies["sezm"] - energies["reference"]) > 1e-4 * max(1.0, abs(energies["reference"])):
        sys.exit(f"the two sides do not evaluate the same thing: energies {energies}")
    median = {name: statistics.median(t) for name, t in times.items()}
    print(f"{os.path.basename(a.model)}, {len(structure[0])} atoms, f32, {a.threads} threads, {a.rounds} rounds")
    for name in sides:
        print(f"  {name:10} median {median[name]:.4f} s  least {min(times[name]):.4f} s  peak {peak[name]:.0f} MB")
    ratios = [r / s for r, s in zip(times["reference"], times["sezm"])]
    print(
        f"  speed x{median['reference'] / median['sezm']:.2f} (medians; round by round {min(ratios):.2f} to "
        f"{max(ratios):.2f}), memory 1/{peak['reference'] / peak['sezm']:.0f}"
    )


if __name__ == "__main__":
    main()
