//! Log lines of the library -> a function of the host.

use super::status::{c_string, enter, sezm_status};
use crate::{Error, Result};
use log::{LevelFilter, Log, Metadata, Record};
use std::ffi::{c_char, c_void};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// An error that also comes back as a status.
pub const SEZM_LOG_ERROR: i32 = 1;
/// Something the user should know about.
pub const SEZM_LOG_WARN: i32 = 2;
/// What the library is doing.
pub const SEZM_LOG_INFO: i32 = 3;
/// Details for the developers.
pub const SEZM_LOG_DEBUG: i32 = 4;

/// Takes a log line: `level` is a `SEZM_LOG_*`, `message` is valid during the call only, `context` is the pointer
/// given to `sezm_set_log_callback`. It may be called from any thread, and must not throw or jump out.
pub type sezm_log_callback = Option<unsafe extern "C" fn(level: i32, message: *const c_char, context: *mut c_void)>;

/// Sends log lines up to `max_level` (`SEZM_LOG_*`) to `callback`; a null callback silences the library (the default).
///
/// Serves the whole process; the last call counts. `context` must stay valid until the callback is replaced and calls
/// that are under way on other threads have returned. In a distributed run give it to the rank that prints.
///
/// Status: `SEZM_ARGUMENT` for an unknown level, or where a Rust host has a logger of its own already.
///
/// # Safety
/// `callback` must be callable from any thread for as long as it is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sezm_set_log_callback(
    callback: sezm_log_callback,
    context: *mut c_void,
    max_level: i32,
) -> sezm_status {
    enter(|| {
        let Some(function) = callback else {
            log::set_max_level(LevelFilter::Off);
            *sink() = None;
            return Ok(());
        };
        let level = level_filter(max_level)?;
        install()?;
        *sink() = Some(Sink { function, context });
        log::set_max_level(level);
        Ok(())
    })
}

#[derive(Clone, Copy)]
struct Sink {
    function: unsafe extern "C" fn(i32, *const c_char, *mut c_void),
    context: *mut c_void,
}

// SAFETY: the host promises that function and context may be used from any thread.
unsafe impl Send for Sink {}

static SINK: Mutex<Option<Sink>> = Mutex::new(None);

fn sink() -> MutexGuard<'static, Option<Sink>> {
    // A whole `Option` is written or nothing is, so a poisoned lock still guards a good value.
    SINK.lock().unwrap_or_else(PoisonError::into_inner)
}

struct ToHost;

impl Log for ToHost {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        // Copied out, so that a callback may itself call the library.
        let target = *sink();
        if let Some(target) = target {
            let message = c_string(&record.args().to_string());
            // SAFETY: the host promises that the function is callable while it is set; the message outlives the call.
            unsafe { (target.function)(record.level() as i32, message.as_ptr(), target.context) }
        }
    }

    fn flush(&self) {}
}

fn level_filter(level: i32) -> Result<LevelFilter> {
    match level {
        SEZM_LOG_ERROR => Ok(LevelFilter::Error),
        SEZM_LOG_WARN => Ok(LevelFilter::Warn),
        SEZM_LOG_INFO => Ok(LevelFilter::Info),
        SEZM_LOG_DEBUG => Ok(LevelFilter::Debug),
        other => Err(Error::Argument(format!(
            "unknown log level {other}: expected SEZM_LOG_ERROR ({SEZM_LOG_ERROR}) to SEZM_LOG_DEBUG ({SEZM_LOG_DEBUG})"
        ))),
    }
}

/// Makes this library's logger the one of the process, once.
fn install() -> Result<()> {
    static OURS: OnceLock<bool> = OnceLock::new();
    match OURS.get_or_init(|| log::set_logger(&ToHost).is_ok()) {
        true => Ok(()),
        false => Err(Error::Argument("this process has a logger of its own already: use that one".into())),
    }
}
