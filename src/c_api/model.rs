//! A model as C sees it.

use super::pointers::{null_pointer, output, reference, text};
use super::status::{c_string, enter, sezm_status};
use crate::Result;
use crate::checkpoint::Checkpoint;
use crate::model::Model;
use std::ffi::{CString, c_char};
use std::path::Path;
use std::ptr::null_mut;
use std::sync::OnceLock;

/// A model read from a checkpoint. Never changes; any number of threads may use it.
pub struct sezm_model {
    pub(super) model: Model,
    checkpoint: Checkpoint,
    branch: CString,
    architecture: CString,
    elements: Vec<CString>,
    /// Pointers into `elements`, for C to index.
    symbols: Vec<*const c_char>,
    /// Made when first asked for: it reads the whole file.
    sha256: OnceLock<CString>,
}

/// What is to be known about a model. All pointers live as long as the model.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct sezm_model_info {
    /// Cutoff radius, Å.
    pub cutoff: f64,
    /// Number of elements: model types are 0 to `element_count - 1`.
    pub element_count: usize,
    /// Symbol of each element, in the order of the model's types.
    pub elements: *const *const c_char,
    /// Number of trainable parameters.
    pub parameter_count: u64,
    /// One line for people: degrees, channels, blocks, layers, focuses.
    pub architecture: *const c_char,
    /// The branch that was read; `Default` for a single-task file.
    pub branch: *const c_char,
}

/// Reads the checkpoint `path` (`.pt`, as `dp --pt train` writes it).
///
/// `branch` chooses the model of a multi-task file by name or alias; null for a single-task file.
/// `*model` is to be freed with `sezm_model_free`; it is null if the call fails.
///
/// Status: `SEZM_IO`, `SEZM_FORMAT`, `SEZM_UNSUPPORTED` (an option of the model, by name), `SEZM_ARGUMENT`.
///
/// # Safety
/// `path` and `branch` are null or end in NUL; `model` is null or a place for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sezm_model_open(
    path: *const c_char,
    branch: *const c_char,
    model: *mut *mut sezm_model,
) -> sezm_status {
    enter(|| {
        // SAFETY: the caller's promise.
        let (model, path, branch) = unsafe { (output(model, "model")?, text(path, "path")?, text(branch, "branch")?) };
        *model = null_mut();
        let path = path.ok_or_else(|| null_pointer("path"))?;
        *model = Box::into_raw(Box::new(sezm_model::open(Path::new(path), branch)?));
        Ok(())
    })
}

/// Frees a model; null is no error. Engines made from it live on.
///
/// # Safety
/// `model` is null or comes from `sezm_model_open` and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sezm_model_free(model: *mut sezm_model) -> sezm_status {
    enter(|| {
        if !model.is_null() {
            // SAFETY: the caller's promise: a box of ours that nobody else frees.
            drop(unsafe { Box::from_raw(model) });
        }
        Ok(())
    })
}

/// Fills `info`.
///
/// # Safety
/// `model` is null or live; `info` is null or a place for the answer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sezm_model_get_info(model: *const sezm_model, info: *mut sezm_model_info) -> sezm_status {
    enter(|| {
        // SAFETY: the caller's promise.
        let (model, info) = unsafe { (reference(model, "model")?, output(info, "info")?) };
        *info = model.info();
        Ok(())
    })
}

/// The SHA-256 of the checkpoint file, 64 hexadecimal digits; reads the whole file at the first call.
/// `*sha256` lives as long as the model.
///
/// Status: `SEZM_IO` if the file can no longer be read.
///
/// # Safety
/// `model` is null or live; `sha256` is null or a place for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sezm_model_sha256(model: *const sezm_model, sha256: *mut *const c_char) -> sezm_status {
    enter(|| {
        // SAFETY: the caller's promise.
        let (model, sha256) = unsafe { (reference(model, "model")?, output(sha256, "sha256")?) };
        *sha256 = model.sha256()?.as_ptr();
        Ok(())
    })
}

impl sezm_model {
    fn open(path: &Path, branch: Option<&str>) -> Result<Self> {
        let checkpoint = Checkpoint::open(path, branch)?;
        let model = Model::from_checkpoint(&checkpoint)?;
        let elements: Vec<CString> = model.elements().iter().map(|symbol| c_string(symbol)).collect();
        Ok(sezm_model {
            branch: c_string(checkpoint.branch()),
            architecture: c_string(model.architecture()),
            symbols: elements.iter().map(|symbol| symbol.as_ptr()).collect(),
            elements,
            sha256: OnceLock::new(),
            checkpoint,
            model,
        })
    }

    fn info(&self) -> sezm_model_info {
        sezm_model_info {
            cutoff: self.model.cutoff(),
            element_count: self.elements.len(),
            elements: self.symbols.as_ptr(),
            parameter_count: self.model.parameters() as u64,
            architecture: self.architecture.as_ptr(),
            branch: self.branch.as_ptr(),
        }
    }

    fn sha256(&self) -> Result<&CString> {
        if let Some(sum) = self.sha256.get() {
            return Ok(sum);
        }
        let sum = c_string(&self.checkpoint.sha256()?);
        Ok(self.sha256.get_or_init(|| sum))
    }
}
