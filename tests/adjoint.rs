//! Forces and virials of whole models: the derivatives of the energy, and the symmetries that they must have.

mod common;

use common::{Reference, committed_model, committed_reference, evaluate, graph_of};
use sezm::engine::{self, Engine, Evaluation, OneRank, Precision, Request};
use sezm::graph::Structure;
use sezm::math::Matrix3;
use sezm::model::Model;

/// One of each way through the model.
const MODELS: [&str; 10] = [
    "neo_like",
    "pro_like",
    "version_10",
    "edge_norm_off",
    "env_seed_off",
    "heads_0_focus_2",
    "heads_4_focus_2",
    "schedules",
    "ffn_gated",
    "readout_glu_layers_2",
];

/// A model, its f64 engine and a structure that may be moved.
struct System {
    model: Model,
    engine: Box<dyn Engine>,
    positions: Vec<[f64; 3]>,
    types: Vec<i32>,
    cell: Option<Matrix3>,
}

impl System {
    fn new(name: &str, structure: &str) -> Self {
        let model = committed_model(name);
        let Reference { positions, types, cell, .. } = committed_reference(&model, name, structure);
        let engine = engine::create(&model, Precision::Fp64, "cpu").unwrap();
        System { model, engine, positions, types, cell }
    }
    fn evaluate(&mut self) -> Evaluation {
        let pbc = [self.cell.is_some(); 3];
        let structure = Structure { positions: &self.positions, types: &self.types, cell: self.cell, pbc };
        let graph = graph_of(&self.model, &structure);
        let want = Request { atom_virial: true, descriptor: false };
        self.engine.evaluate(&graph, want, &mut OneRank).unwrap()
    }
    /// Applies `x -> M x` to positions and cell.
    fn transform(&mut self, matrix: &Matrix3) {
        let apply = |v: [f64; 3]| matrix.map(|row| row.iter().zip(v).map(|(m, x)| m * x).sum());
        self.positions = self.positions.iter().map(|&p| apply(p)).collect();
        self.cell = self.cell.map(|cell| cell.map(apply));
    }
}

/// Fourth-order central difference of `energy(step)` at 0.
fn slope(mut energy: impl FnMut(f64) -> f64) -> f64 {
    let h = 5e-4;
    (8.0 * (energy(h) - energy(-h)) - (energy(2.0 * h) - energy(-2.0 * h))) / (12.0 * h)
}

fn assert_close(what: &str, found: f64, expected: f64, allowed: f64) {
    assert!((found - expected).abs() <= allowed, "{what}: {found}, expected {expected} within {allowed:e}");
}

fn largest(values: &[f64]) -> f64 {
    values.iter().fold(1e-3f64, |m, v| m.max(v.abs()))
}

/// Calls `check` with every model and structure.
fn for_each(structures: &[&str], check: impl Fn(&str, System)) {
    for name in MODELS {
        for structure in structures {
            check(&format!("{name} {structure}"), System::new(name, structure));
        }
    }
}

#[test]
fn forces_are_the_slopes_of_the_energy() {
    for_each(&["cellOH", "moleculeOH", "pair_z"], |name, mut system| {
        let forces = system.evaluate().forces;
        let size = largest(forces.as_flattened());
        for (atom, force) in forces.iter().enumerate().take(3) {
            for (a, force) in force.iter().enumerate() {
                let at = system.positions[atom][a];
                let numeric = slope(|step| {
                    system.positions[atom][a] = at + step;
                    system.evaluate().energy
                });
                system.positions[atom][a] = at;
                assert_close(&format!("{name}: force {a} on atom {atom}"), *force, -numeric, 1e-7 * size);
            }
        }
    });
}

#[test]
fn the_virial_is_the_slope_under_strain() {
    for_each(&["cellOH", "moleculeOH"], |name, mut system| {
        let virial = system.evaluate().virial;
        let size = largest(&virial);
        let (positions, cell) = (system.positions.clone(), system.cell);
        for k in 0..9 {
            // r'_a = r_a + t r_b gives V_ab = -dE/dt.
            let numeric = slope(|t| {
                (system.positions, system.cell) = (positions.clone(), cell);
                let mut strain: Matrix3 = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]];
                strain[k / 3][k % 3] += t;
                system.transform(&strain);
                system.evaluate().energy
            });
            assert_close(&format!("{name}: virial {k}"), virial[k], -numeric, 1e-7 * size);
        }
    });
}

