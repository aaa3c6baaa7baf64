//! The graph of a structure in a periodic cell, or in none: what the command line evaluates.

use super::Graph;
use super::order::sort_row;
use super::rows::{self, Edge};
use crate::math::Matrix3;
use crate::{Error, Result};

/// Images of the cell that may reach into the cutoff sphere; more means that the cell is in the wrong unit.
const MOST_IMAGES: f64 = 20_000.0;

/// Atoms, and how they repeat.
#[derive(Debug, Clone, Copy)]
pub struct Structure<'a> {
    /// Å; atoms may lie outside the cell.
    pub positions: &'a [[f64; 3]],
    /// Model type of each atom; negative: not an atom of the model.
    pub types: &'a [i32],
    /// The cell vectors as rows, Å, right- or left-handed. Those of directions without periodicity are not used.
    pub cell: Option<Matrix3>,
    /// Which cell vectors repeat.
    pub pbc: [bool; 3],
}

/// All edges shorter than `rcut` Å, but those between the `excluded` (unordered) pairs of types.
///
/// Errors: `Argument` for lengths that differ or periodicity without a cell; `Structure` for numbers that are not finite, a
/// singular cell, a cell too small for the cutoff, and atoms on top of each other.
pub fn build(structure: &Structure, rcut: f64, excluded: &[(u32, u32)]) -> Result<Graph> {
    let Structure { positions, types, .. } = *structure;
    check(structure)?;
    let bins = Bins::new(structure, rcut)?;
    let mut graph = Graph { n_owned: positions.len(), types: types.to_vec(), ..Graph::default() };
    rows::fill(&mut graph, &mut Vec::new(), |i, edges| {
        let first = edges.len();
        if types[i] >= 0 {
            bins.for_each_neighbour(i, rcut, |j, vec| {
                if types[j as usize] >= 0 && !is_excluded(excluded, types[i], types[j as usize]) {
                    edges.push((j, vec));
                }
            });
        }
        sort_row(&mut edges[first..], |e: &Edge| e.0, |e| e.1);
    })?;
    match graph.too_short_edge() {
        None => Ok(graph),
        Some((edge, length)) => Err(Error::Structure(format!(
            "atoms {} and {} are {length:.1e} Å apart (periodic images counted), closer than {:.0e} Å: \
             remove one of them, or check the cell",
            graph.dst[edge] + 1,
            graph.src[edge] + 1,
            super::SHORTEST_EDGE,
        ))),
    }
}

/// Whether a pair of types, in either order, is listed.
pub(super) fn is_excluded(excluded: &[(u32, u32)], a: i32, b: i32) -> bool {
    let pair = (a as u32, b as u32);
    excluded.iter().any(|&(p, q)| (p, q) == pair || (q, p) == pair)
}

fn check(structure: &Structure) -> Result<()> {
    let Structure { positions, types, cell, pbc } = *structure;
    if positions.len() != types.len() {
        let (p, t) = (positions.len(), types.len());
        return Err(Error::Argument(format!("structure has {p} positions but {t} types: give one type for each atom")));
    }
    if u32::try_from(positions.len()).is_err() {
        return Err(Error::Argument(format!("{} atoms are more than 32-bit numbers can tell apart", positions.len())));
    }
    if let Some((i, p)) = positions.iter().enumerate().find(|(_, p)| !p.iter().all(|c| c.is_finite())) {
        return Err(Error::Structure(format!("position of atom {} is not finite: {p:?}", i + 1)));
    }
    match cell {
        None if pbc.contains(&true) => Err(Error::Argument(
            "structure is periodic but has no cell: give its three vectors, or no periodicity".into(),
        )),
        Some(cell) if !cell.as_flattened().iter().all(|c| c.is_finite()) => {
            Err(Error::Structure(format!("cell is not finite: {cell:?}")))
        }
        _ => Ok(()),
    }
}

/// Atoms sorted into slabs of about half the cutoff along each cell vector, wrapped into the cell where it repeats.
struct Bins {
    /// Cell vectors; where there is no periodicity, unit vectors that complete them.
    cell: Matrix3,
    periodic: [bool; 3],
    /// Bins along each vector.
    count: [usize; 3],
    /// How many bins away an atom within the cutoff may lie.
    reach: [isize; 3],
    /// Bin of each atom, by direction.
    bin: Vec<[usize; 3]>,
    /// Wrapped position of each atom.
    wrapped: Vec<[f64; 3]>,
    /// Offsets into `members`, one more than there are bins.
    start: Vec<u32>,
    /// Atoms by bin, with their wrapped positions.
    members: Vec<Edge>,
}

