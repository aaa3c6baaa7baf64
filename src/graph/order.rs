//! The order of edges within a destination, the same for every way of finding them (SPEC section 2).

/// Displacement components that differ by less, Å, count as equal: periodic images of one atom differ by lattice
/// vectors, whose equal components come out of different sums with different rounding.
const SAME_COMPONENT: f64 = 1e-6;

/// Orders the neighbours of one destination by source node, then images of a source by (z, y, x) of their displacement.
pub(super) fn sort_row<T>(row: &mut [T], source: impl Fn(&T) -> u32, displacement: impl Fn(&T) -> [f64; 3]) {
    row.sort_unstable_by_key(&source);
    for images in row.chunk_by_mut(|a, b| source(a) == source(b)) {
        sort_images(images, &displacement, 2);
    }
}

/// Sorts by component `axis`; runs that agree within the tolerance are sorted by the axes below.
///
/// Runs instead of a tolerant comparison: that would not be a total order.
fn sort_images<T>(images: &mut [T], displacement: &impl Fn(&T) -> [f64; 3], axis: usize) {
    if images.len() < 2 {
        return;
    }
    images.sort_unstable_by(|a, b| displacement(a)[axis].total_cmp(&displacement(b)[axis]));
    if axis == 0 {
        return;
    }
    for run in images.chunk_by_mut(|a, b| displacement(b)[axis] - displacement(a)[axis] < SAME_COMPONENT) {
        sort_images(run, displacement, axis - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_then_z_y_x_with_tolerance() {
        let expected = [
            (0, [5.0, 5.0, 5.0]),
            (2, [9.0, 9.0, -3.0]),
            (2, [1.0, -2.0, 1.0 + 1e-9]),
            (2, [-1.0, 2.0 + 1e-13, 1.0]),
            (2, [1.0, 2.0, 1.0 - 1e-13]),
            (2, [0.0, 0.0, 1.1]),
            (7, [0.0, 0.0, 0.0]),
        ];
        // Any order in, the same order out.
        for shift in 0..expected.len() {
            let mut row = expected;
            row.rotate_left(shift);
            row.swap(1, 4);
            sort_row(&mut row, |e| e.0, |e| e.1);
            assert_eq!(row, expected);
        }
    }
}
