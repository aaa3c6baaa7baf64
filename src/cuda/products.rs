//! Tables of grouped matrix products (`kernels/node_linear.cu`): which blocks of which arrays are multiplied.

use crate::model::parameters::Matrix;

/// One block of the result; zeros stand for what the launch gives.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Job {
    pub c: i64,
    pub c_row: i32,
    pub m: i32,
    pub n: i32,
    pub ldc: i32,
    pub first_segment: i32,
    pub segments: i32,
}

/// One product of a job's sum.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Segment {
    pub a: i64,
    pub b: i64,
    pub a_row: i32,
    pub b_row: i32,
    pub k: i32,
    pub lda: i32,
    pub ldb: i32,
    pub unused: i32,
}

/// A table and the matrices it multiplies with, one after the other.
#[derive(Debug, Clone, Default)]
pub struct Products {
    pub jobs: Vec<Job>,
    pub segments: Vec<Segment>,
    /// Constant factors; which side they are on is the table's business.
    pub weights: Vec<f64>,
}

impl Products {
    /// A constant matrix; its place among the weights.
    fn constant(&mut self, m: &Matrix<f64>) -> i64 {
        self.weights.extend_from_slice(&m.data);
        (self.weights.len() - m.data.len()) as i64
    }
    fn job(&mut self, job: Job, segments: &[Segment]) {
        let first_segment = self.segments.len() as i32;
        self.segments.extend_from_slice(segments);
        self.jobs.push(Job { first_segment, segments: segments.len() as i32, ..job });
    }

    /// `C = A W` (rows, lda and ldc from the launch).
    pub fn plain(w: &Matrix<f64>) -> Self {
        let mut p = Self::default();
        let b = p.constant(w);
        p.job(
            Job { n: w.cols as i32, ..Job::default() },
            &[Segment { b, k: w.rows as i32, ldb: w.cols as i32, ..Segment::default() }],
        );
        p
    }

    /// One matrix a degree on rows `[(l, m)][node][channel]`.
    pub fn degrees(weights: &[Matrix<f64>]) -> Self {
        let mut p = Self::default();
        for (l, w) in weights.iter().enumerate() {
            let b = p.constant(w);
            for row in l * l..(l + 1) * (l + 1) {
                p.job(
                    Job { c_row: row as i32, n: w.cols as i32, ..Job::default() },
                    &[Segment { a_row: row as i32, b, k: w.rows as i32, ldb: w.cols as i32, ..Segment::default() }],
                );
            }
        }
        p
    }

    /// Degree-wise maps to all frames of a degree: `in -> [frame][(l, m)][row][width]`.
    pub fn expand(weights: &[Matrix<f64>], frames: usize) -> Self {
        let mut p = Self::default();
        let packed = weights.len() * weights.len();
        for (l, w) in weights.iter().enumerate() {
            let (b, width) = (p.constant(w), w.cols / frames);
            for frame in 0..frames.min(2 * l + 1) {
                for row in l * l..(l + 1) * (l + 1) {
                    let segment = Segment {
                        a_row: row as i32,
                        b: b + (frame * width) as i64,
                        k: w.rows as i32,
                        ldb: w.cols as i32,
                        ..Segment::default()
                    };
                    p.job(Job { c_row: (frame * packed + row) as i32, n: width as i32, ..Job::default() }, &[segment]);
                }
            }
        }
        p
    }

    /// Sums over the frames of a degree: `[frame][(l, m)][row][width] -> [(l, m)][row][out]`.
    pub fn contract(weights: &[Matrix<f64>], frames: usize) -> Self {
        let mut p = Self::default();
        let packed = weights.len() * weights.len();
        for (l, w) in weights.iter().enumerate() {
            let (b, width) = (p.constant(w), w.rows / frames);
            for row in l * l..(l + 1) * (l + 1) {
                let segments: Vec<Segment> = (0..frames.min(2 * l + 1))
                    .map(|frame| Segment {
                        a_row: (frame * packed + row) as i32,
                        b: b + (frame * width * w.cols) as i64,
                        k: width as i32,
                        ldb: w.cols as i32,
                        ..Segment::default()
                    })
                    .collect();
                p.job(Job { c_row: row as i32, n: w.cols as i32, ..Job::default() }, &segments);
            }
        }
        p
    }

