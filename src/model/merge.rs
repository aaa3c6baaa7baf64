//! Linear maps that follow each other without anything between them, multiplied once in f64: fewer products a step.

use super::parameters::{
    Convolution, DegreeLinear, EnvSeed, Ffn, FfnNonlinearity, GridNet, GridWeights, Matrix, NodeProduct, Parameters,
};

/// The linear maps in front of a grid operation: degree-wise map, frames and the operation's own projections in one.
#[derive(Debug, Clone)]
pub struct GridInput {
    /// `[l]`: in x (frames * width), frame slow.
    pub left: DegreeLinear<f64>,
    pub right: DegreeLinear<f64>,
    /// Channels of a frame on the grid.
    pub width: usize,
    /// in x 2C': the scalar path of the self mode (SPEC 10.1); in the cross mode the scalars are the inputs themselves.
    pub scalars: Option<Matrix<f64>>,
}

/// `a b`.
pub fn multiply(a: &Matrix<f64>, b: &Matrix<f64>) -> Matrix<f64> {
    assert_eq!(a.cols, b.rows);
    let mut data = vec![0.0; a.rows * b.cols];
    for i in 0..a.rows {
        let out = &mut data[i * b.cols..(i + 1) * b.cols];
        for k in 0..a.cols {
            let x = a.data[i * a.cols + k];
            out.iter_mut().zip(b.row(k)).for_each(|(o, &y)| *o += x * y);
        }
    }
    Matrix { rows: a.rows, cols: b.cols, data }
}

/// Matrices of equal height side by side.
fn side_by_side(parts: &[Matrix<f64>]) -> Matrix<f64> {
    let rows = parts[0].rows;
    let data = (0..rows).flat_map(|r| parts.iter().flat_map(move |m| m.row(r).iter().copied())).collect();
    Matrix { rows, cols: parts.iter().map(|m| m.cols).sum(), data }
}

/// Input maps of a self-mode grid FFN (SPEC 9 and 10.1); `None` for a gated FFN.
pub fn ffn_input(ffn: &Ffn<f64>) -> Option<GridInput> {
    let net = match &ffn.nonlinearity {
        FfnNonlinearity::So3Grid { net, .. } | FfnNonlinearity::S2Grid { net } => net,
        FfnNonlinearity::Gated { .. } => return None,
    };
    let (frames, c) = (net.frames, net.channels);
    // Frame k of the two halves of a degree's map.
    let half = |w: &Matrix<f64>, side: usize, k: usize| w.columns((side * frames + k) * c, c);
    let map = |side: usize| {
        let frame = |w: &Matrix<f64>, k: usize| match &net.op {
            GridWeights::Glu => half(w, side, k),
            GridWeights::Mlp { left, right, .. } => {
                multiply(&side_by_side(&[half(w, 0, k), half(w, 1, k)]), if side == 0 { left } else { right })
            }
            GridWeights::Branch { left, right, .. } => {
                multiply(&half(w, side, k), if side == 0 { left } else { right })
            }
        };
        let degree = |w: &Matrix<f64>| side_by_side(&(0..frames).map(|k| frame(w, k)).collect::<Vec<_>>());
        ffn.linear1.iter().map(degree).collect::<DegreeLinear<f64>>()
    };
    let (left, right) = (map(0), map(1));
    let scalars = side_by_side(&[half(&ffn.linear1[0], 0, 0), half(&ffn.linear1[0], 1, 0)]);
    Some(GridInput { width: left[0].cols / frames, left, right, scalars: Some(scalars) })
}

/// Input maps of the message-node product (cross mode, SPEC 10.1): left acts on the message, right on the node.
pub fn product_input(product: &NodeProduct<f64>) -> GridInput {
    let net: &GridNet<f64> = &product.net;
    let (frames, c) = (net.frames, net.channels);
    let map = |side: usize| {
        let frame = |w: &Matrix<f64>, k: usize| match &net.op {
            GridWeights::Glu => w.columns(k * c, c),
            GridWeights::Mlp { left, right, .. } | GridWeights::Branch { left, right, .. } => {
                multiply(&w.columns(k * c, c), if side == 0 { left } else { right })
            }
        };
        let degree = |w: &Matrix<f64>| side_by_side(&(0..frames).map(|k| frame(w, k)).collect::<Vec<_>>());
        product.expand.iter().map(degree).collect::<DegreeLinear<f64>>()
    };
    let (left, right) = (map(0), map(1));
    GridInput { width: left[0].cols / frames, left, right, scalars: None }
}

