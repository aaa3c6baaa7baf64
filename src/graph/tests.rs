//! Both ways to the graph against a search over all pairs and images, and against each other.

use super::*;
use crate::math::Matrix3;
use crate::math::testing::Random;
use proptest::prelude::*;

/// A structure that owns its atoms.
#[derive(Debug, Clone)]
struct Sample {
    positions: Vec<[f64; 3]>,
    types: Vec<i32>,
    cell: Matrix3,
    pbc: [bool; 3],
}

impl Sample {
    /// `n` atoms of three types, one in four not of the model, some of them outside the cell.
    fn random(n: usize, cell: Matrix3, pbc: [bool; 3], seed: u64) -> Self {
        let mut random = Random(seed);
        let position = |random: &mut Random| {
            let f: [f64; 3] = std::array::from_fn(|_| 1.6 * random.uniform() - 0.3);
            std::array::from_fn(|k| (0..3).map(|a| f[a] * cell[a][k]).sum())
        };
        let positions = (0..n).map(|_| position(&mut random)).collect();
        let types = (0..n).map(|_| random.below(4) as i32 - 1).collect();
        Sample { positions, types, cell, pbc }
    }

    fn structure(&self) -> Structure<'_> {
        Structure { positions: &self.positions, types: &self.types, cell: Some(self.cell), pbc: self.pbc }
    }

    fn graph(&self, rcut: f64) -> Graph {
        build(&self.structure(), rcut, EXCLUDED).unwrap()
    }

    /// Translations n . cell with |n_a| <= most, 0 where there is no periodicity.
    fn translations(&self, most: i32) -> Vec<[f64; 3]> {
        let range = |a: usize| if self.pbc[a] { -most..=most } else { 0..=0 };
        let mut all = Vec::new();
        for (i, j, k) in range(0).flat_map(|i| range(1).flat_map(move |j| range(2).map(move |k| (i, j, k)))) {
            let n = [i, j, k].map(f64::from);
            all.push(std::array::from_fn(|c| (0..3).map(|a| n[a] * self.cell[a][c]).sum()));
        }
        all
    }
}

const EXCLUDED: &[(u32, u32)] = &[(1, 0)];

fn distance(v: [f64; 3]) -> f64 {
    v.iter().map(|c| c * c).sum::<f64>().sqrt()
}

fn joined(a: i32, b: i32) -> bool {
    a >= 0 && b >= 0 && (a.min(b), a.max(b)) != (0, 1)
}

/// (destination, source, displacement) of every pair and translation, ordered by a tolerant comparison.
fn brute_force(b: &Sample, rcut: f64, most: i32) -> Vec<(u32, u32, [f64; 3])> {
    let translations = b.translations(most);
    let mut edges = Vec::new();
    for (i, ri) in b.positions.iter().enumerate() {
        for (j, rj) in b.positions.iter().enumerate() {
            for t in &translations {
                let v = std::array::from_fn(|k| rj[k] + t[k] - ri[k]);
                let itself = i == j && *t == [0.0; 3];
                if distance(v) < rcut && !itself && joined(b.types[i], b.types[j]) {
                    edges.push((i as u32, j as u32, v));
                }
            }
        }
    }
    edges.sort_by(|a, b| {
        (a.0, a.1).cmp(&(b.0, b.1)).then_with(|| {
            (0..3)
                .rev()
                .find(|&k| (a.2[k] - b.2[k]).abs() > 1e-6)
                .map_or(std::cmp::Ordering::Equal, |k| a.2[k].total_cmp(&b.2[k]))
        })
    });
    edges
}

fn assert_edges(graph: &Graph, expected: &[(u32, u32, [f64; 3])]) {
    graph.validate().unwrap();
    let pairs: Vec<_> = graph.dst.iter().copied().zip(graph.src.iter().copied()).collect();
    let expected_pairs: Vec<_> = expected.iter().map(|e| (e.0, e.1)).collect();
    assert_eq!(pairs, expected_pairs);
    for (e, (found, expected)) in graph.vec.iter().zip(expected).enumerate() {
        for k in 0..3 {
            assert!((found[k] - expected.2[k]).abs() < 1e-12, "edge {e}: {found:?} and {:?}", expected.2);
        }
    }
}

/// What a LAMMPS process holds of a box of atoms.
struct Process {
    n_local: usize,
    positions: Vec<[f64; 3]>,
    types: Vec<i32>,
    node: Vec<u32>,
    rows: Vec<(u32, Vec<i32>)>,
    /// (atom of the box, translation) of each local atom and ghost.
    origin: Vec<(usize, [f64; 3])>,
    /// Atom of the box that each node is.
    atom_of_node: Vec<usize>,
}

