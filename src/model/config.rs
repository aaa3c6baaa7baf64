//! The model JSON as typed options: every option of SPEC sections 1 to 16 (defaults of section 20.1).
//!
//! A known option with an unknown value and an option of an unknown name are errors: neither may be ignored.

use crate::{Error, Result};
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::BTreeSet;

/// Radial basis (SPEC 3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Basis {
    Bessel,
    Gaussian,
}

/// How an edge's radial features act on the rotated message (SPEC 8.2, step 2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RadialMode {
    /// One factor a degree and channel.
    None,
    /// A kernel between degrees, the same for all channels.
    Degree,
    /// A kernel between degrees and channels of the given rank; rank 0 is a full kernel.
    DegreeChannel { rank: usize },
}

/// Pointwise activation (SPEC 0).
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    Linear,
    Relu,
    Relu6,
    Gelu,
    Tanh,
    Sigmoid,
    Softplus,
    Silu,
}

/// Operation of a grid nonlinearity (SPEC 10.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GridOp {
    Glu,
    Mlp,
    Branch { branches: usize },
}

/// Attention over depth (SPEC 11).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DepthAttention {
    None,
    Independent,
    Dependent,
}

/// Read-out (SPEC 12).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Readout {
    Scalar,
    Grid(GridOp),
}

/// Degrees of one interaction block (SPEC 0).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct BlockDegrees {
    /// Message degree L.
    pub l: usize,
    /// Largest |m| kept in the edge frame.
    pub m: usize,
    /// Frames of the SO(3) grids.
    pub k: usize,
    /// Node degree L + extra_node_l.
    pub node_l: usize,
}

/// The configuration of a model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Config {
    pub type_map: Vec<String>,
    /// Descriptor version: 1.0, 1.1 or 1.2 (SPEC 1).
    pub version: f64,
    /// Cutoff, Å.
    pub rcut: f64,
    /// Envelope exponents of the radial basis and of the edge weight.
    pub env_exp: [u32; 2],
    pub channels: usize,
    pub basis: Basis,
    pub n_radial: usize,
    /// Hidden widths of the radial network, 0 already replaced by `channels`.
    pub radial_mlp: Vec<usize>,
    pub edge_norm: bool,
    pub use_env_seed: bool,
    pub edge_cartesian: bool,
    pub node_cartesian: String,
    /// Degree of the message before the first block; the blocks' own if there are any.
    pub lmax: usize,
    pub kmax: usize,
    pub extra_node_l: usize,
    pub blocks: Vec<BlockDegrees>,
    pub so2_norm: bool,
    pub mixing_layers: usize,
    pub so2_attn_res: DepthAttention,
    pub radial_mode: RadialMode,
    pub n_focus: usize,
    /// Hidden channels of a focus, 0 already replaced by `channels`.
    pub focus_dim: usize,
    pub n_atten_head: usize,
    pub atten_f_mix: bool,
    pub atten_v_proj: bool,
    pub atten_o_proj: bool,
    pub ffn_neurons: usize,
    pub grid_mlp: [bool; 3],
    pub grid_branch: [usize; 3],
    pub ffn_blocks: usize,
    /// Norms around the SO(2) unit (before, after) and the FFN units (before, after).
    pub sandwich_norm: [bool; 4],
    pub mlp_bias: bool,
    pub layer_scale: bool,
    pub full_attn_res: DepthAttention,
    pub block_attn_res: DepthAttention,
    /// S2 activation in the SO(2) stack and in the FFN.
    pub s2_activation: [bool; 2],
    pub ffn_so3_grid: bool,
    pub node_wise_s2: bool,
    pub node_wise_so3: bool,
    pub message_node_s2: bool,
    pub message_node_so3: bool,
    pub readout: Readout,
    pub readout_layers: usize,
    pub lebedev_quadrature: [bool; 2],
    pub activation: Activation,
    pub glu_activation: bool,
    /// Unordered type pairs without edges, from the descriptor and from the model.
    pub exclude_types: Vec<(u32, u32)>,
    pub eps: f64,
    pub add_chg_spin_ebd: bool,
    pub use_spin: bool,
    pub bridging: bool,
    pub atom_exclude_types: Vec<u32>,
    pub fitting: FittingConfig,
}

/// Options of the fitting net (SPEC 16).
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FittingConfig {
    /// Hidden widths, 0 already replaced by the automatic width.
    pub neuron: Vec<usize>,
    pub activation: Activation,
    pub bias_out: bool,
    pub numb_fparam: usize,
    pub numb_aparam: usize,
    pub dim_case_embd: usize,
    pub case_film_embd: bool,
    pub exclude_types: Vec<u32>,
    pub has_atom_ener: bool,
}

/// Largest width, degree or number of parts that an option may ask for.
const MAX_COUNT: u64 = 1 << 16;

/// `32 ceil(n / 32)`, the automatic widths of SPEC 0.
fn ceil32(n: f64) -> usize {
    32 * (n / 32.0).ceil() as usize
}

impl Config {
    /// Hidden width of an FFN (SPEC 0) with or without a gated linear unit.
    pub fn ffn_hidden(&self, glu: bool) -> usize {
        let c = self.channels as f64;
        match self.ffn_neurons {
            0 => ceil32(if glu { 8.0 * c / 3.0 } else { 4.0 * c }),
            n => n,
        }
    }
    /// Node degree before the first block.
    pub fn node_lmax(&self) -> usize {
        self.lmax + self.extra_node_l
    }
    /// Degree of the node state that the read-out sees.
    pub fn readout_degree(&self) -> usize {
        self.blocks.last().map_or(self.node_lmax(), |b| b.node_l)
    }
    /// Hidden width of the convolution, all focuses.
    pub fn hidden(&self) -> usize {
        self.n_focus * self.focus_dim
    }
    /// Whether the block FFN multiplies on an S2 grid.
    pub fn ffn_s2(&self) -> bool {
        self.s2_activation[1] && !self.ffn_so3_grid
    }
    /// Operation of use `i` (0 node-wise, 1 message-node, 2 FFN): branch, else mlp, else glu (SPEC 9).
    pub fn grid_op(&self, i: usize) -> GridOp {
        match (self.grid_branch[i], self.grid_mlp[i]) {
            (0, false) => GridOp::Glu,
            (0, true) => GridOp::Mlp,
            (branches, _) => GridOp::Branch { branches },
        }
    }
    /// Widths of the environment seed: (de, dt, da, dr, dh) of SPEC 0.
    pub fn env_widths(&self) -> EnvWidths {
        let embed = self.channels.min(128);
        let types = (self.channels / 4).clamp(8, 32);
        let axis = (if embed < 64 { 4 } else { 8 }).min((embed - 1).max(1));
        let radial = embed.saturating_sub(2 * types).max(32);
        EnvWidths { embed, types, axis, radial, hidden: 256.min((2 * embed).max(radial + 2 * types)) }
    }

