//! Assembled Wigner-D matrices of the packed basis, and the frame of an edge (SPEC sections 4.2 and 4.3).
//!
//! A record holds one rotation: the blocks D^0, D^1, ... one after the other, each row-major. The inverse rotation is
//! the same record read transposed; no second copy exists.

use super::Matrix3;

/// Assembles records of all degrees up to `lmax` by the recursion of Ivanic and Ruedenberg
/// (J. Phys. Chem. 1996, 100, 6342; erratum 1998, 102, 9099): D^l from D^{l-1} and D^1, row by row.
#[derive(Debug, Clone, PartialEq)]
pub struct Wigner {
    /// Recursion of degree l at l - 2.
    degrees: Vec<Recursion>,
    lmax: usize,
}

#[derive(Debug, Clone, PartialEq)]
struct Recursion {
    /// For each row m = -l..=l, which rows of D^{l-1} it is made of.
    rows: Vec<[Term; 5]>,
    /// Factor of each column m' = -l..=l.
    columns: Vec<f64>,
}

/// `weight` D^1[axis] (x) D^{l-1}[row]; `axis` and `row` count from 0.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Term {
    axis: usize,
    row: usize,
    weight: f64,
}

impl Wigner {
    /// Tables for degrees 0..=lmax.
    pub fn new(lmax: usize) -> Self {
        Wigner { degrees: (2..=lmax).map(Recursion::new).collect(), lmax }
    }

    /// The highest degree.
    pub fn lmax(&self) -> usize {
        self.lmax
    }

    /// Values of one record: sum over l of (2l+1)^2.
    pub fn record_len(&self) -> usize {
        self.offset(self.lmax + 1)
    }

    /// Where the block of degree l begins; element (m, m') is at `offset(l) + (m + l) (2l+1) + m' + l`.
    pub fn offset(&self, l: usize) -> usize {
        // sum_{k<l} (2k+1)^2
        l * (4 * l * l).saturating_sub(1) / 3
    }

    /// Writes the record of a rotation: z_l(R n) = D^l(R) z_l(n). `rotation` must be orthogonal with determinant +1.
    pub fn assemble(&self, rotation: &Matrix3, record: &mut [f64]) {
        record[0] = 1.0;
        if self.lmax == 0 {
            return;
        }
        // The packed basis is the standard one seen in a mirror, z(n) = S(-n_x, n_y, n_z), so the elements that
        // mix x with another axis change sign. Rows and columns in the order y, z, x of m = -1, 0, +1.
        let [[xx, xy, xz], [yx, yy, yz], [zx, zy, zz]] = *rotation;
        let vector = [[yy, yz, -yx], [zy, zz, -zx], [-xy, -xz, xx]];
        record[1..10].copy_from_slice(vector.as_flattened());
        for (l, recursion) in (2..).zip(&self.degrees) {
            let (below, block) = record.split_at_mut(self.offset(l));
            recursion.assemble(&vector, &below[self.offset(l - 1)..], &mut block[..(2 * l + 1) * (2 * l + 1)]);
        }
    }
}

impl Recursion {
    fn new(l: usize) -> Self {
        let degree = l as i32;
        let column = |k: i32| {
            let square = if k.abs() == degree { 2 * degree * (2 * degree - 1) } else { (degree + k) * (degree - k) };
            1.0 / f64::from(square).sqrt()
        };
        Recursion {
            rows: (-degree..=degree).map(|m| terms(degree, m)).collect(),
            columns: (-degree..=degree).map(column).collect(),
        }
    }

    /// `previous` and `block` are D^{l-1} and D^l, `vector` is D^1.
    fn assemble(&self, vector: &Matrix3, previous: &[f64], block: &mut [f64]) {
        let size = self.columns.len();
        let inner = size - 2;
        for (out, terms) in block.chunks_exact_mut(size).zip(&self.rows) {
            // D^1[axis] times the weight: its columns -1, 0, +1 make the outer and inner columns of the new row.
            let turn = terms.map(|t| vector[t.axis].map(|v| t.weight * v));
            let source = terms.map(|t| &previous[t.row * inner..(t.row + 1) * inner]);
            let (mut first, mut last) = (0.0, 0.0);
            for ([left, _, right], s) in turn.iter().zip(&source) {
                first += right * s[0] + left * s[inner - 1];
                last += right * s[inner - 1] - left * s[0];
            }
            out[0] = self.columns[0] * first;
            out[size - 1] = self.columns[size - 1] * last;
            let [a, b, c, d, e] = source;
            let [ta, tb, tc, td, te] = turn.map(|t| t[1]);
            let (out, columns) = (&mut out[1..=inner], &self.columns[1..=inner]);
            for k in 0..inner {
                out[k] = columns[k] * (ta * a[k] + tb * b[k] + tc * c[k] + td * d[k] + te * e[k]);
            }
        }
    }
}

