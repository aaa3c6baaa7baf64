//! Device memory, page-locked host memory, and the plan that says whether a run fits.

use super::driver::{Device, Stream, check};
use super::{CudaError, Result};
use cudarc::driver::{CudaContext, result, sys};
use std::ffi::c_void;
use std::fmt::Write;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Values that mean the same on host and device and have no invalid bits.
///
/// # Safety
/// Implemented for primitive numbers only: no padding, every bit pattern valid.
pub unsafe trait Plain: Copy + Send + Sync + 'static {}
macro_rules! plain {
    ($($t:ty),*) => { $(
        // SAFETY: a primitive number.
        unsafe impl Plain for $t {}
    )* };
}
plain!(u8, u16, u32, u64, i32, i64, f32, f64);

/// The arithmetic type of a run: `-DREAL` of its kernels.
pub trait Real: Plain {
    /// Its name in CUDA C++.
    const NAME: &'static str;
}
impl Real for f32 {
    const NAME: &'static str = "float";
}
impl Real for f64 {
    const NAME: &'static str = "double";
}

/// Bytes held now and at most, by one device.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    held: AtomicUsize,
    peak: AtomicUsize,
}

impl Ledger {
    fn add(&self, bytes: usize) {
        let held = self.held.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(held, Ordering::Relaxed);
    }
    fn subtract(&self, bytes: usize) {
        self.held.fetch_sub(bytes, Ordering::Relaxed);
    }
    pub(super) fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }
    pub(super) fn peak(&self) -> usize {
        self.peak.load(Ordering::Relaxed)
    }
    pub(super) fn restart_peak(&self) {
        self.peak.store(self.held(), Ordering::Relaxed);
    }
}

/// `len` values of type `T` in device memory, freed on drop. Contents start undefined.
pub struct Buffer<T: Plain> {
    context: Arc<CudaContext>,
    ledger: Arc<Ledger>,
    address: sys::CUdeviceptr,
    len: usize,
    marker: PhantomData<T>,
}

impl<T: Plain> Buffer<T> {
    pub(super) fn new(context: &Arc<CudaContext>, ledger: &Arc<Ledger>, len: usize) -> Result<Self> {
        let bytes = byte_size::<T>(len)?;
        check("cuCtxSetCurrent", context.bind_to_thread())?;
        let address = if bytes == 0 {
            0
        } else {
            // SAFETY: the context is current; the memory is owned by this buffer alone until its drop.
            unsafe { result::malloc_sync(bytes) }.map_err(|e| allocation_error(context, bytes, e))?
        };
        ledger.add(bytes);
        Ok(Buffer { context: context.clone(), ledger: ledger.clone(), address, len, marker: PhantomData })
    }
    /// Number of values.
    pub fn len(&self) -> usize {
        self.len
    }
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }
    /// The device address; 0 when empty.
    pub fn address(&self) -> u64 {
        self.address
    }
    /// The device address of value `start`. Errors: `Size` when `start` is past the end.
    pub fn address_at(&self, start: usize) -> Result<u64> {
        if start > self.len {
            return Err(CudaError::Size(format!("value {start} of a device buffer of {}", self.len)));
        }
        Ok(self.address + (start * size_of::<T>()) as u64)
    }
}

impl<T: Plain> Drop for Buffer<T> {
    fn drop(&mut self) {
        self.ledger.subtract(self.bytes());
        if self.address != 0 && self.context.bind_to_thread().is_ok() {
            // SAFETY: allocated by `new`, freed once; cuMemFree waits for the work that uses it.
            if let Err(e) = unsafe { result::free_sync(self.address) } {
                log::warn!("CUDA: cuMemFree failed: {e}");
            }
        }
    }
}

fn byte_size<T>(len: usize) -> Result<usize> {
    len.checked_mul(size_of::<T>())
        .ok_or_else(|| CudaError::Size(format!("{len} values of {} bytes pass the address space", size_of::<T>())))
}

fn allocation_error(context: &Arc<CudaContext>, bytes: usize, e: result::DriverError) -> CudaError {
    if e.0 != sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
        return CudaError::Call { call: format!("cuMemAlloc of {bytes} bytes"), reason: e.to_string() };
    }
    let free = context.mem_get_info().map_or_else(|_| "unknown".into(), |(free, _)| human(free as u64));
    CudaError::OutOfMemory(format!(
        "out of GPU memory: {} needed for one buffer, {free} free; use fewer atoms a GPU or more GPUs",
        human(bytes as u64)
    ))
}

