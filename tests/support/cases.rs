//! The table: every kernel with the shapes that it is tested in. A new kernel adds a function and a line in `all`.

use super::{Argument, Case, Random, within};
use sezm::cuda::sources::Source;
use sezm::cuda::{Launch, Program, Real, wigner};
use sezm::math::wigner::{Wigner, edge_frame};

pub static PRIMITIVES: Source = Source {
    name: "primitives",
    text: include_str!("primitives.cu"),
    kernels: &["reductions", "geometry", "activations", "stream_columns", "product"],
};

pub static WARPGROUP: Source = Source {
    name: "warpgroup",
    text: include_str!("warpgroup.cu"),
    kernels: &["warpgroup_product_32", "warpgroup_product_64", "warpgroup_product_96", "warpgroup_product_128"],
};

/// Every case.
pub fn all() -> Vec<Case> {
    // Cases of one program stand together: it is compiled once.
    let mut cases = vec![geometry(), stream_columns(1), stream_columns(7), product()];
    cases.extend([reductions::<f32>("f32"), activations::<f32>("f32", 3e-6)]);
    cases.extend([reductions::<f64>("f64"), activations::<f64>("f64", 1e-14)]);
    cases.extend([(32, 1), (64, -1), (96, 1), (128, -1)].map(|(n, sign)| warpgroup_product(n, sign as f64)));
    for lmax in [0, 1, 2, 3, 6, 10, 11, 12] {
        // No edges, one, a tail after whole tiles. Records in f32 to half a unit in the last place of 1, in f64 to
        // the recursion's rounding.
        cases.extend([0, 1, 69].map(|n_edges| wigner_assemble::<f32>(lmax, n_edges, 3.1e-8)));
        cases.extend([0, 1, 69].map(|n_edges| wigner_assemble::<f64>(lmax, n_edges, 2e-14)));
    }
    cases
}

/// Numbers that kernels take in either precision.
pub trait TestReal: Real {
    fn from_f64(x: f64) -> Self;
    fn to_f64(self) -> f64;
}
impl TestReal for f32 {
    fn from_f64(x: f64) -> Self {
        x as f32
    }
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
}
impl TestReal for f64 {
    fn from_f64(x: f64) -> Self {
        x
    }
    fn to_f64(self) -> f64 {
        self
    }
}

pub fn read_f64<T: TestReal>(argument: &Argument) -> Vec<f64> {
    argument.read::<T>().into_iter().map(T::to_f64).collect()
}

fn reductions<T: TestReal>(precision: &str) -> Case {
    let (blocks, threads) = (3, 96);
    let values = Random::new(1).vector(blocks * threads, T::from_f64);
    let exact: Vec<f64> = values.iter().map(|v| v.to_f64()).collect();
    Case {
        name: format!("reductions {precision}"),
        program: Program::new(&PRIMITIVES).real::<T>(),
        kernel: "reductions",
        launch: Launch::new(blocks as u32, threads as u32),
        arguments: vec![
            Argument::input(&values),
            Argument::output::<T>(values.len()),
            Argument::output::<T>(values.len()),
        ],
        check: Box::new(move |arguments| {
            let sums: Vec<f64> = exact
                .chunks(threads)
                .flat_map(|block| vec![block.iter().sum::<f64>() + threads as f64; threads])
                .collect();
            let largest: Vec<f64> =
                exact.chunks(8).flat_map(|eight| [eight.iter().copied().fold(f64::MIN, f64::max); 8]).collect();
            let epsilon = if size_of::<T>() == 4 { 2e-5 } else { 1e-13 };
            within("sum", &read_f64::<T>(&arguments[1]), &sums, epsilon)?;
            within("largest", &read_f64::<T>(&arguments[2]), &largest, 0.0)
        }),
    }
}

