//! The polynomial that switches an edge off at the cutoff (SPEC section 3).

/// E_p(r) = u^4 sum_{k<p} binom(k+3, 3) x^k with x = r/rcut and u = 1 - x: 1 at r = 0, 0 from `rcut` on, C^3 there.
#[derive(Debug, Clone, PartialEq)]
pub struct Envelope {
    rcut: f64,
    /// binom(k+3, 3) for k = 0..p.
    coefficients: Vec<f64>,
    /// dE/dx = -steepness x^(p-1) u^3: the series is the regularised incomplete beta function 1 - I_x(p, 4).
    steepness: f64,
}

impl Envelope {
    /// The envelope of exponent p >= 1 for a cutoff in Å.
    pub fn new(exponent: u32, rcut: f64) -> Self {
        let binomial = |k: u32| (1..=3).map(|i| f64::from(k + i) / f64::from(i)).product::<f64>().round();
        Envelope {
            rcut,
            coefficients: (0..exponent).map(binomial).collect(),
            steepness: f64::from(exponent) * binomial(exponent),
        }
    }

    /// E(r), exactly 0 for r >= rcut.
    #[inline]
    pub fn value(&self, r: f64) -> f64 {
        self.value_and_slope(r).0
    }

    /// E(r) and dE/dr in 1/Å, both exactly 0 for r >= rcut.
    #[inline]
    pub fn value_and_slope(&self, r: f64) -> (f64, f64) {
        if r >= self.rcut {
            return (0.0, 0.0);
        }
        let x = r / self.rcut;
        let u = (self.rcut - r) / self.rcut;
        let u3 = u * u * u;
        let series = self.coefficients.iter().rev().fold(0.0, |sum, c| sum * x + c);
        let power = x.powi(self.coefficients.len() as i32 - 1);
        (u3 * u * series, -self.steepness * power * u3 / self.rcut)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// u^4 (1 + 4x + 10x^2 + 20x^3 + 35x^4) and its first terms, from SPEC section 3.
    #[test]
    fn coefficients_and_values() {
        assert_eq!(Envelope::new(7, 6.0).coefficients, [1.0, 4.0, 10.0, 20.0, 35.0, 56.0, 84.0]);
        let e = Envelope::new(5, 6.0);
        assert_eq!(e.value(0.0), 1.0);
        // x = 1/2: (1 + 2 + 10/4 + 20/8 + 35/16) / 16
        assert!((e.value(3.0) - 10.1875 / 16.0).abs() < 1e-16);
        for r in [6.0, 6.0 + 1e-15, 7.0, f64::INFINITY] {
            assert_eq!(e.value_and_slope(r), (0.0, 0.0));
        }
    }

    #[test]
    fn slope_is_the_derivative() {
        for p in 1..=9 {
            let e = Envelope::new(p, 4.5);
            for i in 1..45 {
                let (r, h) = (0.1 * f64::from(i), 1e-4);
                // Fourth-order central difference.
                let d = (8.0 * (e.value(r + h) - e.value(r - h)) - (e.value(r + 2.0 * h) - e.value(r - 2.0 * h)))
                    / (12.0 * h);
                assert!((e.value_and_slope(r).1 - d).abs() < 1e-11, "p {p} r {r}");
            }
        }
    }

    #[test]
    fn slope_at_the_origin_is_finite() {
        assert_eq!(Envelope::new(1, 2.0).value_and_slope(0.0), (1.0, -2.0));
        assert_eq!(Envelope::new(2, 2.0).value_and_slope(0.0), (1.0, 0.0));
    }

    #[test]
    fn vanishes_with_the_fourth_power() {
        let e = Envelope::new(5, 6.0);
        let ratio = e.value(6.0 - 2e-3) / e.value(6.0 - 1e-3);
        assert!((ratio / 16.0 - 1.0).abs() < 1e-3);
    }
}
