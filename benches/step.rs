//! Evaluates a structure once for each line on the standard input: energy, forces and virial in f32 with the neighbour
//! list, as one MD step does. `step MODEL.pt STRUCTURE.xyz`; answers are JSON lines; `end` asks for the peak memory.
//!
//! `benches/reference_cpu.sh` drives it beside the reference implementation. Without arguments (`cargo bench`) it says so
//! and does nothing.

use sezm::engine::{OneRank, Precision, Request};
use sezm::graph::Structure;
use sezm::model::Model;
use std::io::BufRead;
use std::path::Path;
use std::time::Instant;

type Failure = Box<dyn std::error::Error>;

/// VmHWM of this process, MB.
fn peak_memory() -> Result<f64, Failure> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).ok_or("no VmHWM")?;
    Ok(line.trim().trim_end_matches(" kB").trim().parse::<f64>()? / 1024.0)
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let [model, structure] = &arguments[..] else {
        eprintln!("step MODEL.pt STRUCTURE.xyz; run it through benches/reference_cpu.sh");
        return Ok(());
    };
    let model = Model::open(Path::new(model), None)?;
    let frames = sezm::cli::xyz::read(Path::new(structure))?;
    let frame = frames.first().ok_or("no frame")?;
    let kind = |e: &String| model.elements().iter().position(|m| m == e).map(|i| i as i32);
    let types =
        frame.elements.iter().map(kind).collect::<Option<Vec<i32>>>().ok_or("an element that the model lacks")?;
    let mut engine = sezm::engine::create(&model, Precision::Fp32, "cpu")?;
    for line in std::io::stdin().lock().lines() {
        if line?.trim() == "end" {
            break;
        }
        let start = Instant::now();
        let structure = Structure { positions: &frame.positions, types: &types, cell: frame.cell, pbc: frame.pbc };
        let graph = sezm::graph::build(&structure, model.cutoff(), model.excluded_pairs())?;
        let answer = engine.evaluate(&graph, Request::default(), &mut OneRank)?;
        println!("{{\"seconds\": {:?}, \"energy\": {:?}}}", start.elapsed().as_secs_f64(), answer.energy);
    }
    println!("{{\"peak_mb\": {}}}", peak_memory()?);
    Ok(())
}
