#!/usr/bin/env python3
"""Makes the small .pt files of this folder, expected.json (the values that torch reads from them) and shared.json
(digests of the reference checkpoints of $SEZM_SHARED, where they are there).

    python make.py            (torch 2.11; the committed files were made with it)

Every file is written by torch.save, so that the reader is tested against torch and not against itself. `tiny.pt` is a
whole model of the reference implementation and needs deepmd-kit 3.2.0; it is left as it is where that is missing.
"""
import copy
import glob
import hashlib
import json
import os
import random
from collections import OrderedDict

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
PREFIX = "model.Default."
PARAMS = {"type": "dpa4", "type_map": ["O", "H"], "descriptor": {"type": "dpa4", "channels": 4}, "fitting_net": {}}
EXPECTED = {}


def tensor(*shape, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)


def state(tensors, params=PARAMS):
    out = OrderedDict((name, value) for name, value in tensors.items())
    out["_extra_state"] = {"model_params": copy.deepcopy(params), "train_infos": {"lr": 1e-3, "step": 100}}
    return out


def default(tensors):
    return {PREFIX + name: value for name, value in tensors.items()}


def save(name, root, expect=None, **options):
    torch.save(root, os.path.join(HERE, name), **options)
    if expect is not None:
        EXPECTED[name] = {
            key: {"shape": list(t.shape), "data": t.detach().to(torch.float64).flatten().tolist()}
            for key, t in expect.items()
        }


def dtypes():
    t = {
        "f64": tensor(3, 2, seed=1, dtype=torch.float64),
        "f32": tensor(3, 2, seed=2),
        "f16": tensor(3, 2, seed=3, dtype=torch.float16),
        "bf16": tensor(3, 2, seed=4, dtype=torch.bfloat16),
        "f16_subnormal": torch.tensor([6e-8, -6e-8, 65504.0, -0.0], dtype=torch.float16),
        "f32_extreme": torch.tensor([1e-45, 3.4028235e38, -1.1754944e-38], dtype=torch.float32),
        "f64_extreme": torch.tensor([5e-324, 1.7976931348623157e308, 0.1], dtype=torch.float64),
        "i64": torch.tensor([-(2**53), 2**53, -1, 0], dtype=torch.int64),
        "i32": torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32),
        "i16": torch.tensor([-(2**15), 2**15 - 1], dtype=torch.int16),
        "i8": torch.tensor([-128, 127], dtype=torch.int8),
        "u8": torch.tensor([0, 255], dtype=torch.uint8),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(1.1, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
    }
    save("dtypes.pt", {"model": state(default(t))}, t)


def views():
    base = tensor(4, 6, seed=5)
    cube = tensor(3, 4, 5, seed=6, dtype=torch.float64)
    t = {
        "base": base,
        "transposed": base.t(),
        "rows": base[1:3],
        "columns": base[:, 2:5],
        "steps": base[::2, 1::3],
        "element": base[2, 3],
        "permuted": cube.permute(2, 0, 1),
        "inner": cube[1:, :3, 2:4],
        "last": cube[-1, -1, -1:],
        "squeezed": cube[:, 1:2, :].transpose(0, 2),
        "parameter": torch.nn.Parameter(tensor(2, 3, seed=7)),
        "parameter_view": torch.nn.Parameter(base)[1],
    }
    t["parameter_view"] = t["parameter_view"].detach()
    save("views.pt", {"model": state(default(t))}, t)


def roots():
    t = {"a.weight": tensor(2, 2, seed=8)}
    save("bare.pt", state(default(t)), t)
    # torch names the archive after the file; see archive.rs for what a name of 21 characters did.
    save("name_of_21_characters.pt", state(default(t)), t)
    # As a training with optimiser and moving average leaves it: other dictionaries stand beside the model.
    weight = torch.nn.Parameter(tensor(2, 2, seed=8))
    optimizer = torch.optim.AdamW([weight], lr=1e-3)
    (weight.sum() ** 2).backward()
    optimizer.step()
    ema = {"decay": 0.999, "model": state(default({"a.weight": tensor(2, 2, seed=9)}))}
    t = {"a.weight": weight.detach()}
    root = {"optimizer": optimizer.state_dict(), "ema": ema, "model": state(default(t))}
    save("training.pt", root, t)


def versions():
    t = {"atomic_model.descriptor.version_tensor": torch.tensor(1.1)}
    save("version_11.pt", {"model": state(default(t))}, t)
    params = copy.deepcopy(PARAMS)
    params["descriptor"].update(mixing_layers=4, so2_layers=2)
    t = {"atomic_model.out_bias": tensor(1, 2, 1, seed=10, dtype=torch.float64)}
    save("version_missing_so2_layers.pt", {"model": state(default(t), params)}, t)
    params = copy.deepcopy(PARAMS)
    params["descriptor"].update(seed=2**64 - 1, rcut=0.1 + 0.2, eps=1e-7, env_exp=[7, 5], exclude_types=[[0, 1]])
    params["numbers"] = {"small": 5e-324, "large": 1.7976931348623157e308, "third": 1 / 3, "int": -(2**63), "none": None}
    save("numbers.pt", {"model": state(default(t), params)}, t)


