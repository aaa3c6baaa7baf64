//! Pure functions that know no model: envelopes, radial bases, spherical basis, Wigner-D, quadrature, index layouts.
//!
//! Everything here is f64: it is evaluated per edge or once per model, and its rounding must not show in the results.

pub mod envelope;
pub mod layout;
mod lebedev;
pub mod quadrature;
pub mod radial_basis;
pub mod spherical;
pub mod wigner;

/// A row-major 3x3 matrix.
pub type Matrix3 = [[f64; 3]; 3];

#[cfg(test)]
pub(crate) mod testing {
    //! Reproducible random numbers, directions and rotations for tests.

    use super::Matrix3;

    /// SplitMix64.
    pub struct Random(pub u64);

    impl Random {
        /// Uniform in [0, 1).
        pub fn uniform(&mut self) -> f64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = self.0;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
        }

        /// Uniform in 0..n.
        pub fn below(&mut self, n: usize) -> usize {
            (self.uniform() * n as f64) as usize
        }

        /// Permutes the items.
        pub fn shuffle<T>(&mut self, items: &mut [T]) {
            for i in (1..items.len()).rev() {
                items.swap(i, self.below(i + 1));
            }
        }

        /// Uniform on the unit sphere.
        pub fn direction(&mut self) -> [f64; 3] {
            let z = 2.0 * self.uniform() - 1.0;
            let (s, c) = (std::f64::consts::TAU * self.uniform()).sin_cos();
            let rho = (1.0 - z * z).sqrt();
            [rho * c, rho * s, z]
        }

        /// A rotation by a random angle about a random axis.
        pub fn rotation(&mut self) -> Matrix3 {
            let axis = self.direction();
            rotation_about(axis, std::f64::consts::TAU * self.uniform())
        }
    }

    /// Rodrigues' formula for a unit axis.
    pub fn rotation_about(n: [f64; 3], angle: f64) -> Matrix3 {
        let (s, c) = angle.sin_cos();
        let cross = [[0.0, -n[2], n[1]], [n[2], 0.0, -n[0]], [-n[1], n[0], 0.0]];
        std::array::from_fn(|i| {
            std::array::from_fn(|j| {
                let delta = if i == j { c } else { 0.0 };
                delta + s * cross[i][j] + (1.0 - c) * n[i] * n[j]
            })
        })
    }

    pub fn apply(r: &Matrix3, n: [f64; 3]) -> [f64; 3] {
        std::array::from_fn(|i| (0..3).map(|j| r[i][j] * n[j]).sum())
    }

    pub fn product(a: &Matrix3, b: &Matrix3) -> Matrix3 {
        std::array::from_fn(|i| std::array::from_fn(|j| (0..3).map(|k| a[i][k] * b[k][j]).sum()))
    }

    pub fn transpose(a: &Matrix3) -> Matrix3 {
        std::array::from_fn(|i| std::array::from_fn(|j| a[j][i]))
    }
}