fn geometry() -> Case {
    let (grid, block) = ([2u32, 3, 2], [4u32, 5, 2]);
    let (blocks, threads) = (12u32, 40u32);
    Case {
        name: "geometry and integer atomics".into(),
        program: Program::new(&PRIMITIVES),
        kernel: "geometry",
        launch: Launch { grid, block, shared: 0 },
        arguments: vec![Argument::output::<u32>((blocks * threads) as usize), Argument::input(&[0u32, 0])],
        check: Box::new(move |arguments| {
            let expected: Vec<u32> = (0..blocks).flat_map(|b| (0..threads).map(move |t| 1000 * b + t)).collect();
            let count = [blocks * threads * (threads - 1) / 2, 1000 * (blocks - 1) + threads - 1];
            match (arguments[0].read::<u32>() == expected, arguments[1].read::<u32>()) {
                (true, found) if found == count => Ok(()),
                (order, found) => Err(format!("indices right: {order}; atomics {found:?}, expected {count:?}")),
            }
        }),
    }
}

fn activations<T: TestReal>(precision: &str, tolerance: f64) -> Case {
    let x: Vec<T> = [-100.0, -20.0, -3.0, -1.0, -0.3, -1e-3, 1e-3, 0.5, 1.0, 2.5, 5.9, 7.0, 30.0, 100.0]
        .iter()
        .map(|&v| T::from_f64(v))
        .collect();
    let exact: Vec<f64> = x.iter().map(|v| v.to_f64()).collect();
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let gelu = |x: f64| 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh());
    let softplus = |x: f64| x.max(0.0) + (-x.abs()).exp().ln_1p();
    // In the order of `enum Activation`; slopes by differences where they are not written out.
    let functions: [Box<dyn Fn(f64) -> f64 + Sync>; 8] = [
        Box::new(|x| x),
        Box::new(move |x| x * sigmoid(x)),
        Box::new(gelu),
        Box::new(f64::tanh),
        Box::new(|x| x.max(0.0)),
        Box::new(|x| x.clamp(0.0, 6.0)),
        Box::new(softplus),
        Box::new(sigmoid),
    ];
    let n = x.len();
    Case {
        name: format!("activations {precision}"),
        program: Program::new(&PRIMITIVES).real::<T>(),
        kernel: "activations",
        launch: Launch::new(1, 32),
        arguments: vec![
            Argument::input(&x),
            Argument::output::<T>(8 * n),
            Argument::output::<T>(8 * n),
            Argument::value(n as i32),
        ],
        check: Box::new(move |arguments| {
            let (value, slope) = (read_f64::<T>(&arguments[1]), read_f64::<T>(&arguments[2]));
            for (k, f) in functions.iter().enumerate() {
                for (i, &x) in exact.iter().enumerate() {
                    let scale = x.abs().max(1.0);
                    within(&format!("activation {k} of {x}"), &[value[k * n + i]], &[f(x)], tolerance * scale)?;
                    let h = 1e-4;
                    let difference = (8.0 * (f(x + h) - f(x - h)) - (f(x + 2.0 * h) - f(x - 2.0 * h))) / (12.0 * h);
                    within(&format!("slope {k} at {x}"), &[slope[k * n + i]], &[difference], 1e-9 + 2.0 * tolerance)?;
                }
            }
            Ok(())
        }),
    }
}

fn stream_columns(rows: usize) -> Case {
    let x = Random::new(2).vector(rows * 128, |v| v as f32);
    let mut sums = vec![0f32; 128];
    for row in x.chunks(128) {
        sums.iter_mut().zip(row).for_each(|(s, v)| *s += v);
    }
    let sums: Vec<f64> = sums.into_iter().map(f64::from).collect();
    Case {
        name: format!("asynchronous copies, {rows} rows"),
        program: Program::new(&PRIMITIVES),
        kernel: "stream_columns",
        launch: Launch::new(1, 128),
        arguments: vec![Argument::input(&x), Argument::output::<f32>(128), Argument::value(rows as i32)],
        check: Box::new(move |arguments| within("sum", &read_f64::<f32>(&arguments[1]), &sums, 0.0)),
    }
}

/// a[m][k] b[k][n] in f64, times `sign`.
fn multiply(a: &[f32], b: &[f32], (m, n, k): (usize, usize, usize), sign: f64) -> Vec<f64> {
    let element = |i: usize| (0..k).map(|q| f64::from(a[i / n * k + q]) * f64::from(b[q * n + i % n])).sum::<f64>();
    (0..m * n).map(|i| sign * element(i)).collect()
}

