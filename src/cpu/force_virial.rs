//! `force_virial`: edge gradients to forces and virials (SPEC 17), summed in f64 along compressed rows.

use crate::engine::Evaluation;
use crate::graph::Graph;
use rayon::prelude::*;

/// Fills forces, virial and, if asked for, atomic virials from `g_e = dE/dvec_e`, eV/Å.
pub fn force_virial(graph: &Graph, gradients: &[[f64; 3]], atom_virial: bool, out: &mut Evaluation) {
    let leaving = |i: usize| graph.src_edges[graph.src_start[i]..graph.src_start[i + 1]].iter().map(|&e| e as usize);
    let arriving = |i: usize| if i < graph.n_owned { graph.dst_start[i]..graph.dst_start[i + 1] } else { 0..0 };
    out.forces = (0..graph.n_nodes())
        .into_par_iter()
        .map(|i| {
            let mut force = [0.0; 3];
            arriving(i).for_each(|e| (0..3).for_each(|a| force[a] += gradients[e][a]));
            leaving(i).for_each(|e| (0..3).for_each(|a| force[a] -= gradients[e][a]));
            force
        })
        .collect();
    let edge_virial = |e: usize| -> [f64; 9] { std::array::from_fn(|k| -gradients[e][k / 3] * graph.vec[e][k % 3]) };
    let sum = |edges: &mut dyn Iterator<Item = usize>| {
        let mut total = [0.0; 9];
        edges.for_each(|e| total.iter_mut().zip(edge_virial(e)).for_each(|(t, v)| *t += v));
        total
    };
    let of_atoms: Vec<[f64; 9]> = (0..graph.n_owned).into_par_iter().map(|i| sum(&mut arriving(i))).collect();
    out.virial = [0.0; 9];
    for v in &of_atoms {
        out.virial.iter_mut().zip(v).for_each(|(t, v)| *t += v);
    }
    out.atom_virial = if atom_virial {
        (0..graph.n_nodes())
            .into_par_iter()
            .map(|i| {
                let (arrived, left) = (of_atoms.get(i).copied().unwrap_or_default(), sum(&mut leaving(i)));
                std::array::from_fn(|k| 0.5 * (arrived[k] + left[k]))
            })
            .collect()
    } else {
        Vec::new()
    };
}
