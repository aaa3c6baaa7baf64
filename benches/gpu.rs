//! Times the GPU engine on rattled diamond: energy, forces and virial, the edges uploaded at every call.
//!
//!     cargo bench --bench gpu -- MODEL.pt CELLS fp32|fp64 [REPEATS]
//!
//! CELLS cubic cells of 8 atoms a side: 2, 3, 5 and 8 give 64, 216, 1,000 and 4,096 atoms. Prints the median, the memory held
//! and whether all repeats gave the same bits. The model has to know carbon.

use sezm::engine::{OneRank, Precision, Request};
use sezm::graph::Structure;
use sezm::model::Model;
use std::path::Path;
use std::time::Instant;

/// Cubic lattice constant of diamond, and the largest displacement along an axis, Å.
const LATTICE: f64 = 3.567;
const RATTLE: f64 = 0.02;

/// Positions of `n`^3 cells, displaced by the same numbers every time.
fn diamond(n: usize) -> Vec<[f64; 3]> {
    let mut state = 12345u64;
    let mut rattle = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        RATTLE * ((state >> 11) as f64 / (1u64 << 52) as f64 - 1.0)
    };
    let mut positions = Vec::with_capacity(8 * n * n * n);
    for cell in 0..n * n * n {
        let corner = [cell / (n * n), cell / n % n, cell % n];
        for face in [[0.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.0, 0.5, 0.5]] {
            for shift in [0.0, 0.25] {
                positions.push(std::array::from_fn(|a| LATTICE * (corner[a] as f64 + face[a] + shift) + rattle()));
            }
        }
    }
    positions
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let (model, cells, precision, repeats) = match &arguments[..] {
        [model, cells, precision] => (model, cells, precision, 7),
        [model, cells, precision, repeats] => (model, cells, precision, repeats.parse()?),
        _ => {
            eprintln!("cargo bench --bench gpu -- MODEL.pt CELLS fp32|fp64 [REPEATS]");
            return Ok(());
        }
    };
    let precision = if precision == "fp64" { Precision::Fp64 } else { Precision::Fp32 };
    let cells: usize = cells.parse()?;
    let model = Model::open(Path::new(model), None)?;
    let carbon = model.elements().iter().position(|e| e == "C").ok_or("the model does not know C")? as i32;
    let positions = diamond(cells);
    let types = vec![carbon; positions.len()];
    let side = LATTICE * cells as f64;
    let cell = [[side, 0.0, 0.0], [0.0, side, 0.0], [0.0, 0.0, side]];
    let structure = Structure { positions: &positions, types: &types, cell: Some(cell), pbc: [true; 3] };
    let graph = sezm::graph::build(&structure, model.cutoff(), model.excluded_pairs())?;
    let start = Instant::now();
    let mut engine = match sezm::engine::create(&model, precision, "gpu") {
        Ok(engine) => engine,
        Err(reason) => {
            println!("SKIPPED: {reason}");
            return Ok(());
        }
    };
    let load = start.elapsed().as_secs_f64();
    let mut answers = Vec::new();
    let mut seconds = Vec::new();
    for _ in 0..repeats {
        let start = Instant::now();
        answers.push(engine.evaluate(&graph, Request::default(), &mut OneRank)?);
        seconds.push(start.elapsed().as_secs_f64());
    }
    let same = answers.windows(2).all(|pair| pair[0] == pair[1]);
    seconds.sort_by(f64::total_cmp);
    println!(
        "{}: {} atoms, {} edges, load {load:.2} s, median {:.2} ms of {repeats}, {:.2} GB held, same bits {same}",
        engine.describe(),
        positions.len(),
        graph.n_edges(),
        1e3 * seconds[seconds.len() / 2],
        1e-9 * engine.memory_usage() as f64
    );
    Ok(())
}