#[test]
fn forces_sum_to_zero_and_the_virial_is_symmetric() {
    for_each(&["cellOH", "moleculeOH"], |name, mut system| {
        let e = system.evaluate();
        let size = largest(e.forces.as_flattened());
        for a in 0..3 {
            let sum: f64 = e.forces.iter().map(|f| f[a]).sum();
            assert_close(&format!("{name}: sum of forces {a}"), sum, 0.0, 1e-12 * size);
        }
        let size = largest(&e.virial);
        for (a, b) in [(1, 3), (2, 6), (5, 7)] {
            assert_close(&format!("{name}: virial {a} and {b}"), e.virial[a], e.virial[b], 1e-11 * size);
        }
        for k in 0..9 {
            let sum: f64 = e.atom_virial.iter().map(|v| v[k]).sum();
            assert_close(&format!("{name}: sum of atomic virials {k}"), sum, e.virial[k], 1e-11 * size);
        }
    });
}

/// A rotation that leaves no axis in place.
fn rotation() -> Matrix3 {
    let [x, y, z] = [2.0, 3.0, 6.0].map(|c| c / 7.0);
    let (sin, cos) = 1.1f64.sin_cos();
    let t = 1.0 - cos;
    [
        [t * x * x + cos, t * x * y - sin * z, t * x * z + sin * y],
        [t * x * y + sin * z, t * y * y + cos, t * y * z - sin * x],
        [t * x * z - sin * y, t * y * z + sin * x, t * z * z + cos],
    ]
}

#[test]
fn rotation_turns_the_forces_and_leaves_the_energy() {
    for_each(&["cellOH", "moleculeOH", "pair_z"], |name, mut system| {
        let before = system.evaluate();
        let r = rotation();
        system.transform(&r);
        let after = system.evaluate();
        assert_close(&format!("{name}: energy"), after.energy, before.energy, 1e-11 * before.energy.abs());
        let size = largest(before.forces.as_flattened());
        for (f, g) in before.forces.iter().zip(&after.forces) {
            for a in 0..3 {
                let turned: f64 = (0..3).map(|b| r[a][b] * f[b]).sum();
                assert_close(&format!("{name}: force"), g[a], turned, 1e-10 * size);
            }
        }
        let size = largest(&before.virial);
        for k in 0..9 {
            let (a, b) = (k / 3, k % 3);
            let turned: f64 = (0..9).map(|q| r[a][q / 3] * before.virial[q] * r[b][q % 3]).sum();
            assert_close(&format!("{name}: virial {k}"), after.virial[k], turned, 1e-10 * size);
        }
    });
}

#[test]
fn translation_changes_nothing() {
    for_each(&["cellOH", "moleculeOH"], |name, mut system| {
        let before = system.evaluate();
        system.positions.iter_mut().for_each(|p| *p = [p[0] + 17.3, p[1] - 5.2, p[2] + 0.77]);
        let after = system.evaluate();
        assert_close(&format!("{name}: energy"), after.energy, before.energy, 1e-11 * before.energy.abs());
        let size = largest(before.forces.as_flattened());
        for (f, g) in before.forces.as_flattened().iter().zip(after.forces.as_flattened()) {
            assert_close(&format!("{name}: force"), *g, *f, 1e-10 * size);
        }
    });
}

#[test]
fn atoms_may_come_in_any_order() {
    for_each(&["cellOH", "moleculeOH"], |name, mut system| {
        let before = system.evaluate();
        system.positions.reverse();
        system.types.reverse();
        let after = system.evaluate();
        assert_close(&format!("{name}: energy"), after.energy, before.energy, 1e-12 * before.energy.abs());
        let size = largest(before.forces.as_flattened());
        let pairs = before.forces.iter().zip(after.forces.iter().rev());
        for (f, g) in pairs.flat_map(|(f, g)| f.iter().zip(g)) {
            assert_close(&format!("{name}: force"), *g, *f, 1e-11 * size);
        }
    });
}

/// The largest step between neighbouring points of a line of forces.
fn largest_step(forces: &[Vec<f64>]) -> f64 {
    let steps = forces.windows(2).flat_map(|w| w[0].iter().zip(&w[1]).map(|(a, b)| (a - b).abs()));
    steps.fold(0.0, f64::max)
}

