//! Status codes, the message of the last error, and the border that no panic crosses.

use crate::{Error, Result};
use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What a call says of itself. Anything but `SEZM_OK` has a message in `sezm_last_error()`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum sezm_status {
    /// The call did what it was asked.
    SEZM_OK = 0,
    /// An argument cannot be used: a null pointer, a wrong count, an unknown device, an engine in use.
    SEZM_ARGUMENT = 1,
    /// A file could not be read.
    SEZM_IO = 2,
    /// A checkpoint is damaged, is a file of another kind, or has no such branch.
    SEZM_FORMAT = 3,
    /// The model uses an option that this version does not evaluate.
    SEZM_UNSUPPORTED = 4,
    /// The atoms cannot be evaluated: a position, cell or result that is not finite, atoms on top of each other.
    SEZM_STRUCTURE = 5,
    /// A device is missing or failed.
    SEZM_DEVICE = 6,
    /// Not enough memory; the message holds the needed and free sizes.
    SEZM_OUT_OF_MEMORY = 7,
    /// The exchange callback returned a status other than 0.
    SEZM_EXCHANGE_FAILED = 8,
    /// A defect of this library; please report it with the message.
    SEZM_INTERNAL = 255,
}

impl From<&Error> for sezm_status {
    fn from(error: &Error) -> Self {
        match error {
            Error::Argument(_) => sezm_status::SEZM_ARGUMENT,
            Error::Io { .. } => sezm_status::SEZM_IO,
            Error::Format { .. } => sezm_status::SEZM_FORMAT,
            Error::Unsupported(_) => sezm_status::SEZM_UNSUPPORTED,
            Error::Structure(_) => sezm_status::SEZM_STRUCTURE,
            Error::Device(_) => sezm_status::SEZM_DEVICE,
            Error::OutOfMemory(_) => sezm_status::SEZM_OUT_OF_MEMORY,
            Error::Exchange(_) => sezm_status::SEZM_EXCHANGE_FAILED,
            Error::Internal(_) => sezm_status::SEZM_INTERNAL,
        }
    }
}

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// The message of the last call that failed on this thread: what was wrong, where, and what to do.
///
/// Never null; empty before the first failure. Valid until the next failing call on this thread.
#[unsafe(no_mangle)]
pub extern "C" fn sezm_last_error() -> *const c_char {
    // A thread that is being torn down has no message any more.
    LAST_ERROR.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Runs the body of an entry: an error becomes its status and message, a panic becomes `SEZM_INTERNAL`.
pub(super) fn enter(body: impl FnOnce() -> Result<()>) -> sezm_status {
    // Unwind safety: handles hold their state in a mutex, which a panic poisons; nothing else is shared.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => sezm_status::SEZM_OK,
        Ok(Err(error)) => fail(&error),
        Err(payload) => fail(&Error::Internal(panic_message(payload.as_ref()))),
    }
}

fn fail(error: &Error) -> sezm_status {
    let message = c_string(&error.to_string());
    // Only a thread that is being torn down has no place for the message; the status still says what happened.
    let _ = LAST_ERROR.try_with(|last| last.replace(message));
    error.into()
}

fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied().or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message").to_owned()
}

/// Text for C: ends at the first NUL byte, should it hold one.
pub(super) fn c_string(text: &str) -> CString {
    let end = text.find('\0').unwrap_or(text.len());
    CString::new(&text[..end]).unwrap_or_default()
}
