//! The stages on the way to the energy against the reference's intermediate values in f64 (1e-10 relative to the
//! largest value).

mod common;

use common::{Checkpoint, Reference, checkpoints};
use sezm::cpu::stages::{Stages, stages};
use sezm::graph::Graph;
use sezm::math::wigner::{Wigner, edge_frame};
use sezm::model::Model;
use std::collections::HashMap;

/// A structure's stages on both sides; edge `e` of ours is edge `of[e]` of the reference.
struct Both {
    name: String,
    model: Model,
    graph: Graph,
    ours: Stages,
    reference: Reference,
    of: Vec<usize>,
}

/// Every reference with intermediate values: committed, and in the big reference data.
fn for_each(check: impl Fn(&Both)) {
    let mut all = checkpoints(&common::committed());
    all.extend(common::shared().map(|folder| checkpoints(&folder.join("refs"))).unwrap_or_default());
    let mut checked = 0;
    for Checkpoint { name, path, structures } in all {
        let Ok(model) = Model::open(&path, None) else { continue };
        for (structure, files) in structures {
            let reference = Reference::read(&files, &model);
            if reference.stage("edge_src").is_none() {
                continue;
            }
            let graph = reference.graph(&model);
            let of = match_edges(&graph, &reference);
            let ours = stages(&model, &graph);
            check(&Both { name: format!("{name} {structure}"), model: model.clone(), graph, ours, reference, of });
            checked += 1;
        }
    }
    println!("{checked} structures");
    assert!(checked >= 4, "the committed ones alone are four");
}

impl Both {
    /// Rows of a stage of the reference in the order of our edges.
    fn edge_rows(&self, stage: &str) -> Vec<f64> {
        let array = self.reference.stage(stage).expect(stage);
        let width = array.shape[1..].iter().product::<usize>();
        self.of.iter().flat_map(|&e| array.floats()[e * width..(e + 1) * width].iter().copied()).collect()
    }
    fn same(&self, what: &str, ours: &[f64], theirs: &[f64]) {
        assert_eq!(ours.len(), theirs.len(), "{}: {what}", self.name);
        let size = theirs.iter().fold(1e-3f64, |m, x| m.max(x.abs()));
        for (i, (a, b)) in ours.iter().zip(theirs).enumerate() {
            assert!((a - b).abs() <= 1e-10 * size, "{}: {what}[{i}] is {a}, the reference has {b}", self.name);
        }
    }
}

/// The same set of (destination, source, vector) on both sides; the reference's masked dummy edges, those between
/// excluded types and those at the cutoff, have no envelope.
fn match_edges(graph: &Graph, reference: &Reference) -> Vec<usize> {
    let integers = |name: &str| reference.stage(name).unwrap().integers();
    let floats = |name: &str| reference.stage(name).unwrap().floats();
    let key = |dst: usize, src: usize, v: &[f64]| (dst, src, [v[0], v[1], v[2]].map(|x| (x * 1e6).round() as i64));
    let (dst, src, vec) = (integers("edge_dst"), integers("edge_src"), floats("edge_vec"));
    let weight = floats("edge_env");
    let live = (0..dst.len()).filter(|&e| weight[e] != 0.0);
    let theirs: HashMap<_, _> =
        live.map(|e| (key(dst[e] as usize, src[e] as usize, &vec[3 * e..3 * e + 3]), e)).collect();
    assert_eq!(theirs.len(), graph.n_edges());
    (0..graph.n_edges()).map(|e| theirs[&key(graph.dst[e] as usize, graph.src[e] as usize, &graph.vec[e])]).collect()
}

#[test]
fn edge_geometry() {
    for_each(|both| {
        let geometry = &both.ours.geometry;
        both.same("vector", both.graph.vec.as_flattened(), &both.edge_rows("edge_vec"));
        both.same("envelope", &geometry.weight, &both.edge_rows("edge_env"));
        let normaliser = both.reference.stage("edge_inv_sqrt_deg").unwrap().floats();
        both.same("normaliser", &geometry.normaliser, normaliser);
    });
}

