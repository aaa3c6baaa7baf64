//! Tensors of a checkpoint -> [`Parameters`]. Every tensor is asked for by name and by shape (SPEC 1.1).

use super::config::{BlockDegrees, Config, GridOp, RadialMode, Readout};
use super::parameters::*;
use crate::checkpoint::Checkpoint;
use crate::{Error, Result};

/// Reads the weights that `config` asks for. Errors: `Format` naming file and tensor, expected and found shape.
pub fn parameters(checkpoint: &Checkpoint, config: &Config) -> Result<Parameters<f64>> {
    let t = Tensors { checkpoint };
    let d = "atomic_model.descriptor";
    let n_types = config.type_map.len();
    let mut blocks = Vec::with_capacity(config.blocks.len());
    for (b, degrees) in config.blocks.iter().enumerate() {
        blocks.push(block(&t, config, degrees, &format!("{d}.blocks.{b}"))?);
    }
    let mut readout = Vec::with_capacity(config.readout_layers);
    for i in 0..config.readout_layers - 1 {
        readout.push(readout_ffn(&t, config, &format!("{d}.readout_pre_layers.{i}"))?);
    }
    readout.push(readout_ffn(&t, config, &format!("{d}.output_ffn"))?);
    Ok(Parameters {
        type_embedding: type_rows(&t, &format!("{d}.type_embedding.adam_type_embedding"), n_types, config.channels)?,
        env_seed: if config.use_env_seed { Some(env_seed(&t, config, d)?) } else { None },
        radial_frequencies: t.read(&format!("{d}.radial_basis.adam_freqs"), &[1, config.n_radial])?,
        radial: radial_net(&t, config, &format!("{d}.radial_embedding.net"))?,
        blocks,
        readout,
        fitting: fitting(&t, config)?,
    })
}

/// Number of trainable values in the file: all tensors but the buffers (SPEC 1, rules 3 to 5).
pub fn count_parameters(checkpoint: &Checkpoint) -> usize {
    const BUFFERS: &[&str] = &[
        "out_bias",
        "out_std",
        "bias_atom_e",
        "case_embd",
        "min_nbor_dist",
        "dens_force_rmsd",
        "version_tensor",
        "mean",
        "stddev",
        "expand_index",
        "balance_weight",
        "m0_idx",
        "pos_indices",
        "neg_indices",
        "l1_perm",
        "l1_sign_outer",
        "_empty_tensor",
        "coeff_index_m",
        "degree_index_m",
        "rotate_inv_rescale_full",
        "atomic_numbers",
        "_extra_state",
    ];
    let is_buffer = |name: &str| {
        let leaf = name.rsplit('.').next().unwrap_or(name);
        BUFFERS.contains(&leaf)
            || name.contains(".gie.")
            || name.contains(".wigner_calc.")
            || (leaf.starts_with("kernel_") && leaf.ends_with("_index"))
    };
    checkpoint
        .names()
        .into_iter()
        .filter(|name| !is_buffer(name))
        .map(|name| checkpoint.shape(name).map_or(0, |shape| shape.iter().product()))
        .sum()
}

struct Tensors<'a> {
    checkpoint: &'a Checkpoint,
}