fn product() -> Case {
    let mut random = Random::new(3);
    let a = random.vector(16 * 16, |v| v as f32);
    let b = random.vector(16 * 8, |v| v as f32);
    let expected = multiply(&a, &b, (16, 8, 16), 1.0);
    Case {
        name: "warp product in split fp16".into(),
        program: Program::new(&PRIMITIVES),
        kernel: "product",
        launch: Launch::new(1, 32),
        arguments: vec![Argument::input(&a), Argument::input(&b), Argument::output::<f32>(16 * 8)],
        check: Box::new(move |arguments| {
            // 22 bits of 16 products of size one; fp16 alone would miss by 1e-3.
            within("c", &read_f64::<f32>(&arguments[2]), &expected, 4e-6)
        }),
    }
}

fn warpgroup_product(n: usize, sign: f64) -> Case {
    let steps = 5;
    let k = 16 * steps;
    let mut random = Random::new(n as u64);
    let a = random.vector(64 * k, |v| v as f32);
    let b = random.vector(k * n, |v| v as f32);
    let expected = multiply(&a, &b, (64, n, k), sign);
    // For each step the tile of leading parts, then of what they leave (the layout of wgmma.cuh).
    let mut packed = vec![0u16; 2 * k * n];
    for (row, values) in b.chunks(n).enumerate() {
        for (column, &value) in values.iter().enumerate() {
            let (step, q) = (row / 16, row % 16);
            let place = ((column / 8 * 2 + q / 8) * 8 + column % 8) * 8 + q % 8;
            let high = half::f16::from_f32(value);
            packed[2 * step * 16 * n + place] = high.to_bits();
            packed[(2 * step + 1) * 16 * n + place] = half::f16::from_f32(value - high.to_f32()).to_bits();
        }
    }
    Case {
        name: format!("warpgroup product, {n} columns"),
        program: Program::new(&WARPGROUP).wgmma(),
        kernel: WARPGROUP.kernels.iter().find(|name| name.ends_with(&format!("_{n}"))).unwrap(),
        // A ring of two slots of both parts, and two barriers.
        launch: Launch::new(1, 128).shared(2 * 2 * 32 * n as u32 + 16),
        arguments: vec![
            Argument::input(&a),
            Argument::input(&packed),
            Argument::output::<f32>(64 * n),
            Argument::value(steps as i32),
        ],
        check: Box::new(move |arguments| within("c", &read_f64::<f32>(&arguments[2]), &expected, 1e-5)),
    }
}

fn wigner_assemble<T: TestReal>(lmax: usize, n_edges: usize, tolerance: f64) -> Case {
    let wigner = Wigner::new(lmax);
    let record_len = wigner.record_len();
    assert_eq!(record_len, wigner::record_len(lmax));
    let mut random = Random::new(lmax as u64);
    let mut vec = random.vector(3 * n_edges, |v| 5.0 * v);
    // Along the poles and the seam between the two frames.
    for (edge, axis) in
        vec.chunks_mut(3).skip(1).zip([[0.0, 0.0, 2.0], [0.0, 0.0, -0.7], [3.0, 0.0, -0.0], [1e-9, 1e-9, -1.0]])
    {
        edge.copy_from_slice(&axis);
    }
    let mut expected = vec![0.0; n_edges * record_len];
    for (edge, record) in vec.chunks(3).zip(expected.chunks_mut(record_len)) {
        let length = edge.iter().map(|v| v * v).sum::<f64>().sqrt();
        wigner.assemble(&edge_frame([edge[0] / length, edge[1] / length, edge[2] / length]), record);
    }
    Case {
        name: format!("wigner {} lmax {lmax}, {n_edges} edges", T::NAME),
        program: wigner::program::<T>(lmax),
        kernel: "wigner_assemble",
        launch: wigner::launch(lmax, n_edges),
        arguments: vec![Argument::input(&vec), Argument::output::<T>(expected.len()), Argument::value(n_edges as i64)],
        check: Box::new(move |arguments| within("record", &read_f64::<T>(&arguments[1]), &expected, tolerance)),
    }
}
