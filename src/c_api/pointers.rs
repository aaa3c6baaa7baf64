//! From C pointers to Rust references, each checked as far as it can be.

use crate::{Error, Result};
use std::ffi::{CStr, c_char};

/// The object behind a pointer; `name` is what the message calls it.
///
/// # Safety
/// A pointer that is not null must point to a live `T` that nobody changes during `'a`.
pub(super) unsafe fn reference<'a, T>(pointer: *const T, name: &str) -> Result<&'a T> {
    check_alignment(pointer, name)?;
    // SAFETY: the caller's promise; null is caught here.
    unsafe { pointer.as_ref() }.ok_or_else(|| null_pointer(name))
}

/// The place behind a pointer where a result goes.
///
/// # Safety
/// A pointer that is not null must point to a `T` that nobody else uses during `'a`.
pub(super) unsafe fn output<'a, T>(pointer: *mut T, name: &str) -> Result<&'a mut T> {
    check_alignment(pointer, name)?;
    // SAFETY: the caller's promise; null is caught here.
    unsafe { pointer.as_mut() }.ok_or_else(|| null_pointer(name))
}

/// `len` values behind a pointer, which may be null where there are none.
///
/// # Safety
/// A pointer that is not null must point to `len` live values that nobody changes during `'a`.
pub(super) unsafe fn slice<'a, T>(pointer: *const T, len: usize, name: &str) -> Result<&'a [T]> {
    if len == 0 {
        return Ok(&[]);
    }
    if pointer.is_null() {
        return Err(null_pointer(name));
    }
    check_alignment(pointer, name)?;
    if len.checked_mul(size_of::<T>()).is_none_or(|bytes| bytes > isize::MAX as usize) {
        return Err(Error::Argument(format!("{name}: {len} values do not fit into memory")));
    }
    // SAFETY: not null, aligned, no larger than an object can be; the rest is the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(pointer, len) })
}

/// UTF-8 text behind a pointer; `None` for null.
///
/// # Safety
/// A pointer that is not null must point to text that ends in NUL and that nobody changes during `'a`.
pub(super) unsafe fn text<'a>(pointer: *const c_char, name: &str) -> Result<Option<&'a str>> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map(Some).map_err(|_| Error::Argument(format!("{name}: '{}' is not UTF-8", text.to_string_lossy())))
}

/// A count that C holds as a signed integer.
pub(super) fn count(value: i32, name: &str) -> Result<usize> {
    usize::try_from(value).map_err(|_| Error::Argument(format!("{name} is {value}: a count cannot be negative")))
}

pub(super) fn null_pointer(name: &str) -> Error {
    Error::Argument(format!("{name} is a null pointer"))
}

fn check_alignment<T>(pointer: *const T, name: &str) -> Result<()> {
    if pointer.is_aligned() {
        return Ok(());
    }
    Err(Error::Argument(format!("{name} is not aligned to {} bytes", align_of::<T>())))
}
