//! An engine as C sees it: made, described, freed. What it computes is in `compute`.

use super::model::sezm_model;
use super::pointers::{output, reference, text};
use super::status::{c_string, enter, sezm_status};
use crate::engine::{Engine, Evaluation, Precision};
use crate::graph::NeighbourList;
use crate::{Error, Result};
use std::ffi::{CString, c_char};
use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard, TryLockError};

/// Arithmetic of an engine. Geometry, energy sums, forces and virials are summed in double in all of them.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum sezm_precision {
    /// Single precision.
    SEZM_FP32 = 0,
    /// Double precision.
    SEZM_FP64 = 1,
}

/// How an engine is made.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct sezm_options {
    /// A `sezm_precision`.
    pub precision: i32,
    /// `auto`, `cpu`, `gpu` or `gpu:N`; null means `auto`.
    pub device: *const c_char,
}

/// Time of one stage since the engine was made.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct sezm_stage {
    /// Name of the stage.
    pub name: *const c_char,
    /// How often it ran.
    pub calls: u64,
    /// How long in all, seconds.
    pub seconds: f64,
}

/// Evaluates a model. Used by one call at a time: a second call meanwhile, also one from inside the exchange callback,
/// is refused with `SEZM_ARGUMENT`. An engine that failed with `SEZM_INTERNAL` may refuse all later calls.
pub struct sezm_engine {
    description: CString,
    state: Mutex<State>,
}

/// What the calls of one engine share.
pub(super) struct State {
    pub engine: Box<dyn Engine>,
    /// Cutoff radius, Å.
    pub cutoff: f64,
    /// Model types are below this.
    pub element_count: usize,
    /// Pairs of types without edges.
    pub excluded: Vec<(u32, u32)>,
    /// Owned atoms and ghosts of the neighbour list.
    pub n_all: usize,
    /// From `sezm_engine_set_neighbours`.
    pub neighbours: Option<NeighbourList>,
    /// The last answer: what `sezm_results` points into.
    pub evaluation: Evaluation,
    /// The last profile and the names it points to.
    stages: Vec<sezm_stage>,
    stage_names: Vec<CString>,
}

/// Makes an engine for `model`, which may be freed afterwards.
///
/// Null `options` mean single precision and the device `auto`.
/// `*engine` is to be freed with `sezm_engine_free`; it is null if the call fails.
///
/// Status: `SEZM_ARGUMENT` for an unknown precision or device, `SEZM_DEVICE`, `SEZM_OUT_OF_MEMORY`.
///
/// # Safety
/// `model` and `options` are null or live; `engine` is null or a place for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sezm_engine_create(
    model: *const sezm_model,
    options: *const sezm_options,
    engine: *mut *mut sezm_engine,
) -> sezm_status {
    enter(|| {
        // SAFETY: the caller's promise.
        let engine = unsafe { output(engine, "engine")? };
        *engine = null_mut();
        // SAFETY: the caller's promise.
        let (model, (precision, device)) = unsafe { (reference(model, "model")?, read_options(options)?) };
        let model = &model.model;
        let made = crate::engine::create(model, precision, device)?;
        let handle = sezm_engine::new(made, model.cutoff(), model.elements().len(), model.excluded_pairs().to_vec());
        *engine = Box::into_raw(Box::new(handle));
        Ok(())
    })
}

/// Frees an engine and the results it gave; null is no error.
///
/// # Safety
/// `engine` is null or comes from `sezm_engine_create`, was not freed and is not in use.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sezm_engine_free(engine: *mut sezm_engine) -> sezm_status {
    enter(|| {
        if !engine.is_null() {
            // SAFETY: the caller's promise: a box of ours that nobody else uses or frees.
            drop(unsafe { Box::from_raw(engine) });
        }
        Ok(())
    })
}