/// Frames differ by a roll about the edge only: `D D_ref^T` is a rotation about z, degree by degree, by one angle.
#[test]
fn wigner_up_to_the_roll() {
    for_each(|both| {
        let array = both.reference.stage("edge_D_full").unwrap();
        let rows = array.shape[1];
        let wigner = Wigner::new(rows.isqrt() - 1);
        let mut record = vec![0.0; wigner.record_len()];
        let theirs = both.edge_rows("edge_D_full");
        for (e, theirs) in theirs.chunks_exact(rows * rows).enumerate() {
            wigner.assemble(&edge_frame(both.ours.geometry.direction[e]), &mut record);
            let mut angle = (1.0, 0.0);
            for l in 0..=wigner.lmax() {
                let n = 2 * l + 1;
                let ours = &record[wigner.offset(l)..][..n * n];
                let at = |i: usize, j: usize| theirs[(l * l + i) * rows + l * l + j];
                let roll = |i: usize, j: usize| (0..n).map(|k| ours[i * n + k] * at(j, k)).sum::<f64>();
                if l == 1 {
                    angle = (roll(0, 0), roll(2, 0));
                }
                // cos and sin of m times the angle.
                let (mut cos, mut sin) = (1.0, 0.0);
                let mut expected = vec![0.0; n * n];
                expected[l * n + l] = 1.0;
                for m in 1..=l {
                    (cos, sin) = (cos * angle.0 - sin * angle.1, sin * angle.0 + cos * angle.1);
                    let (minus, plus) = (l - m, l + m);
                    expected[minus * n + minus] = cos;
                    expected[plus * n + plus] = cos;
                    expected[minus * n + plus] = -sin;
                    expected[plus * n + minus] = sin;
                }
                let found: Vec<f64> = (0..n * n).map(|k| roll(k / n, k % n)).collect();
                both.same(&format!("D of degree {l}, edge {e}"), &found, &expected);
            }
        }
    });
}

#[test]
fn radial_features() {
    for_each(|both| {
        both.same("radial basis", &both.ours.radial_basis, &both.edge_rows("edge_rbf"));
        let (weights, config) = (both.model.weights(), both.model.config());
        let feature = both.reference.stage("radial_feat").unwrap();
        if config.blocks.is_empty() || feature.floats().is_empty() {
            return;
        }
        // The last, linear layer, the envelope, and the types of both ends (SPEC 5).
        let (last, channels) = (&weights.radial.last, config.channels);
        let used = feature.shape[1..].iter().product::<usize>();
        let mut ours = Vec::new();
        for (e, hidden) in both.ours.radial_hidden.chunks_exact(last.rows).enumerate() {
            let w = if config.version >= 1.1 { both.ours.geometry.weight[e] } else { 1.0 };
            let ends = [both.graph.src[e], both.graph.dst[e]].map(|i| both.graph.types[i as usize] as usize);
            for column in 0..used {
                let sum: f64 = hidden.iter().enumerate().map(|(k, h)| h * last.row(k)[column]).sum();
                let types: f64 = ends.map(|t| weights.type_embedding.row(t)[column % channels]).iter().sum();
                ours.push(w * sum + types);
            }
        }
        both.same("radial features", &ours, &both.edge_rows("radial_feat"));
    });
}

#[test]
fn node_state_around_each_block() {
    for_each(|both| {
        let start = both.reference.stage("x_init").unwrap().floats();
        both.same("start", &both.ours.states[0], start);
        for b in 0..both.model.config().blocks.len() {
            let Some(state) = both.reference.stage(&format!("block{b}_out")) else { continue };
            // The engine drops the degrees that the next block does not read.
            let ours = &both.ours.states[b + 1];
            let (nodes, len) = (both.graph.n_nodes(), ours.len() / both.graph.n_nodes());
            let rows = state.floats().chunks_exact(state.floats().len() / nodes);
            let theirs: Vec<f64> = rows.flat_map(|row| row[..len].iter().copied()).collect();
            both.same(&format!("state after block {b}"), ours, &theirs);
        }
    });
}