    /// Names and values of the options in use that no engine evaluates; empty for a model that runs.
    pub fn unsupported(&self) -> Vec<String> {
        let mut found = Vec::new();
        let mut refuse = |on: bool, what: &str| {
            if on {
                found.push(what.to_string())
            }
        };
        refuse(self.edge_cartesian && self.blocks.iter().any(|b| b.l == 1 || b.l == 2), "edge_cartesian: true");
        refuse(!matches!(self.node_cartesian.as_str(), "none" | "0"), "node_cartesian");
        refuse(self.so2_norm, "so2_norm: true");
        refuse(self.so2_attn_res != DepthAttention::None, "so2_attn_res");
        refuse(self.full_attn_res != DepthAttention::None, "full_attn_res");
        refuse(self.block_attn_res != DepthAttention::None, "block_attn_res");
        refuse(self.atten_f_mix, "atten_f_mix: true");
        refuse(self.atten_v_proj, "atten_v_proj: true");
        refuse(self.atten_o_proj, "atten_o_proj: true");
        refuse(self.mlp_bias, "mlp_bias: true");
        refuse(self.layer_scale, "layer_scale: true");
        refuse(self.s2_activation[0], "s2_activation[0]: true (S2 activation in the SO(2) stack)");
        refuse(self.node_wise_s2, "node_wise_s2: true");
        refuse(self.node_wise_so3, "node_wise_so3: true");
        refuse(self.message_node_s2, "message_node_s2: true");
        refuse(self.ffn_s2() && !self.lebedev_quadrature[1], "lebedev_quadrature: false for the FFN");
        refuse(
            self.mixing_layers == 0 && self.radial_mode == RadialMode::None && !self.blocks.is_empty(),
            "mixing_layers: 0 with radial_so2_mode none",
        );
        refuse(self.add_chg_spin_ebd, "add_chg_spin_ebd: true");
        refuse(self.use_spin, "spin");
        refuse(self.bridging, "bridging_method");
        refuse(!self.atom_exclude_types.is_empty(), "atom_exclude_types");
        refuse(self.fitting.numb_fparam > 0, "fitting_net numb_fparam");
        refuse(self.fitting.numb_aparam > 0, "fitting_net numb_aparam");
        refuse(self.fitting.dim_case_embd > 0, "fitting_net dim_case_embd");
        refuse(self.fitting.case_film_embd, "fitting_net case_film_embd");
        refuse(!self.fitting.exclude_types.is_empty(), "fitting_net exclude_types");
        refuse(self.fitting.has_atom_ener, "fitting_net atom_ener");
        found
    }