impl Bins {
    fn new(structure: &Structure, rcut: f64) -> Result<Self> {
        let Structure { positions, pbc: periodic, .. } = *structure;
        let cell = complete(structure.cell.unwrap_or_default(), periodic)?;
        // Rows of `reciprocal` give fractional coordinates; their lengths are 1 / distance between lattice planes.
        let reciprocal = inverse_transposed(&cell);
        let height = reciprocal.map(|b| 1.0 / dot(b, b).sqrt());
        refuse_tiny_cell(height, periodic, rcut)?;

        let mut wrapped = positions.to_vec();
        let mut fraction: Vec<[f64; 3]> = positions.iter().map(|&p| reciprocal.map(|b| dot(p, b))).collect();
        let (mut low, mut span) = ([0.0; 3], [1.0; 3]);
        for a in 0..3 {
            if periodic[a] {
                for (p, f) in wrapped.iter_mut().zip(&mut fraction) {
                    let shift = f[a].floor();
                    f[a] -= shift;
                    *p = std::array::from_fn(|k| p[k] - shift * cell[a][k]);
                }
            } else {
                low[a] = fraction.iter().fold(f64::INFINITY, |m, f| m.min(f[a]));
                span[a] = fraction.iter().fold(f64::NEG_INFINITY, |m, f| m.max(f[a])) - low[a];
            }
        }
        let extent: [f64; 3] = std::array::from_fn(|a| span[a] * height[a]);
        let count = bin_counts(extent, rcut, positions.len());
        let reach = std::array::from_fn(|a| {
            // One bin holds everything in a direction that does not repeat: none beside it to look at.
            if count[a] == 1 && !periodic[a] { 0 } else { (rcut / extent[a] * count[a] as f64).ceil() as isize }
        });
        let bin_of = |f: &[f64; 3]| -> [usize; 3] {
            // Casts saturate, so rounding at the lower end and an extent of zero end up in bin 0.
            std::array::from_fn(|a| (((f[a] - low[a]) / span[a] * count[a] as f64) as usize).min(count[a] - 1))
        };
        let bin: Vec<_> = fraction.iter().map(bin_of).collect();
        let mut bins = Bins { cell, periodic, count, reach, bin, wrapped, start: Vec::new(), members: Vec::new() };
        bins.sort_members();
        Ok(bins)
    }

    fn index(&self, [i, j, k]: [usize; 3]) -> usize {
        (i * self.count[1] + j) * self.count[2] + k
    }

    /// Counting sort of the atoms into `members`.
    fn sort_members(&mut self) {
        let mut start = vec![0; self.count.iter().product::<usize>() + 1];
        for &bin in &self.bin {
            start[self.index(bin) + 1] += 1;
        }
        for b in 1..start.len() {
            start[b] += start[b - 1];
        }
        let mut next = start.clone();
        self.members = vec![Edge::default(); self.bin.len()];
        for (i, (&bin, &position)) in (0..).zip(self.bin.iter().zip(&self.wrapped)) {
            let slot = &mut next[self.index(bin)];
            self.members[*slot as usize] = (i, position);
            *slot += 1;
        }
        self.start = start;
    }

    /// Calls `found(j, r_j + T - r_i)` for each atom and image within the cutoff, but not for atom `i` itself.
    fn for_each_neighbour(&self, i: usize, rcut: f64, mut found: impl FnMut(u32, [f64; 3])) {
        let centre = self.wrapped[i];
        for (x, shift_x) in self.near(i, 0) {
            for (y, shift_y) in self.near(i, 1) {
                for (z, shift_z) in self.near(i, 2) {
                    let shift = [shift_x, shift_y, shift_z];
                    let translation: [f64; 3] =
                        std::array::from_fn(|k| (0..3).map(|a| shift[a] * self.cell[a][k]).sum());
                    let itself = shift == [0.0; 3];
                    let bin = self.index([x, y, z]);
                    for &(j, p) in &self.members[self.start[bin] as usize..self.start[bin + 1] as usize] {
                        let vec = std::array::from_fn(|k| p[k] - centre[k] + translation[k]);
                        if dot(vec, vec) < rcut * rcut && !(itself && j as usize == i) {
                            found(j, vec);
                        }
                    }
                }
            }
        }
    }