impl Process {
    /// The process that owns the atoms `owned`, ghosts and lists shuffled, with flag bits in the lists.
    fn new(b: &Sample, owned: &[usize], reach: f64, most: i32, random: &mut Random) -> Self {
        let mut origin: Vec<_> = owned.iter().map(|&i| (i, [0.0; 3])).collect();
        let mut ghosts = Vec::new();
        for atom in 0..b.positions.len() {
            for t in b.translations(most) {
                let p: [f64; 3] = std::array::from_fn(|k| b.positions[atom][k] + t[k]);
                let local = t == [0.0; 3] && owned.contains(&atom);
                let near = |&i: &usize| distance(std::array::from_fn(|k| p[k] - b.positions[i][k])) < reach;
                if !local && owned.iter().any(near) {
                    ghosts.push((atom, t));
                }
            }
        }
        random.shuffle(&mut ghosts);
        origin.extend(ghosts);

        let mut atom_of_node = owned.to_vec();
        let mut node = Vec::new();
        for &(atom, _) in &origin {
            let found = atom_of_node.iter().position(|&a| a == atom).unwrap_or_else(|| {
                atom_of_node.push(atom);
                atom_of_node.len() - 1
            });
            node.push(found as u32);
        }
        let types = origin.iter().map(|&(atom, _)| b.types[atom]).collect();
        let n_local = owned.len();
        let mut process =
            Process { n_local, positions: Vec::new(), types, node, rows: Vec::new(), origin, atom_of_node };
        process.positions = process.at(b);
        for i in 0..n_local {
            let difference = |j: usize| std::array::from_fn(|k| process.positions[j][k] - process.positions[i][k]);
            let mut row: Vec<i32> = (0..process.positions.len())
                .filter(|&j| j != i && distance(difference(j)) < reach)
                .map(|j| (j as u32 | (random.below(8) as u32) << 29) as i32)
                .collect();
            random.shuffle(&mut row);
            process.rows.push((i as u32, row));
        }
        random.shuffle(&mut process.rows);
        process
    }

    /// Positions of local atoms and ghosts when the atoms are where `b` has them.
    fn at(&self, b: &Sample) -> Vec<[f64; 3]> {
        self.origin.iter().map(|(atom, t)| std::array::from_fn(|k| b.positions[*atom][k] + t[k])).collect()
    }

    fn list(&self, rcut: f64) -> NeighbourList {
        let rows: Vec<_> = self.rows.iter().map(|(i, row)| (*i, row.as_slice())).collect();
        let Process { n_local, ref positions, ref types, ref node, .. } = *self;
        NeighbourList::new(&LammpsList { n_local, positions, types, node, rows: &rows }, rcut, EXCLUDED).unwrap()
    }
}

fn edges(graph: &Graph) -> Vec<(u32, u32, [f64; 3])> {
    (0..graph.n_edges()).map(|e| (graph.dst[e], graph.src[e], graph.vec[e])).collect()
}

/// Boxes to test with: (atoms, cell, periodicity).
fn boxes() -> Vec<(usize, Matrix3, [bool; 3])> {
    let cubic = |a: f64| [[a, 0.0, 0.0], [0.0, a, 0.0], [0.0, 0.0, a]];
    let triclinic = [[5.0, 0.0, 0.0], [2.1, 4.5, 0.0], [-1.7, 1.3, 6.0]];
    let turned = [[3.0, 2.5, 0.5], [-2.0, 4.0, 1.0], [0.3, -1.1, 5.0]];
    let left_handed = [[0.0, 5.0, 0.0], [6.0, 0.0, 0.0], [0.0, 0.7, 7.0]];
    vec![
        (1, cubic(2.1), [true; 3]),
        (1, cubic(9.0), [true; 3]),
        (2, cubic(2.5), [true; 3]),
        (20, cubic(20.0), [true; 3]),
        (40, cubic(11.0), [true; 3]),
        (9, triclinic, [true; 3]),
        (9, turned, [true; 3]),
        (9, left_handed, [true; 3]),
        (9, triclinic, [true, false, true]),
        (9, turned, [false, true, false]),
        (30, cubic(9.0), [false; 3]),
        (1, cubic(9.0), [false; 3]),
        (0, cubic(9.0), [true; 3]),
    ]
}

#[test]
fn cell_graph_is_that_of_all_pairs_and_images() {
    for (case, (n, cell, pbc)) in boxes().into_iter().enumerate() {
        let b = Sample::random(n, cell, pbc, case as u64);
        for rcut in [1.5, 4.0] {
            assert_edges(&b.graph(rcut), &brute_force(&b, rcut, 5));
        }
    }
}

