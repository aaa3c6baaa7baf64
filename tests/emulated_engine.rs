//! The whole GPU engine on the CPU, by emulation, against the CPU engine: every kernel with its real launches, tails and
//! empty sizes, forward and adjoint.

mod support;

use rayon::prelude::*;
use sezm::cuda::engine::{DeviceEngine, Scalar};
use sezm::cuda::machine::Machine;
use sezm::cuda::{Args, Launch, Program, Result};
use sezm::engine::{Engine, Evaluation, OneRank, Precision, Request};
use sezm::graph::{Graph, Structure, build};
use sezm::model::Model;
use std::collections::{HashMap, HashSet};
use std::path::Path;
use support::emulation::Emulated;

/// Host memory and emulated programs. Memory starts as NaN, so a value that no kernel has set shows.
struct Emulator {
    seed: u32,
    programs: Vec<Emulated>,
    memory: HashMap<u64, Vec<u128>>,
}

impl Emulator {
    fn new(seed: u32) -> Self {
        Emulator { seed, programs: Vec::new(), memory: HashMap::new() }
    }
}

impl Machine for Emulator {
    fn load(&mut self, programs: Vec<Program>) -> Result<()> {
        self.programs = programs.par_iter().map(Emulated::build).collect();
        Ok(())
    }
    fn allocate(&mut self, bytes: usize) -> Result<u64> {
        let memory = vec![u128::MAX; bytes.div_ceil(16) + 16];
        let address = memory.as_ptr() as u64;
        self.memory.insert(address, memory);
        Ok(address.next_multiple_of(16))
    }
    fn free(&mut self, address: u64) {
        self.memory.remove(&address);
    }
    fn available(&self) -> Option<usize> {
        None
    }
    fn upload(&mut self, address: u64, bytes: &[u8]) -> Result<()> {
        // SAFETY: the engine passes places inside memory that it allocated here.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) };
        Ok(())
    }
    fn download(&mut self, address: u64, bytes: &mut [u8]) -> Result<()> {
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(address as *const u8, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }
    fn zero(&mut self, address: u64, bytes: usize) -> Result<()> {
        // SAFETY: as above.
        unsafe { std::ptr::write_bytes(address as *mut u8, 0, bytes) };
        Ok(())
    }
    fn launch(&mut self, program: usize, kernel: &'static str, launch: Launch, mut args: Args) -> Result<()> {
        self.programs[program].launch(kernel, launch, &mut args, self.seed).unwrap_or_else(|e| panic!("{kernel}: {e}"));
        Ok(())
    }
    fn synchronize(&mut self) -> Result<()> {
        Ok(())
    }
    fn describe(&self) -> String {
        "emulation".into()
    }
}

fn model(name: &str) -> Model {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/refs").join(format!("{name}.pt"));
    Model::open(&file, None).unwrap()
}

fn graph(model: &Model, types: &[i32], positions: &[[f64; 3]], cell: Option<[[f64; 3]; 3]>) -> Graph {
    let structure = Structure { positions, types, cell, pbc: [cell.is_some(); 3] };
    build(&structure, model.cutoff(), model.excluded_pairs()).unwrap()
}

fn largest(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(x, y)| if (x - y).is_nan() { f64::INFINITY } else { (x - y).abs() }).fold(0.0, f64::max)
}

fn compare<T: Scalar>(name: &str, model: &Model, graph: &Graph, seed: u32, tolerance: f64) -> Evaluation {
    let want = Request { atom_virial: true, descriptor: true };
    let mut cpu = sezm::engine::create(model, Precision::Fp64, "cpu").unwrap();
    let expected = cpu.evaluate(graph, want, &mut OneRank).unwrap();
    let mut engine = DeviceEngine::<Emulator, T>::new(Emulator::new(seed), model).unwrap();
    let found = engine.evaluate(graph, want, &mut OneRank).unwrap();
    for (what, a, b) in [
        ("descriptor", found.descriptor.clone(), expected.descriptor.clone()),
        ("atom energy", found.atom_energy.clone(), expected.atom_energy.clone()),
        ("forces", found.forces.concat(), expected.forces.concat()),
        ("virial", found.virial.to_vec(), expected.virial.to_vec()),
        ("atom virial", found.atom_virial.concat(), expected.atom_virial.concat()),
    ] {
        let difference = largest(&a, &b);
        println!("{name} seed {seed} {what}: {difference:.1e}");
        assert!(difference <= tolerance, "{name} seed {seed}: {what} differs by {difference:e}");
    }
    found
}

/// A few atoms, an atom without neighbours, more edges than a block takes.
fn small(model: &Model) -> Graph {
    let last = model.elements().len() as i32 - 1;
    let positions = [[0.1, 0.2, -0.3], [0.9, -0.6, 0.8], [-1.1, 0.4, 0.5], [0.0, 1.2, 1.3], [0.0, 0.0, 30.0]];
    graph(model, &[0, last, 0, last, 0], &positions, None)
}

fn check(name: &str) {
    let model = model(name);
    let g = small(&model);
    // Two thread orders give the same bits.
    let first = compare::<f64>(name, &model, &g, 0, 1e-9);
    assert_eq!(first, compare::<f64>(name, &model, &g, 2, 1e-9), "{name}: thread order shows in the result");
    // The text is the same in both types; compiling it again takes most of the time, so two models do for f32.
    if ["neo_like", "radial_none"].contains(&name) {
        compare::<f32>(name, &model, &g, 1, 2e-4);
    }
    let one = graph(&model, &[0], &[[0.0; 3]], None);
    compare::<f64>(name, &model, &one, 1, 1e-10);
}

macro_rules! models {
    ($($name:ident,)*) => {
        const MODELS: &[&str] = &[$(stringify!($name)),*];
        $(
            #[test]
            fn $name() {
                check(stringify!($name));
            }
        )*
    };
}

models! {
    neo_like,
    heads_0_focus_2,
    message_so3_branch_2,
    radial_full_rank,
    radial_none,
    readout_scalar_layers_2,
}

/// Every kernel file is part of a model above.
#[test]
fn every_kernel_file_is_run() {
    let run: HashSet<&str> = MODELS
        .iter()
        .flat_map(|name| sezm::cuda::engine::programs::<f64>(&model(name)).unwrap())
        .map(|program| program.name())
        .collect();
    for source in sezm::cuda::sources::ALL {
        assert!(run.contains(source.name), "no model runs kernels/{}.cu", source.name);
    }
}
