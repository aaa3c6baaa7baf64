//! Versions of the interface and of the library.

use std::ffi::c_char;

/// The version of this interface. A program refuses a library whose `sezm_abi_version()` is another one.
pub const SEZM_ABI_VERSION: u32 = 1;

/// The version of the interface that the library was built with: to be compared with `SEZM_ABI_VERSION`.
#[unsafe(no_mangle)]
pub extern "C" fn sezm_abi_version() -> u32 {
    SEZM_ABI_VERSION
}

/// The version of the library, for people, e.g. `0.1.0`. Lives for ever.
#[unsafe(no_mangle)]
pub extern "C" fn sezm_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