/// Page-locked host memory: copies from and to it run beside the host. Reading or writing it waits for the last
/// transfer that used it.
pub struct Pinned<T: Plain> {
    context: Arc<CudaContext>,
    data: *mut T,
    len: usize,
    transfer: Option<cudarc::driver::CudaEvent>,
}

// SAFETY: owns its memory; T is Send + Sync; events may be waited for from any thread.
unsafe impl<T: Plain> Send for Pinned<T> {}
// SAFETY: shared references give no access to the data.
unsafe impl<T: Plain> Sync for Pinned<T> {}

impl<T: Plain> Pinned<T> {
    pub(super) fn new(context: &Arc<CudaContext>, len: usize) -> Result<Self> {
        let bytes = byte_size::<T>(len)?;
        check("cuCtxSetCurrent", context.bind_to_thread())?;
        let data = if bytes == 0 {
            std::ptr::NonNull::dangling().as_ptr()
        } else {
            // SAFETY: the context is current; zeroed at once, and zero bits are a valid T (Plain).
            unsafe {
                let data = result::malloc_host(bytes, 0).map_err(|e| {
                    CudaError::OutOfMemory(format!("no {} of page-locked host memory: {e}", human(bytes as u64)))
                })?;
                std::ptr::write_bytes(data.cast::<u8>(), 0, bytes);
                data.cast()
            }
        };
        Ok(Pinned { context: context.clone(), data, len, transfer: None })
    }
    /// Number of values.
    pub fn len(&self) -> usize {
        self.len
    }
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    fn wait(&mut self) -> Result<()> {
        match self.transfer.take() {
            Some(event) => check("cuEventSynchronize", event.synchronize()),
            None => Ok(()),
        }
    }
    /// The values, once the last transfer is through.
    pub fn read(&mut self) -> Result<&[T]> {
        self.wait()?;
        // SAFETY: `data` holds `len` initialised values and no transfer is under way.
        Ok(unsafe { std::slice::from_raw_parts(self.data, self.len) })
    }
    /// The values to write, once the last transfer is through.
    pub fn write(&mut self) -> Result<&mut [T]> {
        self.wait()?;
        // SAFETY: as in `read`, and `self` is borrowed mutably.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.data, self.len) })
    }
}

impl<T: Plain> Drop for Pinned<T> {
    fn drop(&mut self) {
        let done = self.wait();
        if self.len == 0 || done.is_err() || self.context.bind_to_thread().is_err() {
            return; // a failed context frees its memory itself; a running copy must keep its target
        }
        // SAFETY: allocated by `new`, freed once, no transfer under way.
        if let Err(e) = unsafe { result::free_host(self.data.cast::<c_void>()) } {
            log::warn!("CUDA: cuMemFreeHost failed: {e}");
        }
    }
}

