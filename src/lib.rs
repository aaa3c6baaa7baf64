//! SeZM / DPA4: an SO(3)-equivariant message-passing interatomic potential, evaluated for LAMMPS.
//!
//! Data flow, left to right: [`checkpoint`] (bytes to named tensors) -> [`model`] (typed, shape-checked
//! parameters) -> [`engine`] (energies, forces, virials of a [`graph`]) with [`cpu`] as the engine that
//! runs everywhere; [`c_api`] is what the LAMMPS plugin links, [`cli`] what the `sezm` program runs.
//! [`math`] holds pure functions that know no model.
//!
//! Units throughout: Å, eV, eV/Å.

pub mod c_api;
pub mod checkpoint;
pub mod cli;
pub mod cpu;
pub mod cuda;
pub mod engine;
pub mod error;
pub mod graph;
pub mod math;
pub mod model;

pub use error::{Error, Result};
