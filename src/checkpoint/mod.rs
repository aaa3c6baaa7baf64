//! Bytes -> named tensors + configuration: the `.pt` file that `dp --pt train` writes (SPEC section 1).

use crate::{Error, Result};
use std::path::{Path, PathBuf};

/// A dense tensor, row-major, converted to f64 from whatever dtype the file holds.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    /// Sizes of the axes, slowest first; empty for a scalar.
    pub shape: Vec<usize>,
    /// `shape.iter().product()` values.
    pub data: Vec<f64>,
}

/// An opened checkpoint: the configuration and a directory of tensors of one branch.
///
/// Names are relative to the branch: `model.Default.atomic_model.out_bias` is `atomic_model.out_bias` here.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    branch: String,
    params: serde_json::Value,
}

impl Checkpoint {
    /// Opens `path`; `branch` chooses the model of a multi-task file (a branch name or an alias).
    pub fn open(path: &Path, branch: Option<&str>) -> Result<Self> {
        let _ = branch;
        Err(Error::format(path, "not written yet"))
    }
    /// The file this checkpoint was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }
    /// The chosen branch; `Default` in a single-task file.
    pub fn branch(&self) -> &str {
        &self.branch
    }
    /// The model JSON of the chosen branch (`descriptor`, `fitting_net`, `type_map`, ...), SPEC section 20.1.
    pub fn params(&self) -> &serde_json::Value {
        &self.params
    }
    /// Names of all tensors of the branch, in file order.
    pub fn names(&self) -> Vec<&str> {
        Vec::new()
    }
    /// Shape of a tensor without reading it; `None` if there is none of this name.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        let _ = name;
        None
    }
    /// Reads a tensor (LoRA folded, SPEC section 15); `Ok(None)` if there is none of this name.
    /// Errors on a damaged storage or a value that is not finite.
    pub fn tensor(&self, name: &str) -> Result<Option<Tensor>> {
        let _ = name;
        Ok(None)
    }
    /// SHA-256 of the file, hexadecimal.
    pub fn sha256(&self) -> Result<String> {
        Err(Error::Internal("sha256".into()))
    }
}
