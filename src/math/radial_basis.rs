//! Radial basis functions of an edge length, with the envelope (SPEC section 3).

use super::envelope::Envelope;

/// The family of radial functions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RadialKind {
    /// sin(q r)/r.
    Bessel,
    /// exp(-(r - q)^2 / (2 s^2)) with s = rcut / max(n - 1, 1).
    Gaussian,
}

/// rbf_k(r) = b_k(r) E(r) for k = 0..len.
#[derive(Debug, Clone, PartialEq)]
pub struct RadialBasis {
    kind: RadialKind,
    /// q_k: 1/Å for Bessel functions, Å for Gaussians.
    freqs: Vec<f64>,
    /// 1/s^2 of the Gaussians, 1/Å^2.
    inverse_variance: f64,
    envelope: Envelope,
}

impl RadialBasis {
    /// The basis with trained `freqs` (wave numbers in 1/Å or Gaussian centres in Å) under `envelope`; `rcut` in Å.
    pub fn new(kind: RadialKind, freqs: Vec<f64>, rcut: f64, envelope: Envelope) -> Self {
        let width = rcut / freqs.len().saturating_sub(1).max(1) as f64;
        RadialBasis { kind, freqs, inverse_variance: 1.0 / (width * width), envelope }
    }

    /// Number of functions.
    pub fn len(&self) -> usize {
        self.freqs.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.freqs.is_empty()
    }

    /// `out[k]` = rbf_k(r) for r > 0 in Å; the same bits as [`Self::values_and_slopes`].
    pub fn values(&self, r: f64, out: &mut [f64]) {
        let envelope = self.envelope.value(r);
        if envelope == 0.0 {
            return out.fill(0.0);
        }
        match self.kind {
            RadialKind::Bessel => {
                let inverse_r = 1.0 / r;
                for (v, &q) in out.iter_mut().zip(&self.freqs) {
                    *v = envelope * ((q * r).sin() * inverse_r);
                }
            }
            RadialKind::Gaussian => {
                for (v, &q) in out.iter_mut().zip(&self.freqs) {
                    *v = envelope * self.gaussian(r - q);
                }
            }
        }
    }

    /// `values[k]` = rbf_k(r) and `slopes[k]` = d rbf_k / dr in 1/Å, for r > 0 in Å.
    pub fn values_and_slopes(&self, r: f64, values: &mut [f64], slopes: &mut [f64]) {
        let (envelope, envelope_slope) = self.envelope.value_and_slope(r);
        if envelope == 0.0 {
            values.fill(0.0);
            return slopes.fill(0.0);
        }
        let outputs = values.iter_mut().zip(slopes).zip(&self.freqs);
        match self.kind {
            RadialKind::Bessel => {
                let inverse_r = 1.0 / r;
                for ((value, slope), &q) in outputs {
                    let (b, b_slope) = bessel(q, r, inverse_r);
                    *value = envelope * b;
                    *slope = envelope * b_slope + envelope_slope * b;
                }
            }
            RadialKind::Gaussian => {
                for ((value, slope), &q) in outputs {
                    *value = envelope * self.gaussian(r - q);
                    *slope = (envelope_slope - envelope * (r - q) * self.inverse_variance) * self.gaussian(r - q);
                }
            }
        }
    }

    #[inline]
    fn gaussian(&self, distance: f64) -> f64 {
        (-0.5 * distance * distance * self.inverse_variance).exp()
    }
}

/// sin(q r)/r and its derivative.
#[inline]
fn bessel(q: f64, r: f64, inverse_r: f64) -> (f64, f64) {
    let x = q * r;
    if x.abs() < 0.3 {
        // q cos x - sin x / r cancels; the series of sinc' is exact to rounding here.
        let y = x * x;
        let slope = x
            * (-1.0 / 3.0
                + y * (1.0 / 30.0
                    + y * (-1.0 / 840.0 + y * (1.0 / 45_360.0 + y * (-1.0 / 3_991_680.0 + y / 518_918_400.0)))));
        return (x.sin() * inverse_r, q * q * slope);
    }
    let (sin, cos) = x.sin_cos();
    let b = sin * inverse_r;
    (b, (q * cos - b) * inverse_r)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn basis(kind: RadialKind) -> RadialBasis {
        let rcut = 6.0;
        let freqs = match kind {
            RadialKind::Bessel => (1..=16).map(|k| f64::from(k) * std::f64::consts::PI / rcut).collect(),
            RadialKind::Gaussian => (0..16).map(|k| f64::from(k) * rcut / 15.0).collect(),
        };
        RadialBasis::new(kind, freqs, rcut, Envelope::new(7, rcut))
    }

    #[test]
    fn closed_forms() {
        let mut v = [0.0; 16];
        let r = 2.5;
        let e = Envelope::new(7, 6.0).value(r);
        basis(RadialKind::Bessel).values(r, &mut v);
        for (k, v) in v.iter().enumerate() {
            let expected = ((k + 1) as f64 * std::f64::consts::PI * r / 6.0).sin() / r * e;
            assert!((v - expected).abs() < 1e-15);
        }
        basis(RadialKind::Gaussian).values(r, &mut v);
        for (k, v) in v.iter().enumerate() {
            let t: f64 = (r - 0.4 * k as f64) / 0.4;
            assert!((v - (-t * t / 2.0).exp() * e).abs() < 1e-15);
        }
    }

    #[test]
    fn slopes_are_derivatives() {
        for kind in [RadialKind::Bessel, RadialKind::Gaussian] {
            let basis = basis(kind);
            let at = |r: f64| {
                let mut v = vec![0.0; basis.len()];
                basis.values(r, &mut v);
                v
            };
            let (mut values, mut slopes) = ([0.0; 16], [0.0; 16]);
            for i in 1..200 {
                let (r, h) = (0.03 * f64::from(i), 2e-4);
                basis.values_and_slopes(r, &mut values, &mut slopes);
                assert_eq!(values.to_vec(), at(r));
                let [a, b, c, d] = [at(r + h), at(r - h), at(r + 2.0 * h), at(r - 2.0 * h)];
                for k in 0..16 {
                    let difference = (8.0 * (a[k] - b[k]) - (c[k] - d[k])) / (12.0 * h);
                    assert!((slopes[k] - difference).abs() < 1e-10, "{kind:?} k {k} r {r}");
                }
            }
        }
    }

    /// Around q r = 0 the direct formula loses all digits; the leading terms are q and -q^3 r / 3.
    #[test]
    fn short_edges_keep_their_digits() {
        let q: f64 = 0.7;
        for r in [1e-7, 1e-5, 1e-3] {
            let (b, slope) = bessel(q, r, 1.0 / r);
            let x = q * r;
            assert!((b / q - (1.0 - x * x / 6.0)).abs() < 1e-13);
            assert!((slope / (-q.powi(3) * r / 3.0) - (1.0 - x * x / 10.0)).abs() < 1e-13);
        }
        // Either side of the switch of formulas.
        let (below, above) = (bessel(1.0, 0.3 - 1e-12, 1.0 / (0.3 - 1e-12)), bessel(1.0, 0.3, 1.0 / 0.3));
        assert!((below.1 - above.1).abs() < 1e-14 * 50.0);
    }

    #[test]
    fn zero_from_the_cutoff_on() {
        for kind in [RadialKind::Bessel, RadialKind::Gaussian] {
            let (mut v, mut s) = ([1.0; 16], [1.0; 16]);
            basis(kind).values_and_slopes(6.0, &mut v, &mut s);
            assert_eq!((v, s), ([0.0; 16], [0.0; 16]));
        }
    }
}
