//! The C ABI: handles, status codes, the last error, callbacks. No physics (DESIGN section 7).
//!
//! `include/sezm.h` is written from these files by cbindgen: `tests/header.rs` keeps it fresh. Everything that C
//! can call is here; `docs/c_abi.md` tells how to use it.

// The names are C's: what the header says is what the code says.
#![allow(non_camel_case_types)]

mod compute;
mod engine;
mod logging;
mod model;
mod pointers;
mod status;
#[cfg(test)]
mod tests;
mod version;

pub use compute::*;
pub use engine::*;
pub use logging::*;
pub use model::*;
pub use status::{sezm_last_error, sezm_status};
pub use version::*;