impl Tensors<'_> {
    fn read(&self, name: &str, shape: &[usize]) -> Result<Vec<f64>> {
        let path = self.checkpoint.path();
        let found = self.checkpoint.shape(name).ok_or_else(|| {
            Error::format(
                path,
                format!("tensor {name} is missing (shape {shape:?} expected); was the file cut or renamed?"),
            )
        })?;
        if found != shape {
            return Err(Error::format(
                path,
                format!(
                    "tensor {name} has shape {found:?} where the configuration asks for {shape:?}; \
                     weights and configuration do not belong together"
                ),
            ));
        }
        match self.checkpoint.tensor(name)? {
            Some(tensor) => Ok(tensor.data),
            None => Err(Error::format(path, format!("tensor {name} is missing"))),
        }
    }
    fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<Matrix<f64>> {
        Ok(Matrix { rows, cols, data: self.read(name, &[rows, cols])? })
    }
    fn scalar(&self, name: &str) -> Result<f64> {
        Ok(self.read(name, &[1])?[0])
    }
    /// `weight (degrees, rows, cols)` as one matrix a degree.
    fn degree_linear(&self, name: &str, degrees: usize, rows: usize, cols: usize) -> Result<DegreeLinear<f64>> {
        let data = self.read(&format!("{name}.weight"), &[degrees, rows, cols])?;
        Ok(data.chunks_exact(rows * cols).map(|m| Matrix { rows, cols, data: m.to_vec() }).collect())
    }
    /// `weight (rows, focuses * cols)` as one matrix a focus.
    fn focus_linear(&self, name: &str, rows: usize, focuses: usize, cols: usize) -> Result<Vec<Matrix<f64>>> {
        let whole = self.matrix(&format!("{name}.weight"), rows, focuses * cols)?;
        Ok((0..focuses).map(|f| whole.columns(f * cols, cols)).collect())
    }
    /// A tensor `(rows, focuses, cols)` as one `rows x cols` matrix a focus.
    fn per_focus(&self, name: &str, rows: usize, focuses: usize, cols: usize) -> Result<Vec<Matrix<f64>>> {
        let data = self.read(name, &[rows, focuses, cols])?;
        let whole = Matrix { rows, cols: focuses * cols, data };
        Ok((0..focuses).map(|f| whole.columns(f * cols, cols)).collect())
    }
    fn equivariant_norm(&self, name: &str, degree: usize, channels: usize, eps: f64) -> Result<EquivariantNorm<f64>> {
        Ok(EquivariantNorm {
            scale: Matrix {
                rows: degree + 1,
                cols: channels,
                data: self.read(&format!("{name}.adam_scale"), &[degree + 1, 1, channels])?,
            },
            bias: self.read(&format!("{name}.bias"), &[1, channels])?,
            eps,
        })
    }
}

/// A type table without its last row, which is padding (SPEC 1.1).
fn type_rows(t: &Tensors, name: &str, n_types: usize, width: usize) -> Result<Matrix<f64>> {
    let mut table = t.matrix(name, n_types + 1, width)?;
    table.rows = n_types;
    table.data.truncate(n_types * width);
    Ok(table)
}

fn env_seed(t: &Tensors, c: &Config, d: &str) -> Result<EnvSeed<f64>> {
    let w = c.env_widths();
    let e = format!("{d}.env_seed_embedding");
    let film_norm = if c.edge_norm {
        Some([
            t.read(&format!("{d}.film_scale_norm.adam_scale"), &[1, c.channels])?,
            t.read(&format!("{d}.film_shift_norm.adam_scale"), &[1, c.channels])?,
        ])
    } else {
        None
    };
    Ok(EnvSeed {
        rbf1: t.matrix(&format!("{e}.rbf_proj_layer1.matrix"), c.n_radial, w.radial)?,
        rbf2: t.matrix(&format!("{e}.rbf_proj_layer2.matrix"), w.radial, w.radial)?,
        type_embedding: type_rows(t, &format!("{e}.env_type_embed.adam_type_embedding"), c.type_map.len(), w.types)?,
        g1: t.matrix(&format!("{e}.g_layer1.matrix"), w.radial + 2 * w.types, w.hidden)?,
        g2: t.matrix(&format!("{e}.g_layer2.matrix"), w.hidden, w.embed)?,
        output: t.matrix(&format!("{e}.output_proj.matrix"), w.embed * w.axis, 2 * c.channels)?,
        film_norm,
        film_strength: [
            t.scalar(&format!("{d}.film_scale_strength_log"))?.exp(),
            t.scalar(&format!("{d}.film_shift_strength_log"))?.exp(),
        ],
    })
}

/// Keys are numbered as in a sequence of linear, norm (with `edge_norm`) and activation modules (SPEC 5).
fn radial_net(t: &Tensors, c: &Config, net: &str) -> Result<RadialNet<f64>> {
    let stride = if c.edge_norm { 3 } else { 2 };
    let mut width = c.n_radial;
    let mut hidden = Vec::with_capacity(c.radial_mlp.len());
    for (i, &next) in c.radial_mlp.iter().enumerate() {
        let k = i * stride;
        let matrix = t.matrix(&format!("{net}.{k}.matrix"), width, next)?;
        let scale = if c.edge_norm { Some(t.read(&format!("{net}.{}.adam_scale", k + 1), &[next])?) } else { None };
        hidden.push((matrix, scale));
        width = next;
    }
    let last =
        t.matrix(&format!("{net}.{}.matrix", c.radial_mlp.len() * stride), width, (c.node_lmax() + 1) * c.channels)?;
    Ok(RadialNet { hidden, last })
}

