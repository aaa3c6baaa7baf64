//! `sezm eval`: energy, forces and virials of structures.

use super::xyz::{self, Frame};
use super::{EvalArgs, Precision, pretty, print};
use crate::checkpoint::Checkpoint;
use crate::engine::{self, Evaluation, OneRank, Request};
use crate::graph::{self, Structure};
use crate::model::Model;
use crate::{Error, Result};
use serde_json::json;
use std::fmt::Write;
use std::path::Path;

pub fn run(args: &EvalArgs) -> Result<()> {
    let frames = xyz::read(&args.structure)?;
    let checkpoint = Checkpoint::open(&args.model, args.branch.as_deref())?;
    let model = Model::from_checkpoint(&checkpoint)?;
    let precision = match args.precision {
        Precision::Fp32 => engine::Precision::Fp32,
        Precision::Fp64 => engine::Precision::Fp64,
    };
    let mut engine = engine::create(&model, precision, &args.device)?;
    let want = Request { atom_virial: true, descriptor: args.descriptor };
    let mut evaluations = Vec::with_capacity(frames.len());
    for frame in &frames {
        let types = types(&model, &args.structure, frame)?;
        let structure = Structure { positions: &frame.positions, types: &types, cell: frame.cell, pbc: frame.pbc };
        let graph = graph::build(&structure, model.cutoff(), model.excluded_pairs());
        let evaluation = graph.and_then(|graph| engine.evaluate(&graph, want, &mut OneRank));
        evaluations.push(evaluation.map_err(|e| in_frame(&args.structure, frame, e))?);
    }
    let Some(output) = &args.json else {
        return print(&table(&model, &engine.describe(), &frames, &evaluations));
    };
    let document = json!({
        "model": args.model.display().to_string(),
        "sha256": checkpoint.sha256()?,
        "branch": checkpoint.branch(),
        "engine": engine.describe(),
        "units": {"energy": "eV", "forces": "eV/Å", "virial": "eV"},
        "frames": frames.iter().zip(&evaluations).map(|(f, e)| frame_json(f, e, args.descriptor)).collect::<Vec<_>>(),
    });
    if output.as_os_str() == "-" {
        return print(&pretty(&document));
    }
    std::fs::write(output, pretty(&document)).map_err(|e| Error::io(output, e))
}

/// Model type of each atom. Errors: `Format` that names the elements which the model lacks and those it has.
fn types(model: &Model, path: &Path, frame: &Frame) -> Result<Vec<i32>> {
    let known = model.elements();
    let type_of = |element: &String| known.iter().position(|k| k == element);
    let mut missing: Vec<&str> = frame.elements.iter().filter(|e| type_of(e).is_none()).map(String::as_str).collect();
    missing.sort_unstable();
    missing.dedup();
    if !missing.is_empty() {
        return Err(Error::format(
            path,
            format!("line {}: the model has no element {}; it has {}", frame.line, missing.join(", "), known.join(" ")),
        ));
    }
    Ok(frame.elements.iter().filter_map(type_of).map(|t| t as i32).collect())
}

/// Says which frame a structure's error belongs to.
fn in_frame(path: &Path, frame: &Frame, error: Error) -> Error {
    match error {
        Error::Structure(reason) => Error::format(path, format!("frame of line {}: {reason}", frame.line)),
        other => other,
    }
}

fn frame_json(frame: &Frame, e: &Evaluation, descriptor: bool) -> serde_json::Value {
    let mut out = json!({
        "elements": frame.elements,
        "energy": e.energy,
        "atom_energy": e.atom_energy,
        "forces": e.forces,
        "virial": e.virial,
        "atom_virial": e.atom_virial,
    });
    if descriptor {
        let channels = e.descriptor.len() / frame.elements.len();
        out["descriptor"] = e.descriptor.chunks_exact(channels).collect();
    }
    out
}

/// Tables for people; JSON has all the digits.
fn table(model: &Model, engine: &str, frames: &[Frame], evaluations: &[Evaluation]) -> String {
    let mut out = format!("model   {}\nengine  {engine}\n", model.architecture());
    for (k, (frame, e)) in frames.iter().zip(evaluations).enumerate() {
        // Writing to a string cannot fail.
        let _ = frame_table(&mut out, k + 1, frame, e);
    }
    out
}

fn frame_table(out: &mut String, number: usize, frame: &Frame, e: &Evaluation) -> std::fmt::Result {
    writeln!(out, "\nframe {number}: {} atoms", frame.elements.len())?;
    writeln!(out, "energy  {:.8} eV", e.energy)?;
    writeln!(out, "virial, eV (row: force component, column: coordinate)")?;
    for row in e.virial.chunks_exact(3) {
        writeln!(out, "  {:16.8} {:16.8} {:16.8}", row[0], row[1], row[2])?;
    }
    writeln!(out, "{:>7} {:>7} {:>16}   {:>16} {:>16} {:>16}", "atom", "element", "energy eV", "fx eV/Å", "fy", "fz")?;
    for (i, ((element, energy), f)) in frame.elements.iter().zip(&e.atom_energy).zip(&e.forces).enumerate() {
        writeln!(out, "{:7} {element:>7} {energy:16.8}   {:16.8} {:16.8} {:16.8}", i + 1, f[0], f[1], f[2])?;
    }
    write!(out, "{:>7}", "atom")?;
    for name in ["xx", "xy", "xz", "yx", "yy", "yz", "zx", "zy", "zz"] {
        write!(out, " {:>12}", format!("virial {name}"))?;
    }
    writeln!(out, "  eV")?;
    for (i, virial) in e.atom_virial.iter().enumerate() {
        write!(out, "{:7}", i + 1)?;
        for v in virial {
            write!(out, " {v:12.6}")?;
        }
        writeln!(out)?;
    }
    Ok(())
}
