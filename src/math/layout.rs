//! Where the coefficient (l, m) lies in the packed and in the m-major row order (SPEC section 0).

/// Row of (l, m) in packed order: degrees ascending, m = -l..=l within each.
#[inline]
pub fn packed(l: usize, m: i32) -> usize {
    debug_assert!(m.unsigned_abs() as usize <= l);
    (l * l + l).wrapping_add_signed(m as isize)
}

/// Rows of all degrees up to `lmax`: (lmax + 1)^2.
#[inline]
pub fn degree_rows(lmax: usize) -> usize {
    (lmax + 1) * (lmax + 1)
}

/// The (l, m) of each row of the edge-frame order: m = 0 for l = 0..=lmax, then for each m = 1..=mmax
/// the -m rows and the +m rows, each for l = m..=lmax.
pub fn m_major(lmax: usize, mmax: usize) -> Vec<(usize, i32)> {
    let mut rows: Vec<_> = (0..=lmax).map(|l| (l, 0)).collect();
    for m in 1..=mmax.min(lmax) {
        rows.extend((m..=lmax).map(|l| (l, -(m as i32))));
        rows.extend((m..=lmax).map(|l| (l, m as i32)));
    }
    rows
}

/// What makes up for the orders |m| > `mmax` that a truncated degree `l` lost: sqrt((2l+1)/(2 mmax+1)) for l > mmax, else 1.
pub fn truncation_scale(l: usize, mmax: usize) -> f64 {
    if l > mmax { ((2 * l + 1) as f64 / (2 * mmax + 1) as f64).sqrt() } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_order_numbers_every_row_once() {
        let rows: Vec<_> = (0..=5).flat_map(|l| (-(l as i32)..=l as i32).map(move |m| packed(l, m))).collect();
        assert_eq!(rows, (0..degree_rows(5)).collect::<Vec<_>>());
    }

    #[test]
    fn m_major_order_of_lmax_3() {
        let one = [(0, 0), (1, 0), (2, 0), (3, 0), (1, -1), (2, -1), (3, -1), (1, 1), (2, 1), (3, 1)];
        assert_eq!(m_major(3, 1), one);
        assert_eq!(m_major(2, 2)[3..], [(1, -1), (2, -1), (1, 1), (2, 1), (2, -2), (2, 2)]);
        assert_eq!(m_major(0, 0), [(0, 0)]);
        // Dm = (L+1) + sum_{m=1..M} 2(L-m+1), and no more orders than the degree has.
        assert_eq!(m_major(6, 3).len(), 7 + 2 * (6 + 5 + 4));
        assert_eq!(m_major(4, 9).len(), degree_rows(4));
    }

    #[test]
    fn truncation_scale_keeps_the_mean_square() {
        assert_eq!(truncation_scale(1, 1), 1.0);
        assert_eq!(truncation_scale(3, 1), (7.0f64 / 3.0).sqrt());
        assert_eq!(truncation_scale(5, 0), 11.0f64.sqrt());
    }
}
