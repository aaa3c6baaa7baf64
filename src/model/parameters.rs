//! The weights of a model, typed and shape-checked. Generic over the number type: read as f64, cast by an engine.

/// Row-major matrix; linear maps act on row vectors, `y = x W`, so `rows` is the input width (SPEC 0).
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Matrix<T> {
    pub rows: usize,
    pub cols: usize,
    pub data: Vec<T>,
}

impl<T: Copy> Matrix<T> {
    /// One row.
    pub fn row(&self, i: usize) -> &[T] {
        &self.data[i * self.cols..(i + 1) * self.cols]
    }
    /// The same matrix in another number type.
    pub fn cast<U>(&self, to: &impl Fn(T) -> U) -> Matrix<U> {
        Matrix { rows: self.rows, cols: self.cols, data: self.data.iter().map(|&x| to(x)).collect() }
    }
    /// Columns `first .. first + count`.
    pub fn columns(&self, first: usize, count: usize) -> Self {
        let data = (0..self.rows).flat_map(|r| self.row(r)[first..first + count].iter().copied()).collect();
        Matrix { rows: self.rows, cols: count, data }
    }
    /// Rows `first .. first + count`.
    pub fn row_block(&self, first: usize, count: usize) -> Self {
        let data = self.data[first * self.cols..(first + count) * self.cols].to_vec();
        Matrix { rows: count, cols: self.cols, data }
    }
}

/// One matrix a degree: the same for all m of a degree (SPEC 8.2).
pub type DegreeLinear<T> = Vec<Matrix<T>>;

/// All weights of one model.
#[derive(Debug, Clone)]
pub struct Parameters<T> {
    /// Type features, n_types x C.
    pub type_embedding: Matrix<T>,
    pub env_seed: Option<EnvSeed<T>>,
    /// Frequencies or centres of the radial basis; f64 in every precision, as the edge geometry is.
    pub radial_frequencies: Vec<f64>,
    pub radial: RadialNet<T>,
    pub blocks: Vec<Block<T>>,
    /// Residual read-out layers; the last one gives the descriptor.
    pub readout: Vec<Ffn<T>>,
    pub fitting: Fitting<T>,
}

/// Environment seed: FiLM on the scalar start value (SPEC 6).
#[derive(Debug, Clone)]
pub struct EnvSeed<T> {
    pub rbf1: Matrix<T>,
    pub rbf2: Matrix<T>,
    /// n_types x dt.
    pub type_embedding: Matrix<T>,
    pub g1: Matrix<T>,
    pub g2: Matrix<T>,
    /// (de * da) x 2C.
    pub output: Matrix<T>,
    /// RMS norm scales of the two halves, with `edge_norm`.
    pub film_norm: Option<[Vec<T>; 2]>,
    /// `exp` of the two strength parameters: of the scale and of the shift.
    pub film_strength: [T; 2],
}

/// Radial network (SPEC 5).
#[derive(Debug, Clone)]
pub struct RadialNet<T> {
    /// Hidden layers: matrix and, with `edge_norm`, the scale of the RMS norm before the activation.
    pub hidden: Vec<(Matrix<T>, Option<Vec<T>>)>,
    /// width x (Nmax + 1) C.
    pub last: Matrix<T>,
}

/// One interaction block (SPEC 8).
#[derive(Debug, Clone)]
pub struct Block<T> {
    pub pre_so2_norm: Option<EquivariantNorm<T>>,
    pub convolution: Convolution<T>,
    pub post_so2_norm: Option<EquivariantNorm<T>>,
    pub ffns: Vec<FfnUnit<T>>,
}

/// Equivariant RMS norm (SPEC 8.1).
#[derive(Debug, Clone)]
pub struct EquivariantNorm<T> {
    /// (L + 1) x C.
    pub scale: Matrix<T>,
    pub bias: Vec<T>,
    pub eps: f64,
}

/// SO(2) convolution (SPEC 8.2).
#[derive(Debug, Clone)]
pub struct Convolution<T> {
    /// C -> W.
    pub pre_mix: DegreeLinear<T>,
    /// C -> W for the radial features, where W is not C.
    pub radial_projection: Option<Matrix<T>>,
    pub degree_mixer: Option<DegreeMixer<T>>,
    pub layers: Vec<So2Layer<T>>,
    /// With more than one focus.
    pub competition: Option<Competition<T>>,
    /// With at least one head.
    pub attention: Option<Attention<T>>,
    pub product: Option<NodeProduct<T>>,
    /// W -> C.
    pub post_mix: DegreeLinear<T>,
}

/// Kernel between degrees from the radial features (SPEC 8.2, step 2).
#[derive(Debug, Clone)]
pub struct DegreeMixer<T> {
    /// ((L + 1) W) x (Z, Z R or Z W).
    pub weight: Matrix<T>,
    /// R x W; `None` for mode `degree` and for a full kernel.
    pub basis: Option<Matrix<T>>,
}