fn block(t: &Tensors, c: &Config, degrees: &BlockDegrees, name: &str) -> Result<Block<f64>> {
    let [so2_pre, so2_post, ffn_pre, ffn_post] = c.sandwich_norm;
    let norm = |on: bool, which: String, degree: usize, eps: f64| {
        if on { t.equivariant_norm(&which, degree, c.channels, eps).map(Some) } else { Ok(None) }
    };
    let mut ffns = Vec::with_capacity(c.ffn_blocks);
    for i in 0..c.ffn_blocks {
        ffns.push(FfnUnit {
            pre_norm: norm(ffn_pre, format!("{name}.pre_ffn_norms.{i}"), degrees.node_l, 1e-5)?,
            ffn: block_ffn(t, c, degrees, &format!("{name}.ffns.{i}"))?,
            post_norm: norm(ffn_post, format!("{name}.post_ffn_norms.{i}"), degrees.node_l, 1e-5)?,
        });
    }
    Ok(Block {
        pre_so2_norm: norm(so2_pre, format!("{name}.pre_so2_norm"), degrees.l, 1e-5)?,
        convolution: convolution(t, c, degrees, &format!("{name}.so2_conv"))?,
        post_so2_norm: norm(
            so2_post,
            format!("{name}.post_so2_norm"),
            degrees.l,
            if c.edge_norm { 1e-5 } else { 1.0 },
        )?,
        ffns,
    })
}

fn convolution(t: &Tensors, c: &Config, degrees: &BlockDegrees, name: &str) -> Result<Convolution<f64>> {
    let (l, f, cf, w) = (degrees.l, c.n_focus, c.focus_dim, c.hidden());
    let mut layers = Vec::with_capacity(c.mixing_layers);
    for i in 0..c.mixing_layers {
        let gated = i + 1 < c.mixing_layers;
        layers.push(so2_layer(t, degrees, f, cf, name, i, gated)?);
    }
    Ok(Convolution {
        pre_mix: t.degree_linear(&format!("{name}.pre_focus_mix"), l + 1, c.channels, w)?,
        radial_projection: if w != c.channels {
            Some(t.matrix(&format!("{name}.radial_hidden_proj.weight"), c.channels, w)?)
        } else {
            None
        },
        degree_mixer: degree_mixer(t, c, degrees, &format!("{name}.radial_degree_mixer"))?,
        layers,
        competition: if f > 1 {
            let norm = if c.edge_norm {
                Some(t.matrix(&format!("{name}.focus_compete_norm.adam_scale"), f, cf)?)
            } else {
                None
            };
            Some(Competition { norm, weight: t.matrix(&format!("{name}.adamw_focus_compete_w"), cf, f)? })
        } else {
            None
        },
        attention: if c.n_atten_head > 0 { Some(attention(t, c, name)?) } else { None },
        product: if c.message_node_so3 {
            Some(node_product(t, c, degrees, &format!("{name}.message_node_grid_product"))?)
        } else {
            None
        },
        post_mix: t.degree_linear(&format!("{name}.post_focus_mix"), l + 1, w, c.channels)?,
    })
}

fn degree_mixer(t: &Tensors, c: &Config, degrees: &BlockDegrees, name: &str) -> Result<Option<DegreeMixer<f64>>> {
    let w = c.hidden();
    let rows = (degrees.l + 1) * w;
    let kernel: usize = (0..=degrees.m).map(|m| (degrees.l - m + 1).pow(2)).sum();
    let weight = |cols| t.matrix(&format!("{name}.weight"), rows, cols);
    Ok(match c.radial_mode {
        RadialMode::None => None,
        RadialMode::Degree => Some(DegreeMixer { weight: weight(kernel)?, basis: None }),
        RadialMode::DegreeChannel { rank: 0 } => Some(DegreeMixer { weight: weight(kernel * w)?, basis: None }),
        RadialMode::DegreeChannel { rank } => Some(DegreeMixer {
            weight: weight(kernel * rank)?,
            basis: Some(t.matrix(&format!("{name}.channel_basis"), rank, w)?),
        }),
    })
}

