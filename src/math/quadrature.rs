//! Exact quadrature on the unit sphere (SPEC sections 10.2 and 10.3).

use super::lebedev::RULES;

/// Points and weights that average every spherical harmonic of degree <= `precision` exactly.
#[derive(Debug, Clone, PartialEq)]
pub struct SphereRule {
    /// Highest degree that is integrated exactly.
    pub precision: usize,
    /// Unit vectors.
    pub points: Vec<[f64; 3]>,
    /// They sum to 1; some rules have negative ones.
    pub weights: Vec<f64>,
}

/// The rule to use for a precision: Lebedev's where the table reaches, else the product rule.
pub fn sphere_rule(precision_at_least: usize) -> SphereRule {
    lebedev(precision_at_least).unwrap_or_else(|| gauss_product(precision_at_least))
}

/// The smallest tabulated Lebedev rule of at least this precision; none beyond 35.
pub fn lebedev(precision_at_least: usize) -> Option<SphereRule> {
    let (precision, orbits) = RULES.iter().find(|(precision, _)| *precision >= precision_at_least)?;
    let mut rule = SphereRule { precision: *precision, points: Vec::new(), weights: Vec::new() };
    for &(weight, generator) in *orbits {
        rule.points.extend(octahedral_orbit(generator));
        rule.weights.resize(rule.points.len(), weight);
    }
    Some(rule)
}

/// The distinct images of a point under permutations and sign changes of its coordinates; `generator` is
/// ascending and not negative.
fn octahedral_orbit([a, b, c]: [f64; 3]) -> Vec<[f64; 3]> {
    let mut orbit: Vec<[f64; 3]> = Vec::with_capacity(48);
    for point in [[a, b, c], [a, c, b], [b, a, c], [b, c, a], [c, a, b], [c, b, a]] {
        for signs in 0..8 {
            let image = std::array::from_fn(|k| if signs >> k & 1 == 1 { -point[k] } else { point[k] });
            // -0 equals 0, so zero coordinates count once.
            if !orbit.contains(&image) {
                orbit.push(image);
            }
        }
    }
    orbit
}

/// Gauss-Legendre in n_z times equal steps in azimuth, exact up to `precision`: about precision^2 / 2 points.
pub fn gauss_product(precision: usize) -> SphereRule {
    let azimuths = precision + 1;
    let mut rule = SphereRule { precision, points: Vec::new(), weights: Vec::new() };
    for (z, weight) in gauss_legendre(precision / 2 + 1) {
        let rho = ((1.0 - z) * (1.0 + z)).sqrt();
        for k in 0..azimuths {
            let (sin, cos) = (std::f64::consts::TAU * k as f64 / azimuths as f64).sin_cos();
            rule.points.push([rho * cos, rho * sin, z]);
            rule.weights.push(0.5 * weight / azimuths as f64);
        }
    }
    rule
}

/// Nodes and weights on [-1, 1] (weights sum to 2), by Newton's iteration on the Legendre polynomial.
fn gauss_legendre(n: usize) -> Vec<(f64, f64)> {
    let legendre = |x: f64| {
        let (mut before, mut p) = (0.0, 1.0);
        for k in 1..=n {
            let k = k as f64;
            (before, p) = (p, ((2.0 * k - 1.0) * x * p - (k - 1.0) * before) / k);
        }
        (p, n as f64 * (x * p - before) / (x * x - 1.0))
    };
    let node = |i: usize| {
        let mut x = (std::f64::consts::PI * (i as f64 + 0.75) / (n as f64 + 0.5)).cos();
        // Converges quadratically from this start: six steps are more than enough.
        for _ in 0..6 {
            let (p, slope) = legendre(x);
            x -= p / slope;
        }
        let slope = legendre(x).1;
        (x, 2.0 / ((1.0 - x * x) * slope * slope))
    };
    (0..n).map(node).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::layout::degree_rows;
    use crate::math::spherical::zonal;

    /// The largest error of the averages of all harmonics up to a degree.
    fn largest_error(rule: &SphereRule, degree: usize) -> f64 {
        let mut sums = vec![0.0; degree_rows(degree)];
        let mut z = sums.clone();
        for (&n, &w) in rule.points.iter().zip(&rule.weights) {
            zonal(degree, n, &mut z);
            sums.iter_mut().zip(&z).for_each(|(s, z)| *s += w * z);
        }
        sums[0] -= 1.0;
        sums.iter().fold(0.0, |m, s| s.abs().max(m))
    }

    #[test]
    fn lebedev_rules_are_exact_to_their_precision_and_not_beyond() {
        let counts = [6, 14, 26, 38, 50, 74, 86, 110, 146, 170, 194, 230, 266, 302, 350, 434];
        let precisions = [3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 35];
        assert_eq!(RULES.len(), counts.len());
        for (precision, count) in precisions.into_iter().zip(counts) {
            let rule = lebedev(precision).unwrap();
            assert_eq!((rule.precision, rule.points.len(), rule.weights.len()), (precision, count, count));
            for p in &rule.points {
                assert!((p.iter().map(|c| c * c).sum::<f64>() - 1.0).abs() < 4e-16);
            }
            let error = largest_error(&rule, precision);
            assert!(error < 1e-14, "precision {precision}: {error}");
            assert!(largest_error(&rule, precision + 1) > 1e-4, "precision {precision}");
        }
    }

    #[test]
    fn product_rules_are_exact() {
        for precision in (0..=12).chain([20, 33, 36, 47, 60]) {
            let rule = gauss_product(precision);
            let error = largest_error(&rule, precision);
            assert!(error < 1e-14, "precision {precision}: {error}");
        }
    }

    #[test]
    fn the_smallest_sufficient_rule_is_picked() {
        for (asked, precision, points) in [(0, 3, 6), (3, 3, 6), (6, 7, 26), (12, 13, 74), (33, 35, 434)] {
            let rule = sphere_rule(asked);
            assert_eq!((rule.precision, rule.points.len()), (precision, points));
        }
        assert_eq!(lebedev(36), None);
        assert_eq!(sphere_rule(36), gauss_product(36));
    }
}