def options():
    t = default({"a.weight": tensor(2, 2, seed=8)})
    params = copy.deepcopy(PARAMS)
    params["descriptor"].update(mlp_bias=True, layer_scale=True)
    params["bridging_method"] = "ZBL"
    save("unsupported.pt", {"model": state(t, params)})
    params = copy.deepcopy(PARAMS)
    params["descriptor"]["basis_type"] = "gaussian/fix"
    save("unknown_value.pt", {"model": state(t, params)})


def branches():
    def branch(width, alias=None):
        out = copy.deepcopy(PARAMS)
        out["descriptor"]["channels"] = width
        if alias:
            out["model_branch_alias"] = alias
        return out

    def root(model_dict, seed):
        tensors = {}
        for i, name in enumerate(model_dict):
            tensors[f"model.{name}.a.weight"] = tensor(2, 2, seed=seed + i)
        return {"model": state(tensors, {"model_dict": model_dict, "shared_dict": {"type_map_all": ["O", "H"]}})}

    models = {"Omat24": branch(8, ["materials", "Bulk"]), "SPICE": branch(16, ["molecules"]), "bulk": branch(32)}
    save("branches.pt", root(models, 20))
    EXPECTED["branches.pt"] = {
        name: {"shape": [2, 2], "data": tensor(2, 2, seed=20 + i).double().flatten().tolist()}
        for i, name in enumerate(models)
    }
    models = {"first": branch(8), "second": branch(16, ["Default"])}
    save("branches_default.pt", root(models, 30))


def lora():
    degrees, inputs, outputs, rank = 3, 4, 5, 2
    weights, folded = {}, {}
    for name, scaling in (("scaled", 0.5), ("unscaled", None)):
        w = tensor(degrees, inputs, outputs, seed=40, dtype=torch.float64)
        a, b = (tensor(degrees, rank, inputs, seed=41, dtype=torch.float64), tensor(degrees, outputs, rank, seed=42, dtype=torch.float64))
        s = 1.0 if scaling is None else scaling
        so3, so2 = f"{name}.so3_linear_1", f"{name}.so2_linears.0"
        weights.update({f"{so3}.weight": w, f"{so3}.A_by_l": a, f"{so3}.B_by_l": b})
        folded[f"{so3}.weight"] = w + s * torch.einsum("lor,lri->lio", b, a)
        for leaf, factor, n, m, seed in (("weight_m0", "m0", 6, 3, 43), ("weight_m.0", "m.0", 4, 8, 46), ("weight_m.1", "m.1", 2, 4, 49)):
            w = tensor(n, m, seed=seed, dtype=torch.float64)
            a = tensor(rank, n, seed=seed + 1, dtype=torch.float64)
            b = tensor(m, rank, seed=seed + 2, dtype=torch.float64)
            weights.update({f"{so2}.{leaf}": w, f"{so2}.A_{factor}": a, f"{so2}.B_{factor}": b})
            folded[f"{so2}.{leaf}"] = w + s * torch.einsum("ri,or->io", a, b)
        if scaling is not None:
            for module in (so3, so2):
                weights[f"{module}.lora_scaling"] = torch.tensor(scaling)
        weights[f"{name}.bias"] = folded[f"{name}.bias"] = tensor(3, seed=52)
    save("lora.pt", {"model": state(default(weights))}, folded)
    lone = {"x.weight": weights["scaled.so3_linear_1.weight"], "x.A_by_l": weights["scaled.so3_linear_1.A_by_l"]}
    save("lora_lone_factor.pt", {"model": state(default(lone))})
    lone["x.B_by_l"] = tensor(degrees, outputs + 1, rank, seed=53)
    save("lora_wrong_shape.pt", {"model": state(default(lone))})


class Command:
    """Pickles as a call of os.system, the classic attack."""

    def __reduce__(self):
        return (os.system, ("touch pwned",))