    /// Reads the model JSON (`model_params` of one branch) with the descriptor version of the file.
    ///
    /// Errors: `Unsupported` messages name the option, the value found and the values known; the caller adds the file.
    pub fn from_json(params: &Value, version: f64) -> Result<Config> {
        let mut model = Options::of(params, "model")?;
        let kind = model.text("type", "dpa4")?;
        check_kind(&kind, "model")?;
        let type_map = model.texts("type_map")?;
        if type_map.is_empty() {
            return Err(bad("model", "type_map", "an empty list", "a list of element symbols"));
        }
        let n_types = type_map.len();
        let mut d = Options::of(model.required("descriptor")?, "descriptor")?;
        if let Some(kind) = d.optional_text("type")? {
            check_kind(&kind, "descriptor")?;
        }
        if ![1.0, 1.1, 1.2].contains(&version) {
            return Err(Error::Unsupported(format!(
                "descriptor version {version} is not known (1.0, 1.1 and 1.2 are); use a newer sezm"
            )));
        }
        let channels = d.positive("channels", 64)?;
        let extra_node_l = d.count("extra_node_l", 0)?;
        let kmax = d.count("kmax", 1)?;
        let blocks = block_degrees(&mut d, kmax, extra_node_l)?;
        let lmax_option = d.count("lmax", 3)?;
        let mixing_layers = match d.optional_count("so2_layers")? {
            Some(n) => {
                d.count("mixing_layers", 4)?;
                n
            }
            None => d.count("mixing_layers", 4)?,
        };
        let rank = d.count("radial_so2_rank", 1)?;
        let radial_mode = match d.text("radial_so2_mode", "degree_channel")?.as_str() {
            "none" => RadialMode::None,
            "degree" => RadialMode::Degree,
            "degree_channel" => RadialMode::DegreeChannel { rank },
            other => return Err(bad("descriptor", "radial_so2_mode", other, "none, degree or degree_channel")),
        };
        let env_exp: Vec<usize> = d.counts("env_exp", &[7, 5])?;
        let [p_rbf, p_edge] = env_exp[..] else {
            return Err(bad("descriptor", "env_exp", &format!("{env_exp:?}"), "two exponents"));
        };
        let focus_dim = d.count("focus_dim", 0)?;
        let basis = match d.text("basis_type", "bessel")?.as_str() {
            "bessel" => Basis::Bessel,
            "gaussian" => Basis::Gaussian,
            other => return Err(bad("descriptor", "basis_type", other, "bessel or gaussian")),
        };
        let readout = match d.text("so3_readout", "none")?.as_str() {
            "none" => Readout::Scalar,
            "glu" => Readout::Grid(GridOp::Glu),
            "mlp" => Readout::Grid(GridOp::Mlp),
            other => return Err(bad("descriptor", "so3_readout", other, "none, glu or mlp")),
        };
        let mut exclude_types = d.pairs("exclude_types", n_types)?;
        exclude_types.extend(model.pairs("pair_exclude_types", n_types)?);
        let config = Config {
            version,
            rcut: d.number("rcut", 6.0)?,
            env_exp: [p_rbf as u32, p_edge as u32],
            channels,
            basis,
            n_radial: d.positive("n_radial", 16)?,
            radial_mlp: d
                .counts("radial_mlp", &[0])?
                .into_iter()
                .map(|width| if width == 0 { channels } else { width })
                .collect(),
            edge_norm: d.flag("edge_norm", true)?,
            use_env_seed: d.flag("use_env_seed", true)?,
            edge_cartesian: d.flag("edge_cartesian", false)?,
            node_cartesian: d.text_or_number("node_cartesian", "none")?,
            lmax: blocks.first().map_or(lmax_option, |b| b.l),
            kmax,
            extra_node_l,
            blocks,
            so2_norm: d.flag("so2_norm", false)?,
            mixing_layers,
            so2_attn_res: d.depth_attention("so2_attn_res")?,
            radial_mode,
            n_focus: d.positive("n_focus", 1)?,
            focus_dim: if focus_dim == 0 { channels } else { focus_dim },
            n_atten_head: d.count("n_atten_head", 1)?,
            atten_f_mix: d.flag("atten_f_mix", false)?,
            atten_v_proj: d.flag("atten_v_proj", false)?,
            atten_o_proj: d.flag("atten_o_proj", false)?,
            ffn_neurons: d.count("ffn_neurons", 0)?,
            grid_mlp: d.flags("grid_mlp", false)?,
            grid_branch: d.triple("grid_branch", 0)?,
            ffn_blocks: d.positive("ffn_blocks", 1)?,
            sandwich_norm: d.flags_default("sandwich_norm", [false, true, true, false])?,
            mlp_bias: d.flag("mlp_bias", false)?,
            layer_scale: d.flag("layer_scale", false)?,
            full_attn_res: d.depth_attention("full_attn_res")?,
            block_attn_res: d.depth_attention("block_attn_res")?,
            s2_activation: d.flags_default("s2_activation", [false, true])?,
            ffn_so3_grid: d.flag("ffn_so3_grid", false)?,
            node_wise_s2: d.flag("node_wise_s2", false)?,
            node_wise_so3: d.flag("node_wise_so3", false)?,
            message_node_s2: d.flag("message_node_s2", false)?,
            message_node_so3: d.flag("message_node_so3", false)?,
            readout,
            readout_layers: d.positive("readout_layers", 1)?,
            lebedev_quadrature: d.flags("lebedev_quadrature", true)?,
            activation: d.activation("activation_function")?,
            glu_activation: d.flag("glu_activation", true)?,
            exclude_types,
            eps: d.number("eps", 1e-7)?,
            add_chg_spin_ebd: d.flag("add_chg_spin_ebd", false)?,
            use_spin: model.present("spin") || d.present("use_spin"),
            bridging: !model.text("bridging_method", "none")?.eq_ignore_ascii_case("none")
                || d.present("inner_clamp_r_inner")
                || d.present("inner_clamp_r_outer"),
            atom_exclude_types: model.types("atom_exclude_types", n_types)?,
            fitting: FittingConfig::from_json(model.required("fitting_net")?, channels, n_types)?,
            type_map,
        };
        // Options that act in training or in statistics only (SPEC 4.3, 18, 20.1), or name things.
        for name in ["random_gamma", "use_amp"] {
            d.flag(name, true)?;
        }
        for name in ["use_compile", "enable_tf32"] {
            model.flag(name, true)?;
        }
        for name in ["bridging_r_inner", "bridging_r_outer"] {
            model.number(name, 0.0)?;
        }
        d.precision()?;
        d.finish(&["sel", "trainable", "seed", "type_map", "ntypes", "default_chg_spin"])?;
        model.finish(&[
            "lora",
            "data_stat_nbatch",
            "data_stat_protect",
            "data_bias_nsample",
            "data_stat_type",
            "preset_out_bias",
            "srtab_add_bias",
            "model_branch_alias",
            "info",
            "finetune_head",
            "shared_dict",
            "compress",
            "type_embedding",
        ])?;
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<()> {
        if !(self.rcut.is_finite() && self.rcut > 0.0) {
            return Err(bad("descriptor", "rcut", &self.rcut.to_string(), "a positive cutoff in Å"));
        }
        if !(self.eps.is_finite() && self.eps >= 0.0) {
            return Err(bad("descriptor", "eps", &self.eps.to_string(), "a small number, 0 or more"));
        }
        if self.env_exp.contains(&0) {
            return Err(bad("descriptor", "env_exp", &format!("{:?}", self.env_exp), "exponents of at least 1"));
        }
        if self.n_atten_head > 0 && !self.focus_dim.is_multiple_of(self.n_atten_head) {
            return Err(bad(
                "descriptor",
                "n_atten_head",
                &self.n_atten_head.to_string(),
                &format!("a divisor of the focus width {}", self.focus_dim),
            ));
        }
        // A degree this high needs terabytes an atom; a damaged file must not make us try.
        let limits = [("lmax + extra_node_l", self.node_lmax(), 32), ("n_focus", self.n_focus, 1 << 10)];
        for (name, value, limit) in limits {
            if value > limit {
                return Err(bad("descriptor", name, &value.to_string(), &format!("at most {limit}")));
            }
        }
        Ok(())
    }
}

/// Widths of the environment seed (SPEC 0).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EnvWidths {
    pub embed: usize,
    pub types: usize,
    pub axis: usize,
    pub radial: usize,
    pub hidden: usize,
}

