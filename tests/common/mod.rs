//! What the integration tests share: reference values, and evaluations of their structures.

// Each test program uses a part of it.
#![allow(dead_code)]

pub mod npz;

use npz::Array;
use sezm::engine::{self, Evaluation, OneRank, Precision, Request};
use sezm::graph::{self, Graph, Structure};
use sezm::math::Matrix3;
use sezm::model::Model;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The committed references.
pub fn committed() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/refs")
}

/// The big reference data: `SEZM_SHARED`, else `../shared` beside the checkout; `None`, after saying so, without it.
pub fn shared() -> Option<PathBuf> {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared");
    let folder = std::env::var_os("SEZM_SHARED").map_or_else(beside, PathBuf::from);
    if folder.join("refs").is_dir() {
        return Some(folder);
    }
    println!("SKIPPED: no reference data in {}; set SEZM_SHARED to its folder", folder.display());
    None
}

/// A checkpoint with its references: structure name and files, whose arrays are put together (the later file wins).
#[derive(Debug, Clone)]
pub struct Checkpoint {
    pub name: String,
    pub path: PathBuf,
    pub structures: Vec<(String, Vec<PathBuf>)>,
}

/// Every `NAME.pt` in a folder and the folders in it, with its `NAME.STRUCTURE.npz`, sorted by name.
pub fn checkpoints(folder: &Path) -> Vec<Checkpoint> {
    let mut folders = vec![folder.to_path_buf()];
    folders.extend(entries(folder).into_iter().filter(|p| p.is_dir()));
    let mut found = Vec::new();
    for folder in folders {
        let files = entries(&folder);
        for path in files.iter().filter(|p| p.extension().is_some_and(|e| e == "pt")) {
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            let structures = files.iter().filter_map(|p| {
                let file = p.file_name()?.to_str()?;
                let structure = file.strip_prefix(&name)?.strip_prefix('.')?.strip_suffix(".npz")?;
                Some((structure.to_string(), vec![p.clone()]))
            });
            found.push(Checkpoint { structures: structures.collect(), path: path.clone(), name });
        }
    }
    found
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let list = std::fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut paths: Vec<PathBuf> = list.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
}

/// A structure and what the reference implementation says of it.
pub struct Reference {
    pub positions: Vec<[f64; 3]>,
    pub types: Vec<i32>,
    pub cell: Option<Matrix3>,
    arrays: BTreeMap<String, Array>,
}

impl Reference {
    pub fn read(files: &[PathBuf], model: &Model) -> Self {
        let arrays: BTreeMap<String, Array> = files.iter().flat_map(|file| npz::read(file)).collect();
        let types = match arrays.get("elements") {
            Some(elements) => {
                let type_of = |e: &String| model.elements().iter().position(|known| known == e).unwrap() as i32;
                elements.texts().iter().map(type_of).collect()
            }
            None => arrays["atype"].integers().iter().map(|&t| t as i32).collect(),
        };
        let positions = arrays["coord"].floats().as_chunks().0.to_vec();
        let cell = arrays.get("cell").map(|c| {
            let rows = c.floats().as_chunks().0;
            [rows[0], rows[1], rows[2]]
        });
        Reference { positions, types, cell, arrays }
    }
    /// A value in the reference's own `f32` or `f64` arithmetic.
    pub fn value(&self, precision: &str, name: &str) -> &[f64] {
        let long = precision.replace('f', "float");
        let array = self.arrays.get(&format!("{precision}/{name}"));
        array.or_else(|| self.arrays.get(&format!("{long}/{name}"))).expect(name).floats()
    }
    /// An intermediate value of the f64 run.
    pub fn stage(&self, name: &str) -> Option<&Array> {
        self.arrays.get(&format!("f64/stage/{name}"))
    }
    pub fn structure(&self) -> Structure<'_> {
        Structure { positions: &self.positions, types: &self.types, cell: self.cell, pbc: [self.cell.is_some(); 3] }
    }
    pub fn graph(&self, model: &Model) -> Graph {
        graph_of(model, &self.structure())
    }
}

pub fn graph_of(model: &Model, structure: &Structure) -> Graph {
    let graph = graph::build(structure, model.cutoff(), model.excluded_pairs()).unwrap();
    graph.validate().unwrap();
    graph
}

/// Everything that an engine can give.
pub const EVERYTHING: Request = Request { atom_virial: true, descriptor: true };

pub fn evaluate(model: &Model, graph: &Graph, precision: Precision) -> Evaluation {
    let mut engine = engine::create(model, precision, "cpu").unwrap();
    engine.evaluate(graph, EVERYTHING, &mut OneRank).unwrap()
}

/// A committed model.
pub fn committed_model(name: &str) -> Model {
    Model::open(&committed().join(format!("{name}.pt")), None).unwrap()
}

/// A committed structure with the values of a committed model.
pub fn committed_reference(model: &Model, name: &str, structure: &str) -> Reference {
    Reference::read(&[committed().join(format!("{name}.{structure}.npz"))], model)
}