def bad():
    t = default({"a.weight": tensor(2, 2, seed=8)})
    save("bad_command.pt", {"model": state(t), "payload": Command()})
    save("bad_class.pt", {"model": state(t), "generator": random.Random(1)})
    save("bad_legacy.pt", {"model": state(t)}, _use_new_zipfile_serialization=False)
    save("bad_no_params.pt", {"model": OrderedDict(t)})
    save("bad_no_tensors.pt", {"model": state({"model.Other.a": tensor(1)})})
    save("bad_not_a_dict.pt", [1, 2, 3])
    for name, value in (("nan", float("nan")), ("inf", float("-inf"))):
        w = tensor(2, 3, seed=8)
        w[1, 1] = value
        save(f"bad_{name}.pt", {"model": state(default({"a.weight": w, "b.weight": tensor(1)}))})
    params = copy.deepcopy(PARAMS)
    params["descriptor"]["rcut"] = float("nan")
    save("bad_nan_option.pt", {"model": state(t, params)})
    save("bad_expanded.pt", {"model": state(default({"a.weight": tensor(1, seed=8).expand(1000)}))})
    save("bad_complex.pt", {"model": state(default({"a.weight": torch.zeros(2, dtype=torch.complex64)}))})
    params = copy.deepcopy(PARAMS)
    params["self"] = params
    extra = {"model_params": params}
    save("bad_self.pt", {"model": OrderedDict(t, _extra_state=extra)})
    laughs = ["ha"] * 10
    for _ in range(9):
        laughs = [laughs] * 10
    params = copy.deepcopy(PARAMS)
    params["laughs"] = laughs
    save("bad_laughs.pt", {"model": OrderedDict(t, _extra_state={"model_params": params})})
    deep = []
    for _ in range(200):
        deep = [deep]
    params = copy.deepcopy(PARAMS)
    params["deep"] = deep
    save("bad_deep.pt", {"model": OrderedDict(t, _extra_state={"model_params": params})})


class TinyModule(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(tensor(2, 2, seed=8))

    def forward(self, x):
        return x @ self.weight


def torchscript():
    torch.jit.save(torch.jit.script(TinyModule()), os.path.join(HERE, "bad_torchscript.pth"))


def tiny():
    try:
        from deepmd.pt.model.model import get_model
        from deepmd.pt.train.wrapper import ModelWrapper
    except ImportError:
        print("deepmd-kit is not installed: tiny.pt left as it is")
        return
    torch.manual_seed(1)
    params = {
        "type": "dpa4",
        "type_map": ["O", "H"],
        "descriptor": {
            "type": "dpa4", "rcut": 4.0, "n_radial": 3, "channels": 4, "lmax": 1, "n_blocks": 1, "mixing_layers": 2,
            "n_focus": 2, "edge_norm": True, "message_node_so3": True, "ffn_so3_grid": True, "grid_branch": [0, 0, 1],
            "so3_readout": "mlp", "ffn_neurons": 4, "sel": 20, "precision": "float32", "seed": 1,
        },
        "fitting_net": {"type": "dpa4_ener", "neuron": [4], "precision": "float32", "seed": 1},
    }
    model = get_model(copy.deepcopy(params))
    parameters = sum(p.numel() for p in model.parameters())
    trained = {"model.Default." + name for name, _ in model.named_parameters()}
    weights = ModelWrapper(model, model_params=params).state_dict()
    # Buffers that a reader computes itself are left out: the file stays small.
    keep = ("_extra_state", "out_bias", "bias_atom_e", "version_tensor", "out_std")
    weights = OrderedDict((k, v) for k, v in weights.items() if k in trained or k.endswith(keep))
    torch.save({"model": weights}, os.path.join(HERE, "tiny.pt"))
    EXPECTED["tiny.pt"] = {"parameters": parameters}


def shared():
    """Digests of the reference checkpoints: tensors in file order as little-endian f64, one SHA-256 a file."""
    root = os.environ.get("SEZM_SHARED", os.path.join(HERE, "..", "..", "..", "..", "shared"))
    out = {}
    for path in sorted(glob.glob(os.path.join(root, "models", "*.pt")) + glob.glob(os.path.join(root, "refs", "*", "*.pt"))):
        content = torch.load(path, map_location="cpu", weights_only=True)
        content = content.get("model", content)
        digest, count = hashlib.sha256(), 0
        for name, t in content.items():
            if torch.is_tensor(t):
                assert name.startswith(PREFIX), name
                digest.update(t.to(torch.float64).contiguous().numpy().astype("<f8").tobytes())
                count += 1
        out[os.path.relpath(path, root)] = {"tensors": count, "sha256": digest.hexdigest()}
    if not out:
        print(f"no reference checkpoints in {root}: shared.json left as it is")
        return
    with open(os.path.join(HERE, "shared.json"), "w") as f:
        json.dump(out, f, indent=1)
        f.write("\n")


if __name__ == "__main__":
    path = os.path.join(HERE, "expected.json")
    if os.path.exists(path):
        EXPECTED["tiny.pt"] = json.load(open(path)).get("tiny.pt")
    for make in (dtypes, views, roots, versions, options, branches, lora, bad, torchscript, tiny, shared):
        make()
    with open(path, "w") as f:
        json.dump(EXPECTED, f, indent=None, separators=(",", ":"))
        f.write("\n")
