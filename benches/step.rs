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

/// Elements, positions in Å and cell of one extended XYZ frame with a lattice.
fn read_xyz(path: &str) -> Result<(Vec<String>, Vec<[f64; 3]>, [[f64; 3]; 3]), Failure> {
    let text = std::fs::read_to_string(path)?;
    let mut lines = text.lines();
    let atoms: usize = lines.next().ok_or("empty file")?.trim().parse()?;
    let comment = lines.next().ok_or("no comment line")?;
    let lattice = comment.split("Lattice=\"").nth(1).and_then(|s| s.split('"').next()).ok_or("no Lattice")?;
    let lattice = lattice.split_whitespace().map(str::parse).collect::<Result<Vec<f64>, _>>()?;
    let cell = std::array::from_fn(|i| std::array::from_fn(|j| lattice[3 * i + j]));
    let (mut elements, mut positions) = (Vec::new(), Vec::new());
    for line in lines.take(atoms) {
        let mut words = line.split_whitespace();
        elements.push(words.next().ok_or("short line")?.to_string());
        let x = words.take(3).map(str::parse).collect::<Result<Vec<f64>, _>>()?;
        positions.push([x[0], x[1], x[2]]);
    }
    Ok((elements, positions, cell))
}

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
    let (elements, positions, cell) = read_xyz(structure)?;
    let kind = |e: &String| model.elements().iter().position(|m| m == e).map(|i| i as i32);
    let types = elements.iter().map(kind).collect::<Option<Vec<i32>>>().ok_or("an element that the model lacks")?;
    let mut engine = sezm::engine::create(&model, Precision::Fp32, "cpu")?;
    for line in std::io::stdin().lock().lines() {
        if line?.trim() == "end" {
            break;
        }
        let start = Instant::now();
        let structure = Structure { positions: &positions, types: &types, cell: Some(cell), pbc: [true; 3] };
        let graph = sezm::graph::build(&structure, model.cutoff(), model.excluded_pairs())?;
        let answer = engine.evaluate(&graph, Request::default(), &mut OneRank)?;
        println!("{{\"seconds\": {:?}, \"energy\": {:?}}}", start.elapsed().as_secs_f64(), answer.energy);
    }
    println!("{{\"peak_mb\": {}}}", peak_memory()?);
    Ok(())
}