fn so2_layer(
    t: &Tensors,
    degrees: &BlockDegrees,
    focuses: usize,
    cf: usize,
    name: &str,
    i: usize,
    gated: bool,
) -> Result<So2Layer<f64>> {
    let (l, linear) = (degrees.l, format!("{name}.so2_linears.{i}"));
    let n0 = (l + 1) * cf;
    let m0 = t.matrix(&format!("{linear}.weight_m0"), n0, focuses * n0)?;
    let mut orders = Vec::with_capacity(degrees.m);
    for m in 1..=degrees.m {
        let n = (l - m + 1) * cf;
        let w = t.matrix(&format!("{linear}.weight_m.{}", m - 1), n, focuses * 2 * n)?;
        orders.push(
            (0..focuses).map(|f| complex_matrix(&w.columns(f * 2 * n, n), &w.columns(f * 2 * n + n, n))).collect(),
        );
    }
    let gate = if gated && l > 0 {
        Some(t.focus_linear(&format!("{name}.non_linearities.{i}.gate_linear"), cf, focuses, l * cf)?)
    } else {
        None
    };
    Ok(So2Layer { m0: (0..focuses).map(|f| m0.columns(f * n0, n0)).collect(), m: orders, gate, gated })
}

/// `out- = in- U - in+ V`, `out+ = in- V + in+ U` as one matrix on (in-, in+) (SPEC 8.2, step 5).
fn complex_matrix(u: &Matrix<f64>, v: &Matrix<f64>) -> Matrix<f64> {
    let n = u.rows;
    let mut data = Vec::with_capacity(4 * n * n);
    for r in 0..n {
        data.extend_from_slice(u.row(r));
        data.extend_from_slice(v.row(r));
    }
    for r in 0..n {
        data.extend(v.row(r).iter().map(|x| -x));
        data.extend_from_slice(u.row(r));
    }
    Matrix { rows: 2 * n, cols: 2 * n, data }
}

fn attention(t: &Tensors, c: &Config, name: &str) -> Result<Attention<f64>> {
    let (f, cf, heads) = (c.n_focus, c.focus_dim, c.n_atten_head);
    let mut null_mass = t.matrix(&format!("{name}.adamw_attn_z_bias_raw"), f, heads)?;
    for z in &mut null_mass.data {
        *z = z.max(0.0) + (-z.abs()).exp().ln_1p() + c.eps;
    }
    Ok(Attention {
        qk_norm: t.matrix(&format!("{name}.attn_qk_norm.adam_scale"), f, cf)?,
        query: t.focus_linear(&format!("{name}.attn_q_proj"), cf, f, cf)?,
        key: t.focus_linear(&format!("{name}.attn_k_proj"), cf, f, cf)?,
        radial_logit: t.per_focus(&format!("{name}.adamw_attn_logit_w"), cf, f, heads)?,
        null_mass,
        gate_norm: t.matrix(&format!("{name}.attn_output_gate_norm.adam_scale"), f, cf)?,
        gate: t.per_focus(&format!("{name}.adamw_attn_gate_w"), cf, f, heads)?,
    })
}

fn node_product(t: &Tensors, c: &Config, degrees: &BlockDegrees, name: &str) -> Result<NodeProduct<f64>> {
    let (f, cf, frames) = (c.n_focus, c.focus_dim, 2 * degrees.k + 1);
    Ok(NodeProduct {
        expand: t.degree_linear(&format!("{name}.frame_expand"), degrees.l + 1, cf, frames * cf)?,
        net: grid_net(t, name, frames, cf, f, c.grid_op(1), false)?,
        contract: t.degree_linear(&format!("{name}.frame_contract"), degrees.l + 1, frames * cf, cf)?,
        residual_scale: t.matrix(&format!("{name}.residual_scale"), f, cf)?,
    })
}

/// `both`: left and right see both inputs side by side (op `mlp` of the self mode, SPEC 10.1).
fn grid_net(
    t: &Tensors,
    name: &str,
    frames: usize,
    channels: usize,
    focuses: usize,
    op: GridOp,
    both: bool,
) -> Result<GridNet<f64>> {
    let side = |which: &str, rows, cols| t.matrix(&format!("{name}.grid_op.{which}.weight"), rows, cols);
    let op = match op {
        GridOp::Glu => GridWeights::Glu,
        GridOp::Mlp => {
            let (input, hidden) = (if both { 2 * channels } else { channels }, 2 * channels);
            GridWeights::Mlp {
                left: side("left_proj", input, hidden)?,
                right: side("right_proj", input, hidden)?,
                out: side("out_proj", hidden, channels)?,
            }
        }
        GridOp::Branch { branches } => GridWeights::Branch {
            left: side("left_proj", channels, branches * channels)?,
            right: side("right_proj", channels, branches * channels)?,
            router: side("router", 2 * channels, branches)?,
            out: side("out_proj", channels, channels)?,
        },
    };
    let scalar_gate = t.focus_linear(&format!("{name}.scalar_gate"), 2 * channels, focuses, channels)?;
    Ok(GridNet { frames, channels, op, scalar_gate })
}

