//! The kernel files, embedded: the library carries the text that it compiles.

/// One kernel file: a program of its own.
#[derive(Debug, PartialEq, Eq)]
pub struct Source {
    /// The stage, and the file `kernels/NAME.cu`.
    pub name: &'static str,
    /// CUDA C++.
    pub text: &'static str,
    /// The `extern "C"` kernels that it defines.
    pub kernels: &'static [&'static str],
}

macro_rules! file {
    ($name:literal) => {
        include_str!(concat!("../../kernels/", $name))
    };
}

/// What kernel files may include: (name, text).
pub const HEADERS: &[(&str, &str)] = &[
    ("common.cuh", file!("common.cuh")),
    ("prims.cuh", file!("prims.cuh")),
    ("wgmma.cuh", file!("wgmma.cuh")),
    ("wigner.cuh", file!("wigner.cuh")),
    ("envelope.cuh", file!("envelope.cuh")),
    ("message.cuh", file!("message.cuh")),
    ("radial.cuh", file!("radial.cuh")),
    ("torque.cuh", file!("torque.cuh")),
];

/// Stage `wigner`.
pub static WIGNER: Source = Source { name: "wigner", text: file!("wigner.cu"), kernels: &["wigner_assemble"] };

/// Stage `edge_geometry`.
pub static EDGE_GEOMETRY: Source = Source {
    name: "edge_geometry",
    text: file!("edge_geometry.cu"),
    kernels: &["edge_geometry", "node_normaliser", "gather_directions"],
};

/// Stage `node_linear`.
pub static NODE_LINEAR: Source =
    Source { name: "node_linear", text: file!("node_linear.cu"), kernels: &["grouped_product", "copy_rows"] };

/// Stage `equivariant_norm`.
pub static EQUIVARIANT_NORM: Source = Source {
    name: "equivariant_norm",
    text: file!("equivariant_norm.cu"),
    kernels: &["equivariant_norm", "equivariant_norm_adjoint"],
};

/// Stage `scalar_norm`.
pub static SCALAR_NORM: Source =
    Source { name: "scalar_norm", text: file!("scalar_norm.cu"), kernels: &["scalar_norm", "scalar_norm_adjoint"] };

/// Stage `radial`.
pub static RADIAL: Source =
    Source { name: "radial", text: file!("radial.cu"), kernels: &["radial_forward", "radial_adjoint"] };

/// Stage `rotate_mix`.
pub static ROTATE_MIX: Source =
    Source { name: "rotate_mix", text: file!("rotate_mix.cu"), kernels: &["rotate_mix_forward", "rotate_mix_adjoint"] };

/// Stage `so2_stack`.
pub static SO2_STACK: Source = Source {
    name: "so2_stack",
    text: file!("so2_stack.cu"),
    kernels: &["stack_gate_forward", "stack_add", "stack_gate_adjoint"],
};

/// Stage `focus_competition`.
pub static FOCUS_COMPETITION: Source = Source {
    name: "focus_competition",
    text: file!("focus_competition.cu"),
    kernels: &["focus_competition_forward", "focus_competition_adjoint"],
};

/// Stage `attention`.
pub static ATTENTION: Source = Source {
    name: "attention",
    text: file!("attention.cu"),
    kernels: &[
        "attention_logits",
        "attention_softmax",
        "attention_aggregate",
        "attention_adjoint",
        "attention_keep_logits",
        "attention_heads_adjoint",
        "attention_gates",
        "attention_apply_gates",
        "attention_head_sums",
        "attention_gates_adjoint",
        "attention_normaliser_adjoint",
    ],
};

/// Stage `node_start`.
pub static NODE_START: Source = Source {
    name: "node_start",
    text: file!("node_start.cu"),
    kernels: &[
        "start_zonal",
        "start_edges",
        "start_sums",
        "film_quadratic",
        "film_quadratic_adjoint",
        "film_apply",
        "film_apply_adjoint",
        "start_types",
        "start_normaliser_adjoint",
        "start_edges_adjoint",
        "start_normaliser_edges",
    ],
};

/// Stage `grid_product`.
pub static GRID_PRODUCT: Source = Source {
    name: "grid_product",
    text: file!("grid_product.cu"),
    kernels: &[
        "grid_multiply",
        "grid_multiply_adjoint",
        "grid_route_gradient",
        "grid_route",
        "grid_route_adjoint",
        "grid_scalar_forward",
        "grid_scalar_adjoint",
        "grid_pack_scalars",
        "grid_unpack_scalars",
        "grid_residual",
        "grid_scalar_product",
        "grid_scalar_product_adjoint",
    ],
};

/// Stage `ffn`.
pub static FFN: Source = Source { name: "ffn", text: file!("ffn.cu"), kernels: &["gated_forward", "gated_adjoint"] };

/// Stage `fitting`.
pub static FITTING: Source = Source {
    name: "fitting",
    text: file!("fitting.cu"),
    kernels: &["fitting_gate", "fitting_gate_adjoint", "fitting_energy"],
};

/// Stage `force_virial`.
pub static FORCE_VIRIAL: Source = Source {
    name: "force_virial",
    text: file!("force_virial.cu"),
    kernels: &["edge_gradient", "node_force", "node_virial"],
};

/// Every kernel file.
pub static ALL: &[&Source] = &[
    &WIGNER,
    &EDGE_GEOMETRY,
    &NODE_LINEAR,
    &EQUIVARIANT_NORM,
    &SCALAR_NORM,
    &RADIAL,
    &ROTATE_MIX,
    &SO2_STACK,
    &FOCUS_COMPETITION,
    &ATTENTION,
    &NODE_START,
    &GRID_PRODUCT,
    &FFN,
    &FITTING,
    &FORCE_VIRIAL,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_is_listed() {
        for source in ALL {
            let defined: Vec<&str> = source
                .text
                .split("extern \"C\" __global__")
                .skip(1)
                .filter_map(|after| {
                    // The name is the last word before the parameter list, which launch bounds may precede.
                    let start = after.find("void").map(|i| &after[i..])?;
                    let start = match start.find("__launch_bounds__") {
                        Some(i) if i < start.find('{')? => &start[i + start[i..].find(')')? + 1..],
                        _ => &start[4..],
                    };
                    start.split('(').next().map(str::trim)
                })
                .collect();
            assert_eq!(defined, source.kernels, "kernels/{}.cu", source.name);
        }
    }
}