impl FittingConfig {
    fn from_json(value: &Value, channels: usize, n_types: usize) -> Result<FittingConfig> {
        let mut f = Options::of(value, "fitting_net")?;
        let kind = f.text("type", "dpa4_ener")?;
        if !["dpa4_ener", "sezm_ener", "ener"].contains(&kind.to_ascii_lowercase().as_str()) {
            return Err(bad("fitting_net", "type", &kind, "dpa4_ener"));
        }
        let config = FittingConfig {
            neuron: f
                .counts("neuron", &[0])?
                .into_iter()
                .map(|width| if width == 0 { ceil32(8.0 * channels as f64 / 3.0) } else { width })
                .collect(),
            activation: f.activation("activation_function")?,
            bias_out: f.flag("bias_out", false)?,
            numb_fparam: f.count("numb_fparam", 0)?,
            numb_aparam: f.count("numb_aparam", 0)?,
            dim_case_embd: f.count("dim_case_embd", 0)?,
            case_film_embd: f.flag("case_film_embd", false)?,
            exclude_types: f.types("exclude_types", n_types)?,
            has_atom_ener: f.list("atom_ener")?.iter().any(|v| !v.is_null()),
        };
        f.precision()?;
        f.flag("resnet_dt", false)?;
        f.finish(&[
            "seed",
            "default_fparam",
            "trainable",
            "rcond",
            "use_aparam_as_mask",
            "mixed_types",
            "type_map",
            "ntypes",
            "dim_descrpt",
            "embedding_width",
            "layer_name",
        ])?;
        Ok(config)
    }
}

fn check_kind(kind: &str, section: &str) -> Result<()> {
    if ["dpa4", "sezm"].contains(&kind.to_ascii_lowercase().as_str()) {
        return Ok(());
    }
    Err(Error::Unsupported(format!(
        "{section} type '{kind}' is another architecture: sezm evaluates DPA4 / SeZM models (type dpa4 or sezm)"
    )))
}

fn block_degrees(d: &mut Options, kmax: usize, extra: usize) -> Result<Vec<BlockDegrees>> {
    let lmax = d.count("lmax", 3)?;
    let n_blocks = d.count("n_blocks", 3)?;
    let l_schedule = d.optional_counts("l_schedule")?.unwrap_or_else(|| vec![lmax; n_blocks]);
    let mmax = if d.is_null("mmax") { None } else { Some(d.count("mmax", 1)?) };
    let m_schedule = match d.optional_counts("m_schedule")? {
        Some(schedule) if schedule.len() == l_schedule.len() => schedule,
        Some(schedule) => {
            let expected = format!("{} values, one a block", l_schedule.len());
            return Err(bad("descriptor", "m_schedule", &format!("{schedule:?}"), &expected));
        }
        None => l_schedule.iter().map(|&l| mmax.map_or(l, |m| m.min(l))).collect(),
    };
    let falls = l_schedule.windows(2).all(|w| w[0] >= w[1]);
    if !falls {
        return Err(bad("descriptor", "l_schedule", &format!("{l_schedule:?}"), "degrees that never rise"));
    }
    l_schedule
        .iter()
        .zip(&m_schedule)
        .map(|(&l, &m)| {
            if m > l {
                return Err(bad("descriptor", "m_schedule", &m.to_string(), &format!("at most the degree {l}")));
            }
            Ok(BlockDegrees { l, m, k: kmax.min(l), node_l: l + extra })
        })
        .collect()
}

fn bad(section: &str, name: &str, found: &str, expected: &str) -> Error {
    Error::Unsupported(format!("option {section}.{name}: found {found}, expected {expected}"))
}

/// One JSON object read option by option; what was never asked for is reported at the end.
struct Options<'a> {
    section: &'static str,
    map: &'a Map<String, Value>,
    seen: BTreeSet<&'static str>,
}