    /// One map on every row that a frame has: `[frame][(l, m)][row][in] -> [..][out]`.
    pub fn frames(w: &Matrix<f64>, degrees: usize, frames: usize) -> Self {
        let mut p = Self::default();
        let (b, packed) = (p.constant(w), degrees * degrees);
        for frame in 0..frames {
            for row in frame.div_ceil(2).pow(2)..packed {
                let at = (frame * packed + row) as i32;
                p.job(
                    Job { c_row: at, n: w.cols as i32, ..Job::default() },
                    &[Segment { a_row: at, b, k: w.rows as i32, ldb: w.cols as i32, ..Segment::default() }],
                );
            }
        }
        p
    }

    /// One matrix a focus: rows of `stride_in` values to rows of `stride_out`, focus f at `f * cols`.
    pub fn focuses(weights: &[Matrix<f64>]) -> Self {
        let mut p = Self::default();
        let (inputs, outputs) = (weights[0].rows, weights[0].cols);
        for (f, w) in weights.iter().enumerate() {
            let b = p.constant(w);
            p.job(
                Job { c: (f * outputs) as i64, n: outputs as i32, ..Job::default() },
                &[Segment { a: (f * inputs) as i64, b, k: inputs as i32, ldb: outputs as i32, ..Segment::default() }],
            );
        }
        p
    }

    /// Square blocks on edge features: (first value of an edge, weights) each.
    pub fn blocks(blocks: &[(usize, &Matrix<f64>)]) -> Self {
        let mut p = Self::default();
        for &(at, w) in blocks {
            let b = p.constant(w);
            p.job(
                Job { c: at as i64, n: w.cols as i32, ..Job::default() },
                &[Segment { a: at as i64, b, k: w.rows as i32, ldb: w.cols as i32, ..Segment::default() }],
            );
        }
        p
    }

    /// Blocks with places of their own: (first value in, first value out, weights).
    pub fn scattered(blocks: &[(usize, usize, &Matrix<f64>)]) -> Self {
        let mut p = Self::default();
        for &(from, to, w) in blocks {
            let b = p.constant(w);
            p.job(
                Job { c: to as i64, n: w.cols as i32, ..Job::default() },
                &[Segment { a: from as i64, b, k: w.rows as i32, ldb: w.cols as i32, ..Segment::default() }],
            );
        }
        p
    }

    /// Coefficients to grid: the constant side is A. `frames`: (component, matrix (rows x coefficients)) a frame, frame
    /// k and -k feeding the same components; `points` of the sphere. Width of the data from the launch.
    pub fn to_grid(frames: &[(usize, Matrix<f64>)], degrees: usize, points: usize) -> Self {
        let mut p = Self::default();
        let mut frame = 0;
        while frame < frames.len() {
            let group = if frame == 0 { 1 } else { 2 };
            let (component, rows) = (frames[frame].0, frames[frame].1.rows);
            let segments: Vec<Segment> = (frame..frame + group)
                .map(|f| {
                    let m = &frames[f].1;
                    Segment {
                        a: p.constant(m),
                        lda: m.cols as i32,
                        b_row: (f * degrees * degrees + f.div_ceil(2).pow(2)) as i32,
                        k: m.cols as i32,
                        ..Segment::default()
                    }
                })
                .collect();
            p.job(Job { c_row: (component * points) as i32, m: rows as i32, ..Job::default() }, &segments);
            frame += group;
        }
        p
    }

    /// Grid to coefficients, by the transposes of `frames`.
    pub fn from_grid(frames: &[(usize, Matrix<f64>)], degrees: usize, points: usize) -> Self {
        let mut p = Self::default();
        for (f, (component, m)) in frames.iter().enumerate() {
            let t = transpose(m);
            let segment = Segment {
                a: p.constant(&t),
                lda: t.cols as i32,
                b_row: (component * points) as i32,
                k: t.cols as i32,
                ..Segment::default()
            };
            let c_row = (f * degrees * degrees + f.div_ceil(2).pow(2)) as i32;
            p.job(Job { c_row, m: t.rows as i32, ..Job::default() }, &[segment]);
        }
        p
    }

    /// Largest fixed number of columns (0: from the launch) and rows of a job.
    pub fn largest(&self) -> (i32, i32) {
        let of = |f: fn(&Job) -> i32| self.jobs.iter().map(f).max().unwrap_or(0);
        (of(|j| j.m), of(|j| j.n))
    }
}

/// The transpose.
pub fn transpose(m: &Matrix<f64>) -> Matrix<f64> {
    let data = (0..m.cols).flat_map(|c| (0..m.rows).map(move |r| m.data[r * m.cols + c])).collect();
    Matrix { rows: m.cols, cols: m.rows, data }
}
/// The transposes of a list.
pub fn transposes(list: &[Matrix<f64>]) -> Vec<Matrix<f64>> {
    list.iter().map(transpose).collect()
}