impl Stream {
    /// Queues a copy of the first `count` values to the device and returns at once.
    pub fn upload_pinned<T: Plain>(&self, from: &mut Pinned<T>, to: &mut Buffer<T>, count: usize) -> Result<()> {
        fits("upload", count, from.len, to.len)?;
        if count == 0 {
            return Ok(());
        }
        let source = &from.read()?[..count];
        self.bind()?;
        // SAFETY: both ranges hold `count` values; `transfer` keeps the host side untouched until the copy is through.
        check("cuMemcpyHtoDAsync", unsafe { result::memcpy_htod_async(to.address, source, self.handle()) })?;
        from.transfer = Some(self.record()?);
        Ok(())
    }
    /// Queues a copy of the first `count` values to the host and returns at once.
    pub fn download_pinned<T: Plain>(&self, from: &Buffer<T>, to: &mut Pinned<T>, count: usize) -> Result<()> {
        fits("download", count, from.len, to.len)?;
        if count == 0 {
            return Ok(());
        }
        let target = &mut to.write()?[..count];
        self.bind()?;
        // SAFETY: as in `upload_pinned`.
        check("cuMemcpyDtoHAsync", unsafe { result::memcpy_dtoh_async(target, from.address, self.handle()) })?;
        to.transfer = Some(self.record()?);
        Ok(())
    }
    /// Copies `from` to the start of `to`; the host side is free again when this returns.
    pub fn upload<T: Plain>(&self, from: &[T], to: &mut Buffer<T>) -> Result<()> {
        fits("upload", from.len(), from.len(), to.len)?;
        if from.is_empty() {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: `to` holds at least `from.len()` values. The host slice may be pageable, so wait for the copy.
        check("cuMemcpyHtoDAsync", unsafe { result::memcpy_htod_async(to.address, from, self.handle()) })?;
        self.synchronize()
    }
    /// Copies the start of `from` into all of `to`, after the work queued so far.
    pub fn download<T: Plain>(&self, from: &Buffer<T>, to: &mut [T]) -> Result<()> {
        fits("download", to.len(), from.len, to.len())?;
        if to.is_empty() {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: `from` holds at least `to.len()` values; the wait ends the borrow's use.
        check("cuMemcpyDtoHAsync", unsafe { result::memcpy_dtoh_async(to, from.address, self.handle()) })?;
        self.synchronize()
    }
    /// Copies bytes to a place inside `to`; the host side is free again when this returns.
    pub fn upload_at(&self, from: &[u8], to: &Buffer<u8>, start: usize) -> Result<()> {
        fits("upload", from.len() + start, from.len() + start, to.len)?;
        if from.is_empty() {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: the range lies inside the buffer (checked). The host slice may be pageable, so wait for the copy.
        check("cuMemcpyHtoDAsync", unsafe {
            result::memcpy_htod_async(to.address + start as u64, from, self.handle())
        })?;
        self.synchronize()
    }
    /// Copies bytes from a place inside `from`, after the work queued so far.
    pub fn download_at(&self, from: &Buffer<u8>, start: usize, to: &mut [u8]) -> Result<()> {
        fits("download", to.len() + start, from.len, to.len() + start)?;
        if to.is_empty() {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: the range lies inside the buffer (checked); the wait ends the borrow's use.
        check("cuMemcpyDtoHAsync", unsafe {
            result::memcpy_dtoh_async(to, from.address + start as u64, self.handle())
        })?;
        self.synchronize()
    }
    /// Sets bytes inside a buffer to zero, in stream order.
    pub fn zero_at(&self, buffer: &Buffer<u8>, start: usize, bytes: usize) -> Result<()> {
        fits("zero", bytes + start, bytes + start, buffer.len)?;
        if bytes == 0 {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: the range lies inside the buffer (checked).
        check("cuMemsetD8Async", unsafe {
            result::memset_d8_async(buffer.address + start as u64, 0, bytes, self.handle())
        })
    }
    /// Sets every byte of the first `count` values to zero, in stream order.
    pub fn zero<T: Plain>(&self, buffer: &mut Buffer<T>, count: usize) -> Result<()> {
        fits("zero", count, count, buffer.len)?;
        if count == 0 {
            return Ok(());
        }
        self.bind()?;
        let bytes = count * size_of::<T>();
        // SAFETY: the buffer holds at least `count` values, and zero bits are a valid T.
        check("cuMemsetD8Async", unsafe { result::memset_d8_async(buffer.address, 0, bytes, self.handle()) })
    }
    /// Copies the first `count` values of one buffer to another, in stream order.
    pub fn copy<T: Plain>(&self, from: &Buffer<T>, to: &mut Buffer<T>, count: usize) -> Result<()> {
        fits("copy", count, from.len, to.len)?;
        if count == 0 {
            return Ok(());
        }
        self.bind()?;
        let bytes = count * size_of::<T>();
        // SAFETY: both hold at least `count` values and do not overlap (`to` is borrowed mutably).
        check("cuMemcpyDtoDAsync", unsafe { result::memcpy_dtod_async(to.address, from.address, bytes, self.handle()) })
    }
}

fn fits(what: &str, count: usize, from: usize, to: usize) -> Result<()> {
    if count <= from && count <= to {
        return Ok(());
    }
    Err(CudaError::Size(format!("{what} of {count} values from {from} to {to}")))
}

/// Bytes in a unit that reads well.
pub(super) fn human(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{:.1} KB", bytes as f64 / 1024.0),
        1_048_576..1_073_741_824 => format!("{:.1} MB", bytes as f64 / 1_048_576.0),
        _ => format!("{:.2} GB", bytes as f64 / 1_073_741_824.0),
    }
}

/// What a run is going to allocate, by name, so that a run that cannot fit says so before it starts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryPlan {
    needs: Vec<Need>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Need {
    name: &'static str,
    bytes: u64,
    grows: bool,
}

impl MemoryPlan {
    /// A plan without needs.
    pub fn new() -> Self {
        Self::default()
    }
    /// Adds bytes that do not depend on the number of atoms: weights, the workspace of one chunk.
    pub fn fixed(mut self, name: &'static str, bytes: usize) -> Self {
        self.needs.push(Need { name, bytes: bytes as u64, grows: false });
        self
    }
    /// Adds bytes that grow in proportion to the atoms (nodes and edges): the bytes for all atoms of this run.
    pub fn growing(mut self, name: &'static str, bytes: usize) -> Self {
        self.needs.push(Need { name, bytes: bytes as u64, grows: true });
        self
    }
    /// All bytes.
    pub fn total(&self) -> u64 {
        self.needs.iter().map(|n| n.bytes).sum()
    }
    /// How many atoms would fit into `free` bytes if this plan is for `atoms`; none if nothing grows with them.
    pub fn atoms_that_fit(&self, free: u64, atoms: usize) -> Option<u64> {
        let growing: u64 = self.needs.iter().filter(|n| n.grows).map(|n| n.bytes).sum();
        if growing == 0 {
            return None;
        }
        let room = free.saturating_sub(self.total() - growing);
        Some((u128::from(room) * atoms as u128 / u128::from(growing)) as u64)
    }
    /// Whether the plan for `atoms` fits into `free` bytes.
    ///
    /// Errors: `OutOfMemory` with the needed and free sizes, the largest needs and the atoms that would fit.
    pub fn check(&self, free: u64, atoms: usize) -> Result<()> {
        if self.total() <= free {
            return Ok(());
        }
        let mut message = format!("out of GPU memory: {atoms} atoms need {} (", human(self.total()));
        let mut largest: Vec<&Need> = self.needs.iter().collect();
        largest.sort_by_key(|n| std::cmp::Reverse(n.bytes));
        for (i, need) in largest.iter().take(3).enumerate() {
            let separator = if i == 0 { "" } else { ", " };
            // Writing to a String cannot fail.
            let _ = write!(message, "{separator}{} {}", need.name, human(need.bytes));
        }
        let _ = write!(message, "), {} free", human(free));
        if let Some(fit) = self.atoms_that_fit(free, atoms) {
            let _ = write!(message, "; about {fit} atoms would fit");
        }
        message.push_str(": use fewer atoms a GPU or more GPUs");
        Err(CudaError::OutOfMemory(message))
    }
    /// [`MemoryPlan::check`] against what the device has free now.
    pub fn check_device(&self, device: &Device, atoms: usize) -> Result<()> {
        self.check(device.free_memory()? as u64, atoms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn plan() -> MemoryPlan {
        MemoryPlan::new().fixed("weights", 100 * MIB).growing("node features", 300 * MIB).growing("edges", 700 * MIB)
    }

    #[test]
    fn a_plan_that_fits_to_the_byte() {
        let total = plan().total();
        assert_eq!(total, 1100 << 20);
        assert_eq!(plan().check(total, 1000), Ok(()));
        assert!(plan().check(total - 1, 1000).is_err());
    }

    #[test]
    fn a_plan_that_does_not_fit_says_what_would() {
        // 600 MiB free, 100 fixed: 500 of the 1000 growing MiB, half of the atoms.
        assert_eq!(plan().atoms_that_fit(600 << 20, 1000), Some(500));
        assert_eq!(plan().atoms_that_fit(50 << 20, 1000), Some(0));
        assert_eq!(MemoryPlan::new().fixed("weights", 1).atoms_that_fit(0, 10), None);
        let error = plan().check(600 << 20, 1000).unwrap_err();
        assert_eq!(
            error.to_string(),
            "out of GPU memory: 1000 atoms need 1.07 GB (edges 700.0 MB, node features 300.0 MB, weights 100.0 MB), \
             600.0 MB free; about 500 atoms would fit: use fewer atoms a GPU or more GPUs"
        );
        assert!(matches!(crate::Error::from(error), crate::Error::OutOfMemory(_)));
    }

    #[test]
    fn sizes_read_well() {
        assert_eq!([0, 1023, 1024, 3 << 20, 5 << 30].map(human), ["0 B", "1023 B", "1.0 KB", "3.0 MB", "5.00 GB"]);
    }

    #[test]
    fn the_ledger_keeps_the_peak() {
        let ledger = Ledger::default();
        ledger.add(5);
        ledger.add(7);
        ledger.subtract(5);
        assert_eq!((ledger.held(), ledger.peak()), (7, 12));
        ledger.restart_peak();
        assert_eq!(ledger.peak(), 7);
    }
}
