//! The real spherical basis z_{l,m} and the rotation generators in it (SPEC sections 4.1 and 22.5).

use super::layout::packed;
use std::sync::LazyLock;

/// Degrees whose recursion coefficients are kept; above, they are computed on the way.
const TABULATED: usize = 36;

/// `recursion(l, m)` at l (l + 1) / 2 + m.
static RECURSION: LazyLock<Vec<(f64, f64)>> =
    LazyLock::new(|| (0..=TABULATED).flat_map(|l| (0..=l).map(move |m| recursion(l, m))).collect());

/// (a, b) of A_l = a z A_{l-1} - b A_{l-2} at fixed m < l; at m = l, a leads from A_{m-1}^{m-1} to A_m^m.
fn recursion(l: usize, m: usize) -> (f64, f64) {
    let [lf, mf] = [l as f64, m as f64];
    if l == m {
        let a = if m < 2 { 1.0 } else { ((2.0 * mf - 1.0) / (2.0 * mf)).sqrt() };
        return (a, 0.0);
    }
    let d = (lf - mf) * (lf + mf);
    ((2.0 * lf - 1.0) / d.sqrt(), ((lf - 1.0 - mf) * (lf - 1.0 + mf) / d).sqrt())
}

/// z_{l,m}(n) in packed order for a unit vector `n` and all degrees up to `lmax`; `out` has (lmax + 1)^2 rows.
///
/// Written as polynomials: z_{l,m} = A_l^m(n_z) Re (-n_x + i n_y)^m, z_{l,-m} the same with Im, so nothing is
/// divided by the distance from the poles.
pub fn zonal(lmax: usize, n: [f64; 3], out: &mut [f64]) {
    let table = RECURSION.as_slice();
    let coefficients = |l: usize, m: usize| if l <= TABULATED { table[l * (l + 1) / 2 + m] } else { recursion(l, m) };
    let [x, y, z] = n;
    let out = &mut out[..(lmax + 1) * (lmax + 1)];
    let (mut re, mut im) = (1.0, 0.0);
    let mut sectoral = 1.0;
    for m in 0..=lmax {
        if m > 0 {
            (re, im) = (-x * re - y * im, y * re - x * im);
            sectoral *= coefficients(m, m).0;
        }
        let (mut before, mut a) = (0.0, sectoral);
        for l in m..=lmax {
            if l > m {
                let (up, down) = coefficients(l, m);
                (before, a) = (a, up * z * a - down * before);
            }
            // For m = 0 both are the same row and Re 1 = 1 is written last.
            out[l * l + l - m] = a * im;
            out[l * l + l + m] = a * re;
        }
    }
}

/// The generators of rotations in the packed basis: D(exp(t e_a)) = 1 + t J_a + O(t^2).
#[derive(Debug, Clone, PartialEq)]
pub struct Generators {
    /// Non-zero (row, column, value) of J_x, J_y and J_z over all degrees, ascending by row then column.
    pub axis: [Vec<(u32, u32, f64)>; 3],
}