impl<'a> Options<'a> {
    fn of(value: &'a Value, section: &'static str) -> Result<Self> {
        let map = value.as_object().ok_or_else(|| {
            Error::Unsupported(format!("the checkpoint's configuration has no {section} section; is it a DPA4 model?"))
        })?;
        Ok(Options { section, map, seen: BTreeSet::new() })
    }
    /// The option, or `None` where it is absent or null.
    fn get(&mut self, name: &'static str) -> Option<&'a Value> {
        self.seen.insert(name);
        self.map.get(name).filter(|v| !v.is_null())
    }
    fn is_null(&mut self, name: &'static str) -> bool {
        self.seen.insert(name);
        self.map.get(name).is_some_and(Value::is_null)
    }
    fn present(&mut self, name: &'static str) -> bool {
        self.get(name).is_some()
    }
    fn required(&mut self, name: &'static str) -> Result<&'a Value> {
        let section = self.section;
        self.get(name).ok_or_else(|| {
            Error::Unsupported(format!("the checkpoint's configuration has no {section}.{name}; is it a DPA4 model?"))
        })
    }
    fn wrong(&self, name: &str, found: &Value, expected: &str) -> Error {
        bad(self.section, name, &found.to_string(), expected)
    }
    fn text(&mut self, name: &'static str, default: &str) -> Result<String> {
        Ok(self.optional_text(name)?.unwrap_or_else(|| default.to_string()))
    }
    fn optional_text(&mut self, name: &'static str) -> Result<Option<String>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s.clone())),
            Some(other) => Err(self.wrong(name, other, "a word")),
        }
    }
    fn text_or_number(&mut self, name: &'static str, default: &str) -> Result<String> {
        match self.get(name) {
            None => Ok(default.to_string()),
            Some(Value::String(s)) => Ok(s.clone()),
            Some(other) => Ok(other.to_string()),
        }
    }
    fn texts(&mut self, name: &'static str) -> Result<Vec<String>> {
        self.list(name)?
            .iter()
            .map(|v| v.as_str().map(str::to_string).ok_or_else(|| self.wrong(name, v, "element symbols")))
            .collect()
    }
    fn number(&mut self, name: &'static str, default: f64) -> Result<f64> {
        match self.get(name) {
            None => Ok(default),
            Some(v) => v.as_f64().ok_or_else(|| self.wrong(name, v, "a number")),
        }
    }
    fn count(&mut self, name: &'static str, default: usize) -> Result<usize> {
        Ok(self.optional_count(name)?.unwrap_or(default))
    }
    fn positive(&mut self, name: &'static str, default: usize) -> Result<usize> {
        match self.count(name, default)? {
            0 => Err(bad(self.section, name, "0", "at least 1")),
            n => Ok(n),
        }
    }
    fn optional_count(&mut self, name: &'static str) -> Result<Option<usize>> {
        self.get(name).map(|v| self.as_count(name, v)).transpose()
    }
    /// A whole number that is not negative; Python's `False` stands for 0 as in the reference. Bounded, so that sizes
    /// made of a few of them stay far from overflow.
    fn as_count(&self, name: &str, v: &Value) -> Result<usize> {
        match v {
            Value::Bool(false) => Ok(0),
            _ => v
                .as_u64()
                .filter(|&n| n <= MAX_COUNT)
                .map(|n| n as usize)
                .ok_or_else(|| self.wrong(name, v, &format!("a whole number from 0 to {MAX_COUNT}"))),
        }
    }
    fn counts(&mut self, name: &'static str, default: &[usize]) -> Result<Vec<usize>> {
        Ok(self.optional_counts(name)?.unwrap_or_else(|| default.to_vec()))
    }
    fn optional_counts(&mut self, name: &'static str) -> Result<Option<Vec<usize>>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Array(a)) => a.iter().map(|v| self.as_count(name, v)).collect::<Result<_>>().map(Some),
            Some(other) => Err(self.wrong(name, other, "a list of whole numbers")),
        }
    }
    fn flag(&mut self, name: &'static str, default: bool) -> Result<bool> {
        match self.get(name) {
            None => Ok(default),
            Some(v) => self.as_flag(name, v),
        }
    }
    fn as_flag(&self, name: &str, v: &Value) -> Result<bool> {
        match (v, v.as_u64()) {
            (Value::Bool(b), _) => Ok(*b),
            (_, Some(n @ 0..=1)) => Ok(n == 1),
            _ => Err(self.wrong(name, v, "true or false")),
        }
    }
    /// One flag for all uses, or one for each.
    fn flags<const N: usize>(&mut self, name: &'static str, default: bool) -> Result<[bool; N]> {
        match self.get(name) {
            Some(v) if !v.is_array() => Ok([self.as_flag(name, v)?; N]),
            _ => self.flags_default(name, [default; N]),
        }
    }
    fn flags_default<const N: usize>(&mut self, name: &'static str, default: [bool; N]) -> Result<[bool; N]> {
        let Some(v) = self.get(name) else { return Ok(default) };
        match v.as_array() {
            Some(a) if a.len() == N => {
                let mut out = default;
                for (slot, item) in out.iter_mut().zip(a) {
                    *slot = self.as_flag(name, item)?;
                }
                Ok(out)
            }
            _ => Err(self.wrong(name, v, &format!("a list of {N} flags"))),
        }
    }
    /// One count for all three uses, or one for each.
    fn triple(&mut self, name: &'static str, default: usize) -> Result<[usize; 3]> {
        let Some(v) = self.get(name) else { return Ok([default; 3]) };
        match v.as_array().map(Vec::as_slice) {
            None => Ok([self.as_count(name, v)?; 3]),
            Some([a, b, c]) => Ok([self.as_count(name, a)?, self.as_count(name, b)?, self.as_count(name, c)?]),
            Some(_) => Err(self.wrong(name, v, "one number or three")),
        }
    }
    fn list(&mut self, name: &'static str) -> Result<&'a [Value]> {
        match self.get(name) {
            None => Ok(&[]),
            Some(Value::Array(a)) => Ok(a),
            Some(other) => Err(self.wrong(name, other, "a list")),
        }
    }
    fn types(&mut self, name: &'static str, n_types: usize) -> Result<Vec<u32>> {
        self.list(name)?.iter().map(|v| self.as_type(name, v, n_types)).collect()
    }
    fn as_type(&self, name: &str, v: &Value, n_types: usize) -> Result<u32> {
        v.as_u64()
            .filter(|&t| (t as usize) < n_types)
            .map(|t| t as u32)
            .ok_or_else(|| self.wrong(name, v, &format!("types from 0 to {}", n_types - 1)))
    }
    fn pairs(&mut self, name: &'static str, n_types: usize) -> Result<Vec<(u32, u32)>> {
        self.list(name)?
            .iter()
            .map(|v| match v.as_array().map(Vec::as_slice) {
                Some([a, b]) => Ok((self.as_type(name, a, n_types)?, self.as_type(name, b, n_types)?)),
                _ => Err(self.wrong(name, v, "a list of type pairs")),
            })
            .collect()
    }
    /// The precision of the training; checked although the caller of an engine chooses that of a run.
    fn precision(&mut self) -> Result<()> {
        let word = self.text("precision", "default")?;
        match word.to_ascii_lowercase().as_str() {
            "default" | "float64" | "double" | "float32" | "single" | "float16" | "half" | "bfloat16" => Ok(()),
            _ => Err(bad(self.section, "precision", &word, "float64, float32, float16 or bfloat16")),
        }
    }
    fn activation(&mut self, name: &'static str) -> Result<Activation> {
        let word = self.text(name, "silu")?;
        Ok(match word.to_ascii_lowercase().as_str() {
            "silu" => Activation::Silu,
            "relu" => Activation::Relu,
            "relu6" => Activation::Relu6,
            "gelu" | "gelu_tf" => Activation::Gelu,
            "tanh" => Activation::Tanh,
            "sigmoid" => Activation::Sigmoid,
            "softplus" => Activation::Softplus,
            "linear" | "none" => Activation::Linear,
            _ => {
                let known = "silu, relu, relu6, gelu, gelu_tf, tanh, sigmoid, softplus, linear or none";
                return Err(bad(self.section, name, &word, known));
            }
        })
    }
    fn depth_attention(&mut self, name: &'static str) -> Result<DepthAttention> {
        match self.text(name, "none")?.as_str() {
            "none" => Ok(DepthAttention::None),
            "independent" => Ok(DepthAttention::Independent),
            "dependent" => Ok(DepthAttention::Dependent),
            other => Err(bad(self.section, name, other, "none, independent or dependent")),
        }
    }
    /// Refuses options that were neither read nor are known to be without effect on energies.
    fn finish(&self, harmless: &[&str]) -> Result<()> {
        match self.map.keys().find(|k| !self.seen.contains(k.as_str()) && !harmless.contains(&k.as_str())) {
            None => Ok(()),
            Some(name) => Err(Error::Unsupported(format!(
                "option {}.{name} is not known to this version of sezm and could change the numbers; use a newer sezm",
                self.section
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(descriptor: Value, model: Value, fitting: Value) -> Result<Config> {
        let mut params = json!({"type_map": ["O", "H"], "descriptor": descriptor, "fitting_net": fitting});
        let more = model.as_object().unwrap().clone();
        params.as_object_mut().unwrap().extend(more);
        Config::from_json(&params, 1.1)
    }
    fn descriptor(name: &str, value: Value) -> Result<Config> {
        read(json!({name: value}), json!({}), json!({}))
    }
    fn model(name: &str, value: Value) -> Result<Config> {
        read(json!({}), json!({name: value}), json!({}))
    }
    fn fitting(name: &str, value: Value) -> Result<Config> {
        read(json!({}), json!({}), json!({name: value}))
    }
    fn message(found: Result<Config>) -> String {
        match found {
            Err(Error::Unsupported(message)) => message,
            other => panic!("accepted: {other:?}"),
        }
    }

    #[test]
    fn defaults_are_those_of_the_table() {
        let c = read(json!({}), json!({}), json!({})).unwrap();
        assert_eq!((c.rcut, c.n_radial, c.basis, c.env_exp), (6.0, 16, Basis::Bessel, [7, 5]));
        assert_eq!((c.channels, &c.radial_mlp[..], c.edge_norm, c.use_env_seed), (64, &[64][..], true, true));
        let block = BlockDegrees { l: 3, m: 1, k: 1, node_l: 3 };
        assert_eq!((c.lmax, c.kmax, c.extra_node_l, &c.blocks[..]), (3, 1, 0, &[block; 3][..]));
        assert_eq!((c.mixing_layers, c.radial_mode), (4, RadialMode::DegreeChannel { rank: 1 }));
        assert_eq!((c.n_focus, c.focus_dim, c.n_atten_head), (1, 64, 1));
        assert_eq!((c.grid_mlp, c.grid_branch, c.ffn_neurons, c.ffn_blocks), ([false; 3], [0; 3], 0, 1));
        assert_eq!((c.s2_activation, c.lebedev_quadrature), ([false, true], [true, true]));
        assert_eq!(c.sandwich_norm, [false, true, true, false]);
        assert_eq!((c.readout, c.readout_layers), (Readout::Scalar, 1));
        assert_eq!((c.activation, c.glu_activation, c.eps), (Activation::Silu, true, 1e-7));
        assert!(c.exclude_types.is_empty() && c.atom_exclude_types.is_empty());
        // 32 ceil(8 * 64 / 3 / 32)
        assert_eq!(
            (&c.fitting.neuron[..], c.fitting.activation, c.fitting.bias_out),
            (&[192][..], Activation::Silu, false)
        );
        assert_eq!(c.unsupported(), Vec::<String>::new());
    }

    #[test]
    fn options_are_read_as_the_reference_reads_them() {
        assert_eq!(descriptor("radial_mlp", json!([0, 7])).unwrap().radial_mlp, [64, 7]);
        assert_eq!(descriptor("grid_branch", json!(2)).unwrap().grid_branch, [2; 3]);
        assert_eq!(descriptor("grid_mlp", json!([false, true, false])).unwrap().grid_mlp, [false, true, false]);
        assert_eq!(descriptor("lebedev_quadrature", json!(null)).unwrap().lebedev_quadrature, [true; 2]);
        assert_eq!(descriptor("lebedev_quadrature", json!(false)).unwrap().lebedev_quadrature, [false; 2]);
        assert_eq!(descriptor("mmax", json!(null)).unwrap().blocks[0].m, 3);
        assert_eq!(descriptor("mmax", json!(9)).unwrap().blocks[0].m, 3);
        assert_eq!(descriptor("kmax", json!(9)).unwrap().blocks[0].k, 3);
        assert_eq!(descriptor("type", json!("SeZM")).unwrap().channels, 64);
        let schedule = json!({"l_schedule": [3, 1], "m_schedule": [2, 0], "n_blocks": 7, "extra_node_l": 1});
        let c = read(schedule, json!({}), json!({})).unwrap();
        let blocks = [BlockDegrees { l: 3, m: 2, k: 1, node_l: 4 }, BlockDegrees { l: 1, m: 0, k: 1, node_l: 2 }];
        assert_eq!((&c.blocks[..], c.node_lmax(), c.readout_degree()), (&blocks[..], 4, 2));
        let c = read(json!({"mixing_layers": 4, "so2_layers": 2}), json!({}), json!({})).unwrap();
        assert_eq!(c.mixing_layers, 2);
        let c = read(json!({"exclude_types": [[0, 1]]}), json!({"pair_exclude_types": [[1, 1]]}), json!({})).unwrap();
        assert_eq!(c.exclude_types, [(0, 1), (1, 1)]);
        assert!(descriptor("n_blocks", json!(0)).unwrap().blocks.is_empty());
    }

    /// Widths of SPEC section 0 for the channel counts of the released models.
    #[test]
    fn automatic_widths_are_multiples_of_32() {
        let with = |channels: usize| descriptor("channels", json!(channels)).unwrap();
        assert_eq!((with(32).ffn_hidden(true), with(32).ffn_hidden(false)), (96, 128));
        assert_eq!((with(64).ffn_hidden(true), with(64).ffn_hidden(false)), (192, 256));
        let widths = EnvWidths { embed: 64, types: 16, axis: 8, radial: 32, hidden: 128 };
        assert_eq!(with(64).env_widths(), widths);
        let widths = EnvWidths { embed: 32, types: 8, axis: 4, radial: 32, hidden: 64 };
        assert_eq!(with(32).env_widths(), widths);
    }

    const HUGE: u64 = u64::MAX;

    #[test]
    fn wrong_values_of_descriptor_options_name_the_option() {
        let bad: &[(&str, &[Value])] = &[
            ("type", &[json!("dpa3"), json!("se_e2_a"), json!(4)]),
            ("rcut", &[json!("6"), json!(0), json!(-1.0), json!([6.0]), json!(true)]),
            ("n_radial", &[json!(0), json!(-1), json!(1.5), json!("16"), json!(HUGE), json!([16])]),
            ("basis_type", &[json!("gaussian/fix"), json!(1), json!(["bessel"])]),
            ("env_exp", &[json!(5), json!([7]), json!([7, 5, 3]), json!([0, 5]), json!(["7", 5]), json!([HUGE, 5])]),
            ("channels", &[json!(0), json!(-64), json!(64.0), json!("64"), json!(1u64 << 40), json!(true)]),
            ("radial_mlp", &[json!(0), json!(["a"]), json!([-1]), json!([HUGE])]),
            ("edge_norm", &[json!([true, false, true]), json!("yes"), json!(2), json!(1.0)]),
            ("use_env_seed", &[json!("yes"), json!([true])]),
            ("random_gamma", &[json!("yes"), json!(2)]),
            ("lmax", &[json!(33), json!(-1), json!("3"), json!(HUGE), json!([3])]),
            ("l_schedule", &[json!(3), json!([1, 3]), json!([HUGE]), json!(["3"])]),
            ("mmax", &[json!("1"), json!(-1), json!(1.5), json!(true)]),
            ("m_schedule", &[json!([1]), json!([4, 4, 4]), json!(1), json!([HUGE, 1, 1])]),
            ("kmax", &[json!("1"), json!(-1), json!(HUGE)]),
            ("extra_node_l", &[json!(30), json!(-1), json!("0"), json!(HUGE)]),
            ("n_blocks", &[json!(-1), json!("3"), json!(HUGE), json!(3.0)]),
            ("mixing_layers", &[json!(-1), json!("4"), json!(HUGE)]),
            ("so2_layers", &[json!(-1), json!("4"), json!([4])]),
            ("so2_norm", &[json!("no"), json!(3)]),
            ("so2_attn_res", &[json!("some"), json!(true)]),
            ("layer_scale", &[json!("no"), json!(0.5)]),
            ("mlp_bias", &[json!("no"), json!([false])]),
            ("radial_so2_mode", &[json!("channel"), json!(1)]),
            ("radial_so2_rank", &[json!(-1), json!("1"), json!(HUGE)]),
            ("n_focus", &[json!(0), json!(5000), json!("1"), json!(HUGE)]),
            ("focus_dim", &[json!(-1), json!("0"), json!(HUGE)]),
            ("n_atten_head", &[json!(3), json!(-1), json!("1"), json!(HUGE)]),
            ("atten_f_mix", &[json!("no"), json!(7)]),
            ("atten_v_proj", &[json!("no"), json!(7)]),
            ("atten_o_proj", &[json!("no"), json!(7)]),
            ("edge_cartesian", &[json!("no"), json!(7)]),
            ("node_wise_s2", &[json!("no"), json!(7)]),
            ("node_wise_so3", &[json!("no"), json!(7)]),
            ("message_node_s2", &[json!("no"), json!(7)]),
            ("message_node_so3", &[json!("no"), json!(7)]),
            ("ffn_so3_grid", &[json!("no"), json!(7)]),
            ("grid_branch", &[json!([0, 0]), json!("0"), json!(-1), json!([0, 0, HUGE]), json!([0, 0, "1"])]),
            ("grid_mlp", &[json!([false, true]), json!("no"), json!([0, 0, 5])]),
            ("s2_activation", &[json!([true]), json!(true), json!(["no", "yes"])]),
            ("lebedev_quadrature", &[json!([true]), json!("yes"), json!(5)]),
            ("ffn_neurons", &[json!(-1), json!("0"), json!(HUGE)]),
            ("ffn_blocks", &[json!(0), json!(-1), json!("1"), json!(HUGE)]),
            ("sandwich_norm", &[json!([true]), json!(true), json!("no"), json!([0, 1, 1, 2])]),
            ("full_attn_res", &[json!("some"), json!(false)]),
            ("block_attn_res", &[json!("some"), json!(false)]),
            ("so3_readout", &[json!("branch"), json!(true)]),
            ("readout_layers", &[json!(0), json!("1"), json!(HUGE)]),
            ("activation_function", &[json!("swish"), json!(1)]),
            ("glu_activation", &[json!("no"), json!(7)]),
            ("use_amp", &[json!("no"), json!(7)]),
            (
                "exclude_types",
                &[json!([[0, 2]]), json!([0]), json!([[0]]), json!([[0, -1]]), json!("OH"), json!([["O", "H"]])],
            ),
            ("precision", &[json!("float99"), json!(32)]),
            ("eps", &[json!("small"), json!(-1e-7), json!([1e-7])]),
            ("add_chg_spin_ebd", &[json!("no"), json!(7)]),
        ];
        for (name, values) in bad {
            for value in *values {
                let message = message(descriptor(name, value.clone()));
                assert!(message.contains("descriptor"), "{name}: {message}");
                let named = message.contains(&format!(".{name}")) || message.contains(&format!("descriptor {name} "));
                // A degree is checked together with what it is added to.
                let together = ["lmax", "extra_node_l"].contains(name) && message.contains("lmax + extra_node_l");
                assert!(named || together, "{name} = {value}: {message}");
            }
        }
    }

    #[test]
    fn wrong_values_of_model_and_fitting_options_name_the_option() {
        let bad: &[(&str, &[Value])] = &[
            ("type", &[json!("ener"), json!(1)]),
            ("type_map", &[json!([]), json!("OH"), json!([1, 2]), json!(null)]),
            ("descriptor", &[json!(null), json!([])]),
            ("fitting_net", &[json!(null), json!(3)]),
            ("bridging_method", &[json!(5), json!(["ZBL"])]),
            ("bridging_r_inner", &[json!("0.5"), json!([0.5])]),
            ("bridging_r_outer", &[json!("0.8"), json!(true)]),
            ("pair_exclude_types", &[json!([[0, 9]]), json!(1)]),
            ("atom_exclude_types", &[json!([2]), json!(["O"]), json!(0)]),
            ("use_compile", &[json!("no"), json!(7)]),
            ("enable_tf32", &[json!("no"), json!(7)]),
        ];
        for (name, values) in bad {
            for value in *values {
                let message = message(model(name, value.clone()));
                assert!(message.contains(name), "{name} = {value}: {message}");
            }
        }
        let bad: &[(&str, &[Value])] = &[
            ("type", &[json!("dipole"), json!(1)]),
            ("neuron", &[json!(240), json!(["a"]), json!([-1]), json!([HUGE])]),
            ("activation_function", &[json!("swish"), json!(1)]),
            ("precision", &[json!("float99"), json!(32)]),
            ("bias_out", &[json!("no"), json!(7)]),
            ("resnet_dt", &[json!("no"), json!(7)]),
            ("numb_fparam", &[json!(-1), json!("0"), json!(HUGE)]),
            ("numb_aparam", &[json!(-1), json!("0"), json!(HUGE)]),
            ("dim_case_embd", &[json!(-1), json!("0"), json!(HUGE)]),
            ("case_film_embd", &[json!("no"), json!(7)]),
            ("atom_ener", &[json!(1.0), json!("none")]),
            ("exclude_types", &[json!([2]), json!(["O"]), json!(0)]),
        ];
        for (name, values) in bad {
            for value in *values {
                let message = message(fitting(name, value.clone()));
                assert!(message.contains(&format!("fitting_net.{name}")), "{name} = {value}: {message}");
            }
        }
    }

    #[test]
    fn unknown_options_are_refused_by_name() {
        assert!(message(descriptor("edge_magic", json!(null))).contains("descriptor.edge_magic is not known"));
        assert!(message(model("charge_magic", json!(1))).contains("model.charge_magic is not known"));
        assert!(message(fitting("fit_magic", json!([]))).contains("fitting_net.fit_magic is not known"));
        for version in [0.9, 1.3, 2.0, f64::NAN] {
            let found = Config::from_json(&json!({"type_map": ["O"], "descriptor": {}, "fitting_net": {}}), version);
            assert!(message(found).contains(&format!("version {version} is not known")));
        }
    }

    #[test]
    fn options_that_no_engine_evaluates_are_listed_by_name() {
        let one = |found: Result<Config>, name: &str| {
            let refused = found.unwrap().unsupported();
            assert_eq!(refused.len(), 1, "{name}: {refused:?}");
            assert!(refused[0].starts_with(name), "{name}: {refused:?}");
        };
        let cartesian = json!({"edge_cartesian": true, "lmax": 2});
        one(read(cartesian, json!({}), json!({})), "edge_cartesian");
        for name in [
            "so2_norm",
            "atten_f_mix",
            "atten_v_proj",
            "atten_o_proj",
            "mlp_bias",
            "layer_scale",
            "node_wise_s2",
            "node_wise_so3",
            "message_node_s2",
            "add_chg_spin_ebd",
        ] {
            one(descriptor(name, json!(true)), name);
        }
        for name in ["so2_attn_res", "full_attn_res", "block_attn_res"] {
            one(descriptor(name, json!("dependent")), name);
            one(descriptor(name, json!("independent")), name);
        }
        one(descriptor("node_cartesian", json!("default")), "node_cartesian");
        one(descriptor("node_cartesian", json!(2)), "node_cartesian");
        one(descriptor("s2_activation", json!([true, true])), "s2_activation[0]");
        one(descriptor("lebedev_quadrature", json!(false)), "lebedev_quadrature");
        let mixing = json!({"mixing_layers": 0, "radial_so2_mode": "none"});
        one(read(mixing, json!({}), json!({})), "mixing_layers: 0 with radial_so2_mode none");
        one(descriptor("use_spin", json!([true, false])), "spin");
        one(descriptor("inner_clamp_r_inner", json!(0.5)), "bridging_method");
        one(model("spin", json!({"use_spin": [true]})), "spin");
        one(model("bridging_method", json!("ZBL")), "bridging_method");
        one(model("atom_exclude_types", json!([1])), "atom_exclude_types");
        one(fitting("numb_fparam", json!(2)), "fitting_net numb_fparam");
        one(fitting("numb_aparam", json!(2)), "fitting_net numb_aparam");
        one(fitting("dim_case_embd", json!(2)), "fitting_net dim_case_embd");
        one(fitting("case_film_embd", json!(true)), "fitting_net case_film_embd");
        one(fitting("exclude_types", json!([0])), "fitting_net exclude_types");
        one(fitting("atom_ener", json!([null, 1.0])), "fitting_net atom_ener");
        // Set, but without effect on energies.
        for found in [
            descriptor("edge_cartesian", json!(true)),
            model("bridging_method", json!("None")),
            model("bridging_r_inner", json!(0.5)),
            fitting("atom_ener", json!([null, null])),
            read(json!({"ffn_so3_grid": true, "lebedev_quadrature": false}), json!({}), json!({})),
        ] {
            assert_eq!(found.unwrap().unsupported(), Vec::<String>::new());
        }
    }
}