fn block_ffn(t: &Tensors, c: &Config, degrees: &BlockDegrees, name: &str) -> Result<Ffn<f64>> {
    let glu = c.ffn_s2() || c.ffn_so3_grid || c.glu_activation;
    let grid = if c.ffn_so3_grid {
        Some((Some(degrees.k), c.grid_op(2)))
    } else if c.ffn_s2() {
        Some((None, c.grid_op(2)))
    } else {
        None
    };
    ffn(t, c.channels, degrees.node_l, c.ffn_hidden(glu), glu, grid, name)
}

fn readout_ffn(t: &Tensors, c: &Config, name: &str) -> Result<Ffn<f64>> {
    let (degree, hidden) = (c.readout_degree(), c.ffn_hidden(c.glu_activation));
    match c.readout {
        Readout::Scalar => ffn(t, c.channels, 0, hidden, c.glu_activation, None, name),
        Readout::Grid(op) => ffn(t, c.channels, degree, hidden, true, Some((Some(c.kmax.min(degree)), op)), name),
    }
}

/// `grid`: frames of an SO(3) grid (`None` inside: an S2 grid) and the operation; without it the gated activation.
fn ffn(
    t: &Tensors,
    channels: usize,
    degree: usize,
    hidden: usize,
    glu: bool,
    grid: Option<(Option<usize>, GridOp)>,
    name: &str,
) -> Result<Ffn<f64>> {
    let act = format!("{name}.act");
    let (n1, n2, nonlinearity) = match grid {
        Some((frame_order, op)) => {
            let frames = frame_order.map_or(1, |k| 2 * k + 1);
            let net = grid_net(t, &act, frames, hidden, 1, op, true)?;
            let nonlinearity = match frame_order {
                Some(k) => FfnNonlinearity::So3Grid { k, net },
                None => FfnNonlinearity::S2Grid { net },
            };
            (2 * frames * hidden, frames * hidden, nonlinearity)
        }
        None => {
            let gate = if degree > 0 {
                t.focus_linear(&format!("{act}.gate_linear"), hidden, 1, degree * hidden)?.pop()
            } else {
                None
            };
            (if glu { 2 * hidden } else { hidden }, hidden, FfnNonlinearity::Gated { hidden, glu, gate })
        }
    };
    Ok(Ffn {
        linear1: t.degree_linear(&format!("{name}.so3_linear_1"), degree + 1, channels, n1)?,
        nonlinearity,
        linear2: t.degree_linear(&format!("{name}.so3_linear_2"), degree + 1, n2, channels)?,
    })
}

fn fitting(t: &Tensors, c: &Config) -> Result<Fitting<f64>> {
    let (a, n_types) = ("atomic_model.fitting_net", c.type_map.len());
    let net = format!("{a}.filter_layers.networks.0");
    let mut width = c.channels;
    let mut hidden = Vec::with_capacity(c.fitting.neuron.len());
    for (k, &next) in c.fitting.neuron.iter().enumerate() {
        let layer = format!("{net}.hidden_layers.{k}.linear");
        hidden.push((
            t.matrix(&format!("{layer}.matrix"), width, 2 * next)?,
            t.read(&format!("{layer}.bias"), &[2 * next])?,
        ));
        width = next;
    }
    Ok(Fitting {
        hidden,
        output: t.read(&format!("{net}.output_layer.matrix"), &[width, 1])?,
        output_bias: if c.fitting.bias_out { t.scalar(&format!("{net}.output_layer.bias"))? } else { 0.0 },
        type_bias: t.read(&format!("{a}.bias_atom_e"), &[n_types, 1])?,
        out_bias: t.read("atomic_model.out_bias", &[1, n_types, 1])?,
    })
}