impl Generators {
    /// All degrees up to `lmax`. Each J_a is antisymmetric.
    pub fn new(lmax: usize) -> Self {
        let mut axis: [Vec<(u32, u32, f64)>; 3] = Default::default();
        for l in 0..=lmax {
            let mut couple = |a: usize, m: i32, k: i32, value: f64| {
                let (row, column) = (packed(l, m) as u32, packed(l, k) as u32);
                axis[a].extend([(row, column, value), (column, row, -value)]);
            };
            for m in 0..=l as i32 {
                if m > 0 {
                    couple(2, m, -m, f64::from(m));
                }
                if m == l as i32 {
                    continue;
                }
                let ladder = ((l * (l + 1)) as f64 - f64::from(m * (m + 1))).sqrt();
                if m == 0 {
                    let value = ladder * std::f64::consts::FRAC_1_SQRT_2;
                    couple(0, 0, -1, value);
                    couple(1, 0, 1, value);
                } else {
                    couple(0, m, -(m + 1), 0.5 * ladder);
                    couple(0, -m, m + 1, -0.5 * ladder);
                    couple(1, m, m + 1, 0.5 * ladder);
                    couple(1, -m, -(m + 1), 0.5 * ladder);
                }
            }
        }
        for entries in &mut axis {
            entries.sort_unstable_by_key(|&(row, column, _)| (row, column));
        }
        Generators { axis }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::layout::degree_rows;
    use crate::math::testing::{Random, apply, rotation_about};

    fn z(lmax: usize, n: [f64; 3]) -> Vec<f64> {
        let mut out = vec![f64::NAN; degree_rows(lmax)];
        zonal(lmax, n, &mut out);
        out
    }

    fn close(a: &[f64], b: &[f64], tolerance: f64) {
        for (i, (a, b)) in a.iter().zip(b).enumerate() {
            assert!((a - b).abs() <= tolerance, "row {i}: {a} and {b}");
        }
    }

    /// The degrees that SPEC section 4.1 writes out, and degree 3 from the usual tables with its signs.
    #[test]
    fn low_degrees() {
        let mut random = Random(1);
        for _ in 0..50 {
            let n = random.direction();
            let [x, y, z_] = n;
            let r3 = 3f64.sqrt();
            let all = z(3, n);
            close(&all[..4], &[1.0, y, z_, -x], 1e-15);
            let two = [-r3 * x * y, r3 * y * z_, (3.0 * z_ * z_ - 1.0) / 2.0, -r3 * x * z_, r3 / 2.0 * (x * x - y * y)];
            close(&all[4..9], &two, 1e-15);
            let three = [
                (5f64 / 8.0).sqrt() * y * (3.0 * x * x - y * y),
                -15f64.sqrt() * x * y * z_,
                (3f64 / 8.0).sqrt() * y * (5.0 * z_ * z_ - 1.0),
                z_ * (5.0 * z_ * z_ - 3.0) / 2.0,
                -(3f64 / 8.0).sqrt() * x * (5.0 * z_ * z_ - 1.0),
                15f64.sqrt() / 2.0 * z_ * (x * x - y * y),
                -(5f64 / 8.0).sqrt() * x * (x * x - 3.0 * y * y),
            ];
            close(&all[9..], &three, 2e-15);
        }
    }

    #[test]
    fn each_degree_has_unit_length_and_poles_are_exact() {
        let mut random = Random(2);
        for n in (0..50).map(|_| random.direction()).chain([[0.0, 0.0, 1.0], [0.0, 0.0, -1.0]]) {
            let all = z(40, n);
            for l in 0..=40 {
                let norm: f64 = all[l * l..(l + 1) * (l + 1)].iter().map(|v| v * v).sum();
                assert!((norm - 1.0).abs() < 1e-13, "l {l}: {norm}");
            }
        }
        for (l, m) in (0..=12).flat_map(|l| (-(l as i32)..=l as i32).map(move |m| (l, m))) {
            let expected = if m != 0 { [0.0; 2] } else { [1.0, if l % 2 == 0 { 1.0 } else { -1.0 }] };
            let found = [z(12, [0.0, 0.0, 1.0])[packed(l, m)], z(12, [0.0, 0.0, -1.0])[packed(l, m)]];
            close(&found, &expected, 1e-14);
        }
    }

    fn times(entries: &[(u32, u32, f64)], x: &[f64]) -> Vec<f64> {
        let mut y = vec![0.0; x.len()];
        for &(row, column, value) in entries {
            y[row as usize] += value * x[column as usize];
        }
        y
    }

    #[test]
    fn generators_are_derivatives_of_the_basis() {
        let (lmax, h) = (12, 1e-3);
        let generators = Generators::new(lmax);
        let mut random = Random(3);
        for _ in 0..10 {
            let n = random.direction();
            for a in 0..3 {
                let mut axis = [0.0; 3];
                axis[a] = 1.0;
                let at = |t: f64| z(lmax, apply(&rotation_about(axis, t), n));
                let [a1, b1, a2, b2] = [at(h), at(-h), at(2.0 * h), at(-2.0 * h)];
                let difference: Vec<f64> =
                    (0..a1.len()).map(|i| (8.0 * (a1[i] - b1[i]) - (a2[i] - b2[i])) / (12.0 * h)).collect();
                close(&times(&generators.axis[a], &z(lmax, n)), &difference, 1e-8);
            }
        }
    }

    #[test]
    fn generators_obey_the_algebra_of_rotations() {
        let lmax = 12;
        let Generators { axis: [jx, jy, jz] } = Generators::new(lmax);
        let mut random = Random(4);
        let x: Vec<f64> = (0..degree_rows(lmax)).map(|_| random.uniform() - 0.5).collect();
        // D is a homomorphism, so the generators commute as those of 3-vectors: [J_x, J_y] = J_z and cyclic.
        for (a, b, c) in [(&jx, &jy, &jz), (&jy, &jz, &jx), (&jz, &jx, &jy)] {
            let (ab, ba) = (times(a, &times(b, &x)), times(b, &times(a, &x)));
            let commutator: Vec<f64> = ab.iter().zip(&ba).map(|(p, q)| p - q).collect();
            close(&commutator, &times(c, &x), 1e-12);
        }
        // Casimir: J^2 = -l (l + 1).
        let squares = [&jx, &jy, &jz].map(|j| times(j, &times(j, &x)));
        for l in 0..=lmax {
            for row in l * l..(l + 1) * (l + 1) {
                let sum: f64 = squares.iter().map(|s| s[row]).sum();
                assert!((sum + (l * (l + 1)) as f64 * x[row]).abs() < 1e-12);
            }
        }
    }

    /// SPEC section 22.5, rows -1, 0, +1 at packed rows 1, 2, 3; J_z at any degree.
    #[test]
    fn generators_of_degree_one() {
        let Generators { axis: [jx, jy, jz] } = Generators::new(1);
        let expect = |found: Vec<(u32, u32, f64)>, expected: [(u32, u32, f64); 2]| {
            assert_eq!(found.len(), 2);
            for (f, e) in found.iter().zip(expected) {
                assert_eq!((f.0, f.1), (e.0, e.1));
                assert!((f.2 - e.2).abs() < 1e-15);
            }
        };
        expect(jx, [(1, 2, -1.0), (2, 1, 1.0)]);
        expect(jy, [(2, 3, 1.0), (3, 2, -1.0)]);
        expect(jz, [(1, 3, -1.0), (3, 1, 1.0)]);
        let jz = &Generators::new(5).axis[2];
        for m in 1..=5 {
            assert!(jz.contains(&(packed(5, -m) as u32, packed(5, m) as u32, -f64::from(m))));
            assert!(jz.contains(&(packed(5, m) as u32, packed(5, -m) as u32, f64::from(m))));
        }
    }
}