/// One layer of the gated SO(2) stack (SPEC 8.2, step 5), a matrix a focus.
#[derive(Debug, Clone)]
pub struct So2Layer<T> {
    /// `[focus]`: ((L + 1) Cf) x ((L + 1) Cf).
    pub m0: Vec<Matrix<T>>,
    /// `[m - 1][focus]`: rows and columns (sign, l, c), sign - first: `[[U, V], [-V, U]]`.
    pub m: Vec<Vec<Matrix<T>>>,
    /// `[focus]`: Cf x (L Cf), the gates of all layers but the last; none for L = 0.
    pub gate: Option<Vec<Matrix<T>>>,
    /// Whether the gated activation follows (all layers but the last).
    pub gated: bool,
}

/// Focus competition (SPEC 8.2, step 6).
#[derive(Debug, Clone)]
pub struct Competition<T> {
    /// F x Cf RMS norm scale, with `edge_norm`.
    pub norm: Option<Matrix<T>>,
    /// Cf x F.
    pub weight: Matrix<T>,
}

/// Attention over the edges of an atom (SPEC 8.2 b).
#[derive(Debug, Clone)]
pub struct Attention<T> {
    /// F x Cf.
    pub qk_norm: Matrix<T>,
    /// `[focus]`: Cf x Cf.
    pub query: Vec<Matrix<T>>,
    pub key: Vec<Matrix<T>>,
    /// `[focus]`: Cf x heads.
    pub radial_logit: Vec<Matrix<T>>,
    /// F x heads: softplus of the raw parameter plus eps, the null mass of the softmax.
    pub null_mass: Matrix<T>,
    /// F x Cf.
    pub gate_norm: Matrix<T>,
    /// `[focus]`: Cf x heads.
    pub gate: Vec<Matrix<T>>,
}

/// Product of the aggregated message with the node's own features on an SO(3) grid (SPEC 10.4).
#[derive(Debug, Clone)]
pub struct NodeProduct<T> {
    /// Cf -> Kf Cf.
    pub expand: DegreeLinear<T>,
    pub net: GridNet<T>,
    /// Kf Cf -> Cf.
    pub contract: DegreeLinear<T>,
    /// F x Cf.
    pub residual_scale: Matrix<T>,
}

/// Grid nonlinearity (SPEC 10.1): operation and scalar path.
#[derive(Debug, Clone)]
pub struct GridNet<T> {
    /// 1 for S2 grids, 2K + 1 for SO(3) grids.
    pub frames: usize,
    /// Channels of a frame.
    pub channels: usize,
    pub op: GridWeights<T>,
    /// `[focus]`: 2C' x C'.
    pub scalar_gate: Vec<Matrix<T>>,
}

/// Weights of the grid operation.
#[derive(Debug, Clone)]
pub enum GridWeights<T> {
    Glu,
    Mlp { left: Matrix<T>, right: Matrix<T>, out: Matrix<T> },
    Branch { left: Matrix<T>, right: Matrix<T>, router: Matrix<T>, out: Matrix<T> },
}

/// FFN with its norms (SPEC 8).
#[derive(Debug, Clone)]
pub struct FfnUnit<T> {
    pub pre_norm: Option<EquivariantNorm<T>>,
    pub ffn: Ffn<T>,
    pub post_norm: Option<EquivariantNorm<T>>,
}

/// FFN (SPEC 9).
#[derive(Debug, Clone)]
pub struct Ffn<T> {
    /// C -> n1.
    pub linear1: DegreeLinear<T>,
    pub nonlinearity: FfnNonlinearity<T>,
    /// n2 -> C.
    pub linear2: DegreeLinear<T>,
}

/// What stands between the two linear maps of an FFN.
#[derive(Debug, Clone)]
pub enum FfnNonlinearity<T> {
    /// Product on an SO(3) grid with frames |k| <= K.
    So3Grid { k: usize, net: GridNet<T> },
    /// Product on the sphere.
    S2Grid { net: GridNet<T> },
    /// Gates from the scalars; `glu`: the first half is the value, the second the gate. No gates for degree 0.
    Gated { hidden: usize, glu: bool, gate: Option<Matrix<T>> },
}

/// Fitting net and energy shifts (SPEC 16).
#[derive(Debug, Clone)]
pub struct Fitting<T> {
    /// Hidden layers: in x 2n and 2n biases; value first, gate second.
    pub hidden: Vec<(Matrix<T>, Vec<T>)>,
    /// n_last x 1.
    pub output: Vec<T>,
    pub output_bias: T,
    /// Energy of each type inside the net, eV.
    pub type_bias: Vec<T>,
    /// Energy of each type added in f64, eV.
    pub out_bias: Vec<f64>,
}

impl Fitting<f64> {
    /// Energy shift of each type, eV: biases of the net and of the data set.
    pub fn shifts(&self) -> Vec<f64> {
        self.type_bias.iter().zip(&self.out_bias).map(|(a, b)| a + b + self.output_bias).collect()
    }
}