/// The u, v and w terms of row m, without their common denominator (that is the column factor).
fn terms(l: i32, m: i32) -> [Term; 5] {
    let size = m.abs();
    let root = |product: i32| f64::from(product).sqrt();
    let u = root((l + m) * (l - m));
    let v = 0.5 * root((l + size - 1) * (l + size));
    let w = -0.5 * root((l - size - 1) * (l - size));
    let root2 = std::f64::consts::SQRT_2;
    // (axis of D^1, row of D^{l-1}, weight)
    let mut all = vec![(0, m, u)];
    match m {
        0 => all.extend([(1, 1, -root2 * v), (-1, -1, -root2 * v)]),
        1 => all.push((1, 0, root2 * v)),
        -1 => all.push((-1, 0, root2 * v)),
        2.. => all.extend([(1, m - 1, v), (-1, 1 - m, -v)]),
        _ => all.extend([(1, m + 1, v), (-1, -m - 1, v)]),
    }
    if m > 0 {
        all.extend([(1, m + 1, w), (-1, -m - 1, w)]);
    } else if m < 0 {
        all.extend([(1, m - 1, w), (-1, 1 - m, -w)]);
    }
    // Rows that D^{l-1} lacks come with weight zero, as do the terms that fill up.
    let mut terms = [Term { axis: 0, row: 0, weight: 0.0 }; 5];
    for (term, (axis, row, weight)) in terms.iter_mut().zip(all.into_iter().filter(|t| t.2 != 0.0)) {
        *term = Term { axis: (axis + 1) as usize, row: (row + l - 1) as usize, weight };
    }
    terms
}