#[test]
fn lammps_list_gives_the_same_edges_in_the_same_order() {
    let (rcut, skin) = (4.0, 1.0);
    for (case, (n, cell, pbc)) in boxes().into_iter().enumerate() {
        let mut random = Random(100 + case as u64);
        let mut b = Sample::random(n, cell, pbc, case as u64);
        let everything: Vec<_> = (0..n).collect();
        let process = Process::new(&b, &everything, rcut + skin, 6, &mut random);
        let mut list = process.list(rcut);
        // Steps without a rebuild: nobody moves further than half the skin.
        for step in 0..4 {
            let graph = list.graph(&process.at(&b)).unwrap();
            let reference = b.graph(rcut);
            assert_eq!((graph.n_owned, &graph.types), (reference.n_owned, &reference.types));
            assert_eq!((&graph.dst_start, &graph.src_start), (&reference.dst_start, &reference.src_start));
            assert_eq!(graph.src_edges, reference.src_edges);
            assert_edges(graph, &edges(&reference));
            assert!(step > 0 || case != 4 || graph.n_edges() > 100);
            b.positions.iter_mut().flatten().for_each(|c| *c += 0.15 * (random.uniform() - 0.5));
        }
    }
}

/// Two processes share the atoms; the nodes of remote owners stand behind the owned ones, once each.
#[test]
fn processes_divide_the_edges() {
    let (rcut, skin) = (4.0, 0.5);
    for (case, (n, cell, pbc)) in boxes().into_iter().enumerate() {
        let mut random = Random(200 + case as u64);
        let b = Sample::random(n, cell, pbc, case as u64);
        let mut found = Vec::new();
        for parity in 0..2 {
            let owned: Vec<_> = (0..n).filter(|i| i % 2 == parity).collect();
            let process = Process::new(&b, &owned, rcut + skin, 6, &mut random);
            let mut list = process.list(rcut);
            let graph = list.graph(&process.positions).unwrap();
            graph.validate().unwrap();
            let types: Vec<_> = process.atom_of_node.iter().map(|&a| b.types[a]).collect();
            assert_eq!((graph.n_owned, &graph.types), (owned.len(), &types));
            let atom = |node: u32| process.atom_of_node[node as usize] as u32;
            found.extend(edges(graph).into_iter().map(|(d, s, v)| (atom(d), atom(s), v)));
        }
        let mut reference = b.graph(rcut);
        // Images of a pair keep their order, so a stable sort by pair restores that of one process.
        found.sort_by_key(|&(d, s, _)| (d, s));
        assert_eq!(found.len(), reference.n_edges());
        reference.vec = found.iter().map(|e| e.2).collect();
        assert_edges(&reference, &found);
        assert_edges(&b.graph(rcut), &found);
    }
}

#[test]
fn thread_count_does_not_matter() {
    let b = Sample::random(700, [[18.0, 0.0, 0.0], [3.0, 17.0, 0.0], [0.0, 0.0, 19.0]], [true; 3], 7);
    let process = Process::new(&b, &(0..700).collect::<Vec<_>>(), 4.5, 1, &mut Random(8));
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| (b.graph(4.0), process.list(4.0).graph(&process.positions).unwrap().clone()))
    };
    let one = run(1);
    assert!(one.0.n_edges() > 1000);
    assert_eq!(one, run(3));
}

#[test]
fn perfect_lattices_order_their_images() {
    // Every image of every atom ties with others in one or two components.
    let mut b = Sample::random(0, [[3.6, 0.0, 0.0], [0.0, 3.6, 0.0], [0.0, 0.0, 3.6]], [true; 3], 0);
    b.positions = vec![[0.1, 0.2, 0.3], [1.9, 2.0, 0.3], [1.9, 0.2, 2.1], [0.1, 2.0, 2.1]];
    b.types = vec![0; 4];
    let graph = b.graph(6.0);
    // Shells of the fcc lattice within 6 Å: 12 + 6 + 24 + 12 + 24.
    assert_eq!(graph.dst_start, [0, 78, 156, 234, 312]);
    assert_edges(&graph, &brute_force(&b, 6.0, 3));
    let process = Process::new(&b, &[0, 1, 2, 3], 7.0, 3, &mut Random(9));
    let mut list = process.list(6.0);
    assert_edges(list.graph(&process.positions).unwrap(), &edges(&graph));
}