/// The radial features of one block as one map (SPEC 5 and 8.2): last layer of the radial network, projection to the
/// hidden width, degree mixer and radial logits are linear without anything between them.
///
/// `kernel_e = w_e (h_e edge) + types[src] + types[dst]`, `h` the last hidden layer of the radial network (the factor
/// `w_e` from descriptor version 1.1 on). The first `mixing` values are the degree kernel (mode none: the factors
/// `[l][W]`), the others the attention's radial logits `[focus][head]`.
#[derive(Debug, Clone)]
pub struct RadialKernel {
    /// width of `h` x (mixing + logits).
    pub edge: Matrix<f64>,
    /// n_types x (mixing + logits).
    pub types: Matrix<f64>,
    pub mixing: usize,
}

/// Merges the radial maps of a block of message degree `l`.
pub fn radial_kernel(weights: &Parameters<f64>, convolution: &Convolution<f64>, l: usize) -> RadialKernel {
    let channels = weights.type_embedding.cols;
    let project = |m: Matrix<f64>| match &convolution.radial_projection {
        Some(p) => multiply(&m, p),
        None => m,
    };
    let last = &weights.radial.last;
    let degree: Vec<Matrix<f64>> = (0..=l).map(|l| project(last.columns(l * channels, channels))).collect();
    let types = project(weights.type_embedding.clone());
    let w = types.cols;
    let (mut edge, mut of_types) = match &convolution.degree_mixer {
        None => (side_by_side(&degree), side_by_side(&vec![types.clone(); l + 1])),
        Some(mixer) => {
            let block = |l: usize| mixer.weight.row_block(l * w, w);
            let blocks: Vec<Matrix<f64>> = (0..=l).map(block).collect();
            let edge = degree.iter().zip(&blocks).map(|(d, b)| multiply(d, b)).reduce(add);
            let types = blocks.iter().map(|b| multiply(&types, b)).reduce(add);
            // There is always degree 0.
            (edge.unwrap_or_default(), types.unwrap_or_default())
        }
    };
    let mixing = edge.cols;
    if let Some(attention) = &convolution.attention {
        let logits = block_diagonal(&attention.radial_logit);
        edge = side_by_side(&[edge, multiply(&degree[0], &logits)]);
        of_types = side_by_side(&[of_types, multiply(&types, &logits)]);
    }
    RadialKernel { edge, types: of_types, mixing }
}

/// `a + b`.
fn add(mut a: Matrix<f64>, b: Matrix<f64>) -> Matrix<f64> {
    a.data.iter_mut().zip(b.data).for_each(|(x, y)| *x += y);
    a
}

/// Matrices along the diagonal, zeros elsewhere.
fn block_diagonal(parts: &[Matrix<f64>]) -> Matrix<f64> {
    let (rows, cols) = (parts.iter().map(|m| m.rows).sum(), parts.iter().map(|m| m.cols).sum());
    let mut out = Matrix { rows, cols, data: vec![0.0; rows * cols] };
    let (mut r0, mut c0) = (0, 0);
    for m in parts {
        for r in 0..m.rows {
            out.data[(r0 + r) * cols + c0..][..m.cols].copy_from_slice(m.row(r));
        }
        r0 += m.rows;
        c0 += m.cols;
    }
    out
}

/// Edge maps of the environment seed (SPEC 6): the second radial layer and the radial rows of the first layer of `g` in
/// one, and that layer's type rows summed once a type.
#[derive(Debug, Clone)]
pub struct SeedMaps {
    /// dr x dh.
    pub radial: Matrix<f64>,
    /// n_types x dh.
    pub source_types: Matrix<f64>,
    pub destination_types: Matrix<f64>,
}

/// Merges the edge maps of an environment seed.
pub fn seed_maps(seed: &EnvSeed<f64>) -> SeedMaps {
    let (dr, dt) = (seed.rbf2.cols, seed.type_embedding.cols);
    SeedMaps {
        radial: multiply(&seed.rbf2, &seed.g1.row_block(0, dr)),
        source_types: multiply(&seed.type_embedding, &seed.g1.row_block(dr, dt)),
        destination_types: multiply(&seed.type_embedding, &seed.g1.row_block(dr + dt, dt)),
    }
}