/// An atom crosses the cutoff: nothing jumps, and outside it exerts nothing.
#[test]
fn smooth_through_the_cutoff() {
    for name in MODELS {
        let mut system = System::new(name, "pair_z");
        let cutoff = system.model.cutoff();
        let mut at = |x: f64| {
            system.positions = vec![[0.0; 3], [x, 0.0, 0.0]];
            let e = system.evaluate();
            (e.energy, e.forces.as_flattened().to_vec())
        };
        let (alone, zero) = at(cutoff + 0.5);
        assert_eq!(largest_step(&[zero.clone(), vec![0.0; 6]]), 0.0, "{name}");
        // The envelope and two of its derivatives vanish at the cutoff.
        let (energy, forces) = at(cutoff - 1e-6);
        assert_close(&format!("{name}: energy just inside"), energy, alone, 1e-12 * alone.abs());
        assert!(largest_step(&[forces, zero]) < 1e-9, "{name}: force just inside");
        // Halving the steps halves the largest difference between neighbours: no jump anywhere.
        let mut line =
            |n: usize| -> Vec<Vec<f64>> { (0..=n).map(|k| at(cutoff - 0.1 + 0.2 * k as f64 / n as f64).1).collect() };
        let (coarse, fine) = (largest_step(&line(40)), largest_step(&line(80)));
        assert!(fine <= 0.6 * coarse + 1e-13, "{name}: {coarse:e} at 40 points, {fine:e} at 80");
    }
}

/// A bond swings through the poles of the edge frame: the energy stays, the force turns with it.
#[test]
fn smooth_along_the_poles() {
    for name in MODELS {
        let mut system = System::new(name, "pair_z");
        let mut at = |polar: f64, azimuth: f64| {
            let length = 1.2;
            let n = [polar.sin() * azimuth.cos(), polar.sin() * azimuth.sin(), polar.cos()];
            system.positions = vec![[0.0; 3], n.map(|x| length * x)];
            let e = system.evaluate();
            let along: f64 = e.forces[1].iter().zip(n).map(|(f, n)| f * n).sum();
            let across = e.forces[1].iter().zip(n).map(|(f, n)| (f - along * n).abs()).fold(0.0, f64::max);
            (e.energy, along, across)
        };
        let (energy, along, _) = at(0.7, 0.3);
        let size = along.abs().max(1.0);
        for pole in [0.0, std::f64::consts::PI] {
            for offset in [0.0, 1e-12, 1e-9, 1e-8, 1e-7, 1e-5, 1e-3] {
                for azimuth in [0.0, 1.0, 2.5, 4.0] {
                    let (e, f, across) = at(pole + offset, azimuth);
                    let place = format!("{name}: {offset:e} from {pole}");
                    assert_close(&place, e, energy, 1e-11 * energy.abs());
                    assert_close(&place, f, along, 1e-10 * size);
                    assert_close(&place, across, 0.0, 1e-10 * size);
                }
            }
        }
    }
}

/// The same bits with 1, 2 and 3 threads.
#[test]
fn thread_count_does_not_change_a_bit() {
    for name in MODELS {
        let model = committed_model(name);
        let reference = committed_reference(&model, name, "cellOH");
        // Many atoms: more than one chunk of edges and of nodes.
        let (positions, types, cell) = supercell(&reference, 4);
        let structure = Structure { positions: &positions, types: &types, cell: Some(cell), pbc: [true; 3] };
        let graph = graph_of(&model, &structure);
        for precision in [Precision::Fp32, Precision::Fp64] {
            let runs: Vec<Evaluation> = [1, 2, 3]
                .map(|threads| {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                    pool.install(|| evaluate(&model, &graph, precision))
                })
                .into();
            for run in &runs[1..] {
                assert!(bits(run) == bits(&runs[0]), "{name} {precision:?}");
            }
        }
    }
}

fn bits(e: &Evaluation) -> Vec<u64> {
    let parts: [&[f64]; 6] =
        [&[e.energy], &e.atom_energy, e.forces.as_flattened(), &e.virial, e.atom_virial.as_flattened(), &e.descriptor];
    parts.concat().iter().map(|x| x.to_bits()).collect()
}

/// `n` cells in a row along the first vector.
fn supercell(reference: &Reference, n: usize) -> (Vec<[f64; 3]>, Vec<i32>, Matrix3) {
    let mut cell = reference.cell.unwrap();
    let shifted = |k: usize, p: &[f64; 3]| [0, 1, 2].map(|a| p[a] + k as f64 * cell[0][a]);
    let positions = (0..n).flat_map(|k| reference.positions.iter().map(move |p| shifted(k, p))).collect();
    let types = reference.types.repeat(n);
    cell[0] = cell[0].map(|x| x * n as f64);
    (positions, types, cell)
}