    /// Bins of direction `a` within reach of atom `i`, each with the cell image that it belongs to.
    fn near(&self, i: usize, a: usize) -> impl Iterator<Item = (usize, f64)> {
        let (centre, count, periodic) = (self.bin[i][a] as isize, self.count[a] as isize, self.periodic[a]);
        (centre - self.reach[a]..=centre + self.reach[a])
            .filter(move |bin| periodic || (0..count).contains(bin))
            .map(move |bin| (bin.rem_euclid(count) as usize, bin.div_euclid(count) as f64))
    }
}

/// Bins along each direction: half a cutoff wide, but not many more bins than atoms.
fn bin_counts(extent: [f64; 3], rcut: f64, n_atoms: usize) -> [usize; 3] {
    let most = 4096 + 4 * n_atoms;
    let mut count = extent.map(|e| ((2.0 * e / rcut) as usize).clamp(1, most));
    while count.iter().fold(1usize, |product, &c| product.saturating_mul(c)) > most {
        if let Some(largest) = count.iter_mut().max() {
            *largest = largest.div_ceil(2);
        }
    }
    count
}

/// Replaces the vectors of directions that do not repeat by unit vectors at right angles to the others.
fn complete(mut cell: Matrix3, periodic: [bool; 3]) -> Result<Matrix3> {
    let given = cell;
    for a in (0..3).filter(|&a| !periodic[a]) {
        cell[a] = [0.0; 3];
    }
    for a in (0..3).filter(|&a| !periodic[a]) {
        let others = [cell[(a + 1) % 3], cell[(a + 2) % 3]];
        cell[a] = match others.iter().position(|&v| v == [0.0; 3]) {
            None => unit(cross(others[0], others[1])),
            Some(missing) => perpendicular(others[1 - missing]),
        };
    }
    let lengths: f64 = cell.iter().map(|&v| dot(v, v).sqrt()).product();
    let volume = dot(cell[0], cross(cell[1], cell[2])).abs();
    // Vectors of length zero can give NaN.
    if volume.is_nan() || volume <= 1e-9 * lengths {
        return Err(Error::Structure(format!(
            "cell is singular: the periodic ones of its vectors {given:?} Å do not span a volume"
        )));
    }
    Ok(cell)
}

fn refuse_tiny_cell(height: [f64; 3], periodic: [bool; 3], rcut: f64) -> Result<()> {
    let images: f64 = (0..3).filter(|&a| periodic[a]).map(|a| 2.0 * (rcut / height[a]).ceil() + 1.0).product();
    if images > MOST_IMAGES {
        return Err(Error::Structure(format!(
            "cell is too small: {images:.0} images of it reach into the cutoff of {rcut} Å, more than {MOST_IMAGES}; \
             its planes are {height:.3?} Å apart. Check the unit of the cell (Å)"
        )));
    }
    Ok(())
}

fn dot(a: [f64; 3], b: [f64; 3]) -> f64 {
    a[0] * b[0] + a[1] * b[1] + a[2] * b[2]
}

fn cross(a: [f64; 3], b: [f64; 3]) -> [f64; 3] {
    std::array::from_fn(|k| a[(k + 1) % 3] * b[(k + 2) % 3] - a[(k + 2) % 3] * b[(k + 1) % 3])
}

fn unit(v: [f64; 3]) -> [f64; 3] {
    let length = dot(v, v).sqrt();
    v.map(|c| c / length)
}

/// A unit vector at right angles to `v`; any, if `v` is zero.
fn perpendicular(v: [f64; 3]) -> [f64; 3] {
    let smallest = if v[0].abs() <= v[1].abs().min(v[2].abs()) {
        0
    } else if v[1].abs() <= v[2].abs() {
        1
    } else {
        2
    };
    let mut axis = [0.0; 3];
    axis[smallest] = 1.0;
    if v == [0.0; 3] { axis } else { unit(cross(v, axis)) }
}

/// Rows b_a with b_a . cell_c = delta_ac.
fn inverse_transposed(cell: &Matrix3) -> Matrix3 {
    let volume = dot(cell[0], cross(cell[1], cell[2]));
    std::array::from_fn(|a| cross(cell[(a + 1) % 3], cell[(a + 2) % 3]).map(|c| c / volume))
}