#[test]
fn no_cell_and_cells_with_missing_vectors() {
    let positions = [[0.0; 3], [1.0, 0.0, 0.0], [1.0, 0.0, 1e7]];
    let lone = Structure { positions: &positions, types: &[0; 3], cell: None, pbc: [false; 3] };
    assert_edges(&build(&lone, 3.0, &[]).unwrap(), &[(0, 1, [1.0, 0.0, 0.0]), (1, 0, [-1.0, 0.0, 0.0])]);
    // A chain along y; the other vectors are missing, as some programs write them.
    let cell = Some([[0.0; 3], [0.0, 2.0, 0.0], [0.0; 3]]);
    let chain = Structure { positions: &positions[..1], types: &[0], cell, pbc: [false, true, false] };
    let graph = build(&chain, 3.0, &[]).unwrap();
    assert_edges(&graph, &[(0, 0, [0.0, -2.0, 0.0]), (0, 0, [0.0, 2.0, 0.0])]);
}

#[test]
fn empty_graphs() {
    let mut b = Sample::random(0, [[9.0, 0.0, 0.0], [0.0, 9.0, 0.0], [0.0, 0.0, 9.0]], [true; 3], 0);
    assert_eq!(b.graph(4.0), Graph { dst_start: vec![0], src_start: vec![0], ..Graph::default() });
    b.positions = vec![[1.0, 2.0, 3.0]];
    b.types = vec![2];
    let lone = Graph { n_owned: 1, types: vec![2], dst_start: vec![0, 0], src_start: vec![0, 0], ..Graph::default() };
    assert_eq!(b.graph(4.0), lone);
    let process = Process::new(&b, &[0], 5.0, 1, &mut Random(0));
    assert_eq!(*process.list(4.0).graph(&process.positions).unwrap(), lone);
}

fn message(structure: &Structure, rcut: f64) -> String {
    build(structure, rcut, &[]).unwrap_err().to_string()
}

#[test]
fn bad_structures_are_named() {
    let cell = Some([[9.0, 0.0, 0.0], [0.0, 9.0, 0.0], [0.0, 0.0, 9.0]]);
    let good = Structure { positions: &[[0.0; 3], [2.0; 3]], types: &[0, 1], cell, pbc: [true; 3] };
    assert!(build(&good, 4.0, &[]).is_ok());
    let nan = Structure { positions: &[[0.0; 3], [0.0, f64::NAN, 0.0]], ..good };
    assert!(message(&nan, 4.0).starts_with("position of atom 2 is not finite"));
    // Atom 2 sits on the image of atom 1 in the next cell.
    let close = Structure { positions: &[[0.0; 3], [9.0, 9.0, 9.0 + 5e-7]], ..good };
    let text = message(&close, 4.0);
    assert!(text.contains("atoms 1 and 2 are 5.0e-7 Å apart"), "{text}");
    let flat = Structure { cell: Some([[9.0, 0.0, 0.0], [0.0, 9.0, 0.0], [9.0, 9.0, 0.0]]), ..good };
    assert!(message(&flat, 4.0).starts_with("cell is singular"));
    let zero = Structure { cell: Some([[0.0; 3]; 3]), ..good };
    assert!(message(&zero, 4.0).starts_with("cell is singular"));
    let infinite = Structure { cell: Some([[f64::INFINITY; 3]; 3]), ..good };
    assert!(message(&infinite, 4.0).starts_with("cell is not finite"));
    let tiny = Structure { cell: cell.map(|c| c.map(|v| v.map(|x| x / 90.0))), ..good };
    let text = message(&tiny, 4.0);
    assert!(text.contains("531441 images"), "{text}");
    assert!(message(&Structure { cell: None, ..good }, 4.0).contains("no cell"));
    assert!(message(&Structure { types: &[0], ..good }, 4.0).contains("2 positions but 1 types"));
}

