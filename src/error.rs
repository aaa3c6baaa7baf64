//! One error type for the whole library. Every message says what was wrong, where, and what to do.

use std::path::Path;

/// What went wrong; each kind is one status code of the C ABI.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// A caller passed something that cannot be used (null pointer, wrong size, unknown keyword).
    #[error("{0}")]
    Argument(String),
    /// A file could not be read.
    #[error("{path}: {reason}")]
    Io { path: String, reason: String },
    /// A checkpoint or structure file is damaged or of another kind.
    #[error("{path}: {reason}")]
    Format { path: String, reason: String },
    /// The model uses an option that this version does not evaluate.
    #[error("{0}")]
    Unsupported(String),
    /// Positions, cells or results that are not finite, atoms on top of each other, unknown types.
    #[error("{0}")]
    Structure(String),
    /// A device that is missing or failed.
    #[error("{0}")]
    Device(String),
    /// Not enough memory; the message holds the needed and free sizes.
    #[error("{0}")]
    OutOfMemory(String),
    /// The exchange callback of a distributed run failed.
    #[error("{0}")]
    Exchange(String),
    /// A defect of this library.
    #[error("internal error: {0} (please report this)")]
    Internal(String),
}

/// The library's result type.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// A file that could not be read: `path` and the reason.
    pub fn io(path: &Path, reason: impl std::fmt::Display) -> Self {
        Error::Io { path: path.display().to_string(), reason: reason.to_string() }
    }
    /// A damaged or foreign file: `path`, what was expected and found, what to do.
    pub fn format(path: &Path, reason: impl std::fmt::Display) -> Self {
        Error::Format { path: path.display().to_string(), reason: reason.to_string() }
    }
}