/// One line for the banner: engine, precision, device, e.g. `CPU, fp32, 2 threads`. Lives as long as the engine.
///
/// # Safety
/// `engine` is null or live; `description` is null or a place for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sezm_engine_describe(
    engine: *const sezm_engine,
    description: *mut *const c_char,
) -> sezm_status {
    enter(|| {
        // SAFETY: the caller's promise.
        let (engine, description) = unsafe { (reference(engine, "engine")?, output(description, "description")?) };
        *description = engine.description.as_ptr();
        Ok(())
    })
}

/// The memory that an engine holds, bytes.
///
/// # Safety
/// `engine` is null or live; `bytes` is null or a place for the answer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sezm_engine_memory_usage(engine: *const sezm_engine, bytes: *mut usize) -> sezm_status {
    enter(|| {
        // SAFETY: the caller's promise.
        let (engine, bytes) = unsafe { (reference(engine, "engine")?, output(bytes, "bytes")?) };
        *bytes = engine.lock()?.engine.memory_usage();
        Ok(())
    })
}

/// The time of each stage: `*stages` points to `*count` of them, valid until the next call of this function.
///
/// # Safety
/// `engine` is null or live; `stages` and `count` are null or places for the answer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sezm_engine_profile(
    engine: *mut sezm_engine,
    stages: *mut *const sezm_stage,
    count: *mut usize,
) -> sezm_status {
    enter(|| {
        // SAFETY: the caller's promise.
        let (engine, stages, count) =
            unsafe { (reference(engine, "engine")?, output(stages, "stages")?, output(count, "count")?) };
        let mut state = engine.lock()?;
        state.update_profile();
        (*stages, *count) = (state.stages.as_ptr(), state.stages.len());
        Ok(())
    })
}

impl sezm_engine {
    pub(super) fn new(engine: Box<dyn Engine>, cutoff: f64, element_count: usize, excluded: Vec<(u32, u32)>) -> Self {
        let description = c_string(&engine.describe());
        let state = State {
            engine,
            cutoff,
            element_count,
            excluded,
            n_all: 0,
            neighbours: None,
            evaluation: Evaluation::default(),
            stages: Vec::new(),
            stage_names: Vec::new(),
        };
        sezm_engine { description, state: Mutex::new(state) }
    }

    /// The state, for this call alone. Errors: `Argument` if another call has it, `Internal` after a panic.
    pub(super) fn lock(&self) -> Result<MutexGuard<'_, State>> {
        self.state.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => Error::Argument(
                "this engine is in use: another thread, or the callback that is running, called it; use one at a time"
                    .into(),
            ),
            TryLockError::Poisoned(_) => {
                Error::Internal("this engine failed in an earlier call; free it and make a new one".into())
            }
        })
    }
}

impl State {
    fn update_profile(&mut self) {
        let profile = self.engine.profile();
        self.stage_names = profile.iter().map(|(name, ..)| c_string(name)).collect();
        self.stages = profile
            .iter()
            .zip(&self.stage_names)
            .map(|(&(_, calls, seconds), name)| sezm_stage { name: name.as_ptr(), calls, seconds })
            .collect();
    }
}

/// # Safety
/// `options` is null or live, and so is its device.
unsafe fn read_options<'a>(options: *const sezm_options) -> Result<(Precision, &'a str)> {
    if options.is_null() {
        return Ok((Precision::Fp32, "auto"));
    }
    // SAFETY: the caller's promise.
    let options = unsafe { reference(options, "options")? };
    // An integer, not the enumeration: C may put any value there.
    let precision = match options.precision {
        p if p == sezm_precision::SEZM_FP32 as i32 => Precision::Fp32,
        p if p == sezm_precision::SEZM_FP64 as i32 => Precision::Fp64,
        p => return Err(Error::Argument(format!("unknown precision {p}: expected SEZM_FP32 (0) or SEZM_FP64 (1)"))),
    };
    // SAFETY: the caller's promise.
    let device = unsafe { text(options.device, "device")? };
    Ok((precision, device.unwrap_or("auto")))
}