#[test]
fn bad_lists_are_named() {
    let good = LammpsList {
        n_local: 2,
        positions: &[[0.0; 3], [1.0, 0.0, 0.0], [2.0, 0.0, 0.0], [3.0, 0.0, 0.0]],
        types: &[0, 1, 0, 1],
        node: &[0, 1, 0, 2],
        rows: &[(0, &[1, 2, 3]), (1, &[0, 2, 3])],
    };
    let mut list = NeighbourList::new(&good, 4.0, &[]).unwrap();
    assert_eq!(list.graph(good.positions).unwrap().src, [0, 1, 2, 0, 0, 2]);
    let complaint = |list: &LammpsList| NeighbourList::new(list, 4.0, &[]).unwrap_err().to_string();
    for (bad, expected) in [
        (LammpsList { node: &[0, 1, 0], ..good }, "4 positions, 4 types and 3 nodes"),
        (LammpsList { node: &[1, 0, 0, 2], ..good }, "owned atom 0 is given node 1"),
        (LammpsList { node: &[0, 1, 1, 2], ..good }, "ghost 2 has type 0, but node 1"),
        (LammpsList { node: &[0, 1, 0, 3], ..good }, "no ghost belongs to node 2"),
        (LammpsList { node: &[0, 1, 0, 9], ..good }, "node 9 for 4 atoms"),
        (LammpsList { rows: &[(2, &[])], ..good }, "entry for atom 2, but this process owns 2"),
        (LammpsList { rows: &[(0, &[]), (0, &[])], ..good }, "two entries for atom 0"),
        (LammpsList { rows: &[(0, &[4])], ..good }, "atom 0 has neighbour 4"),
        (LammpsList { rows: &[(0, &[0])], ..good }, "atom 0 has neighbour 0"),
        (LammpsList { positions: &[[f64::NAN; 3]; 4], ..good }, "position of atom 1"),
    ] {
        assert!(complaint(&bad).contains(expected), "{}", complaint(&bad));
    }
    assert!(list.graph(&[[0.0; 3]; 3]).unwrap_err().to_string().contains("3 positions"));
    assert!(list.graph(&[[0.0; 3]; 4]).unwrap_err().to_string().contains("0.0e0 Å apart"));
    assert!(list.graph(&[[f64::INFINITY; 3]; 4]).unwrap_err().to_string().contains("not finite"));
    // An error leaves the list usable.
    assert_eq!(list.graph(good.positions).unwrap().n_edges(), 6);
}

#[test]
fn validation_finds_defects() {
    let b = Sample::random(20, [[7.0, 0.0, 0.0], [0.0, 7.0, 0.0], [0.0, 0.0, 7.0]], [true; 3], 3);
    let good = b.graph(4.0);
    let broken = |change: fn(&mut Graph)| {
        let mut graph = good.clone();
        change(&mut graph);
        graph.validate().is_err()
    };
    assert!(good.n_edges() > 10 && !broken(|_| ()));
    assert!(broken(|g| g.n_owned += 1));
    assert!(broken(|g| g.dst_start[1] += 1));
    assert!(broken(|g| g.src.reverse()));
    assert!(broken(|g| g.src_edges.reverse()));
    assert!(broken(|g| g.vec.truncate(3)));
    assert!(broken(|g| g.types.fill(-1)));
}

/// 100,000 atoms at the density of water: a linear search takes a fraction of a second, one over all pairs minutes.
#[test]
fn many_atoms_are_no_problem() {
    let (n, a, rcut) = (100_000, 100.0, 3.0);
    let mut random = Random(11);
    let positions: Vec<[f64; 3]> = (0..n).map(|_| std::array::from_fn(|_| a * random.uniform())).collect();
    let cell = Some([[a, 0.0, 0.0], [0.0, a, 0.0], [0.0, 0.0, a]]);
    let graph =
        build(&Structure { positions: &positions, types: &vec![0; n], cell, pbc: [true; 3] }, rcut, &[]).unwrap();
    // The pairs of an ideal gas; their number fluctuates by about its square root.
    let pairs = (n * (n - 1) / 2) as f64 * 4.0 / 3.0 * std::f64::consts::PI * (rcut / a).powi(3);
    assert!((graph.n_edges() as f64 / 2.0 - pairs).abs() < 5.0 * pairs.sqrt());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn random_boxes(
        n in 1usize..12,
        diagonal in prop::array::uniform3(3.0f64..9.0),
        tilt in prop::array::uniform6(-2.0f64..2.0),
        pbc in prop::array::uniform3(any::<bool>()),
        rcut in 1.0f64..6.0,
        seed in any::<u64>(),
    ) {
        let [x, y, z] = diagonal;
        let cell = [[x, tilt[0], tilt[1]], [tilt[2], y, tilt[3]], [tilt[4], tilt[5], z]];
        let volume = cell[0][0] * (cell[1][1] * cell[2][2] - cell[1][2] * cell[2][1])
            - cell[0][1] * (cell[1][0] * cell[2][2] - cell[1][2] * cell[2][0])
            + cell[0][2] * (cell[1][0] * cell[2][1] - cell[1][1] * cell[2][0]);
        // Not so flat that the search below needs many images.
        prop_assume!(volume.abs() > 40.0);
        let b = Sample::random(n, cell, pbc, seed);
        let expected = brute_force(&b, rcut, 12);
        assert_edges(&b.graph(rcut), &expected);
        let process = Process::new(&b, &(0..n).collect::<Vec<_>>(), rcut + 0.5, 12, &mut Random(seed));
        assert_edges(process.list(rcut).graph(&process.positions).unwrap(), &expected);
    }
}