/// A rotation R with R n = +z for a unit vector n (global -> edge frame).
///
/// The roll about z is arbitrary (SPEC section 4.3). In the upper hemisphere R is the shortest rotation; in the lower
/// one it is the shortest after a half turn about x, so the divisor 1 + |n_z| never gets small and both poles are exact.
pub fn edge_frame(n: [f64; 3]) -> Matrix3 {
    let flip = if n[2] < 0.0 { -1.0 } else { 1.0 };
    let [x, y, z] = [n[0], flip * n[1], flip * n[2]];
    let scale = 1.0 / (1.0 + z);
    let shear = -x * y * scale;
    [
        [1.0 - x * x * scale, flip * shear, flip * -x],
        [shear, flip * (1.0 - y * y * scale), flip * -y],
        [x, flip * y, flip * z],
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::layout::{degree_rows, packed};
    use crate::math::quadrature::sphere_rule;
    use crate::math::spherical::{Generators, zonal};
    use crate::math::testing::{Random, apply, product, rotation_about, transpose};

    const LMAX: usize = 12;

    fn record(lmax: usize, rotation: &Matrix3) -> Vec<f64> {
        let wigner = Wigner::new(lmax);
        let mut record = vec![f64::NAN; wigner.record_len()];
        wigner.assemble(rotation, &mut record);
        record
    }

    fn block(lmax: usize, record: &[f64], l: usize) -> &[f64] {
        &record[Wigner::new(lmax).offset(l)..][..(2 * l + 1) * (2 * l + 1)]
    }

    fn largest_difference(a: &[f64], b: &[f64]) -> f64 {
        assert_eq!(a.len(), b.len());
        a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |m, d| if d > m || d.is_nan() { d } else { m })
    }

    /// sum_k a[i][k] b[k][j], or with a read transposed.
    fn multiply(a: &[f64], b: &[f64], size: usize, transposed: bool) -> Vec<f64> {
        let at = |i: usize, k: usize| if transposed { a[k * size + i] } else { a[i * size + k] };
        let element = |e: usize| (0..size).map(|k| at(e / size, k) * b[k * size + e % size]).sum();
        (0..size * size).map(element).collect()
    }

    fn identity(size: usize) -> Vec<f64> {
        (0..size * size).map(|e| if e / size == e % size { 1.0 } else { 0.0 }).collect()
    }

    /// D^l[m][m'] = (2l+1) <z_lm(R n) z_lm'(n)> over the sphere: nothing in common with the recursion.
    fn projected(l: usize, rotation: &Matrix3) -> Vec<f64> {
        let size = 2 * l + 1;
        let rule = sphere_rule(2 * l);
        let mut out = vec![0.0; size * size];
        let (mut here, mut there) = (vec![0.0; degree_rows(l)], vec![0.0; degree_rows(l)]);
        for (&n, &w) in rule.points.iter().zip(&rule.weights) {
            zonal(l, n, &mut here);
            zonal(l, apply(rotation, n), &mut there);
            for (e, o) in out.iter_mut().enumerate() {
                *o += size as f64 * w * there[l * l + e / size] * here[l * l + e % size];
            }
        }
        out
    }

    /// Directions along, very near and not so near the poles, on the equator, and anywhere.
    fn directions() -> Vec<[f64; 3]> {
        let mut random = Random(5);
        let mut all: Vec<_> = (0..20).map(|_| random.direction()).collect();
        for pole in [1.0, -1.0] {
            for t in [0.0, 1e-300, 1e-17, 1e-12, 1e-8, 1e-4] {
                for angle in [0.0, 0.3, 2.0, 4.0] {
                    let (s, c) = f64::sin_cos(angle);
                    all.push([f64::sin(t) * c, f64::sin(t) * s, pole * f64::cos(t)]);
                }
            }
        }
        all.extend([[1.0, 0.0, 0.0], [0.0, -1.0, 0.0], [0.6, 0.8, -0.0], [0.6, 0.8, -1e-17]]);
        all
    }

    #[test]
    fn record_layout() {
        for lmax in 0..=LMAX {
            let wigner = Wigner::new(lmax);
            assert_eq!(wigner.lmax(), lmax);
            assert_eq!(wigner.record_len(), (0..=lmax).map(|l| (2 * l + 1) * (2 * l + 1)).sum::<usize>());
            assert_eq!(wigner.offset(lmax), (0..lmax).map(|l| (2 * l + 1) * (2 * l + 1)).sum::<usize>());
        }
        assert_eq!(record(0, &[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]), [1.0]);
    }

    #[test]
    fn agrees_with_projection_for_every_lmax() {
        let mut random = Random(6);
        for lmax in 0..=LMAX {
            let rotation = random.rotation();
            let record = record(lmax, &rotation);
            for l in 0..=lmax {
                let d = largest_difference(block(lmax, &record, l), &projected(l, &rotation));
                assert!(d < 2e-13, "lmax {lmax} l {l}: {d}");
            }
        }
    }

    #[test]
    fn orthogonal_homomorphic_and_inverted_by_transposition() {
        let mut random = Random(7);
        for _ in 0..20 {
            let (a, b) = (random.rotation(), random.rotation());
            let [da, db, dab, dat] = [a, b, product(&a, &b), transpose(&a)].map(|r| record(LMAX, &r));
            for l in 0..=LMAX {
                let size = 2 * l + 1;
                let [a, b, ab, at] = [&da, &db, &dab, &dat].map(|r| block(LMAX, r, l));
                assert!(largest_difference(&multiply(a, a, size, true), &identity(size)) < 1e-12, "l {l}");
                assert!(largest_difference(&multiply(a, b, size, false), ab) < 1e-12, "l {l}");
                let transposed: Vec<f64> = (0..size * size).map(|e| a[e % size * size + e / size]).collect();
                assert!(largest_difference(&transposed, at) < 1e-12, "l {l}");
            }
        }
    }

    #[test]
    fn rotates_the_basis() {
        let mut random = Random(8);
        for _ in 0..20 {
            let (rotation, n) = (random.rotation(), random.direction());
            let record = record(LMAX, &rotation);
            let (mut here, mut there) = (vec![0.0; degree_rows(LMAX)], vec![0.0; degree_rows(LMAX)]);
            zonal(LMAX, n, &mut here);
            zonal(LMAX, apply(&rotation, n), &mut there);
            for l in 0..=LMAX {
                let rows = l * l..(l + 1) * (l + 1);
                let rotated: Vec<f64> = block(LMAX, &record, l)
                    .chunks(2 * l + 1)
                    .map(|row| row.iter().zip(&here[rows.clone()]).map(|(d, z)| d * z).sum())
                    .collect();
                assert!(largest_difference(&rotated, &there[rows]) < 1e-13, "l {l}");
            }
        }
    }

    /// SPEC section 4.2: D^1 = P R P^T, P with rows y, z, x and signs -, -, +.
    #[test]
    fn degree_one_is_the_signed_matrix() {
        let rotation = Random(9).rotation();
        let (order, sign) = ([1, 2, 0], [-1.0, -1.0, 1.0]);
        let found = record(1, &rotation);
        for e in 0..9 {
            let (i, j) = (e / 3, e % 3);
            assert_eq!(found[1 + e], sign[i] * rotation[order[i]][order[j]] * sign[j]);
        }
    }

    #[test]
    fn turns_about_z_mix_plus_and_minus_m() {
        let angle = 0.7;
        let record = record(LMAX, &rotation_about([0.0, 0.0, 1.0], angle));
        for l in 0..=LMAX {
            let mut expected = identity(2 * l + 1);
            for m in 1..=l {
                let (s, c) = (m as f64 * angle).sin_cos();
                let (minus, plus, size) = (l - m, l + m, 2 * l + 1);
                expected[minus * size + minus] = c;
                expected[plus * size + plus] = c;
                expected[minus * size + plus] = -s;
                expected[plus * size + minus] = s;
            }
            assert!(largest_difference(block(LMAX, &record, l), &expected) < 1e-13, "l {l}");
        }
    }

    #[test]
    fn edge_frames_are_rotations_onto_z() {
        for n in directions() {
            let r = edge_frame(n);
            let squared = product(&r, &transpose(&r));
            assert!(largest_difference(squared.as_flattened(), &identity(3)) < 4e-16, "{n:?}");
            let determinant: f64 = (0..3)
                .map(|i| r[0][i] * (r[1][(i + 1) % 3] * r[2][(i + 2) % 3] - r[1][(i + 2) % 3] * r[2][(i + 1) % 3]))
                .sum();
            assert!((determinant - 1.0).abs() < 1e-15, "{n:?}");
            assert!(largest_difference(&apply(&r, n), &[0.0, 0.0, 1.0]) < 4e-16, "{n:?}");
        }
    }

    #[test]
    fn the_middle_row_of_an_edge_is_the_zonal_column() {
        let mut z = vec![0.0; degree_rows(LMAX)];
        for n in directions() {
            let record = record(LMAX, &edge_frame(n));
            zonal(LMAX, n, &mut z);
            for l in 0..=LMAX {
                let size = 2 * l + 1;
                let block = block(LMAX, &record, l);
                let d = largest_difference(&block[l * size..(l + 1) * size], &z[l * l..(l + 1) * (l + 1)]);
                assert!(d < 1e-13, "l {l} n {n:?}: {d}");
                assert!(largest_difference(&multiply(block, block, size, true), &identity(size)) < 1e-12);
            }
        }
    }

    #[test]
    fn generators_are_derivatives_of_the_matrices() {
        let generators = Generators::new(LMAX);
        let h = 1e-3;
        for a in 0..3 {
            let mut axis = [0.0; 3];
            axis[a] = 1.0;
            let [p1, m1, p2, m2] = [h, -h, 2.0 * h, -2.0 * h].map(|t| record(LMAX, &rotation_about(axis, t)));
            let mut dense = vec![0.0; p1.len()];
            for &(row, column, value) in &generators.axis[a] {
                let l = (f64::from(row).sqrt() + 1e-9) as usize;
                let first = packed(l, -(l as i32));
                let (i, j) = (row as usize - first, column as usize - first);
                dense[Wigner::new(LMAX).offset(l) + i * (2 * l + 1) + j] = value;
            }
            let difference: Vec<f64> =
                (0..p1.len()).map(|e| (8.0 * (p1[e] - m1[e]) - (p2[e] - m2[e])) / (12.0 * h)).collect();
            assert!(largest_difference(&difference, &dense) < 1e-8, "axis {a}");
        }
    }
}
