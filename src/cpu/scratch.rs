//! Buffers of the size of a chunk that go back to their thread instead of to the system: without them every chunk of
//! edges would have megabytes of new pages cleared for it.

use super::real::Real;
use std::cell::RefCell;
use std::ops::{Deref, DerefMut};

/// A thread's spare buffers by the power of two that is their length.
pub struct Spare<T>(RefCell<[Vec<Vec<T>>; usize::BITS as usize]>);

/// Values that were lent by the thread which drops them.
pub struct Buffer<T: Real> {
    values: Vec<T>,
    len: usize,
}

impl<T: Real> Buffer<T> {
    /// `len` values, whatever they were last used for: for results that are written as a whole.
    pub fn stale(len: usize) -> Self {
        let class = len.next_power_of_two().trailing_zeros() as usize;
        let spare = T::with_spare(|spare| spare.0.borrow_mut()[class].pop());
        let mut values = spare.unwrap_or_else(|| vec![T::zero(); 1 << class]);
        if cfg!(debug_assertions) {
            // Tests must not pass because of what happens to be there.
            values.fill(T::nan());
        }
        Buffer { values, len }
    }
    /// `len` zeros.
    pub fn zeros(len: usize) -> Self {
        let mut buffer = Self::stale(len);
        buffer.fill(T::zero());
        buffer
    }
}

impl<T: Real> Drop for Buffer<T> {
    fn drop(&mut self) {
        let values = std::mem::take(&mut self.values);
        let class = values.len().trailing_zeros() as usize;
        T::with_spare(|spare| spare.0.borrow_mut()[class].push(values));
    }
}

impl<T: Real> Deref for Buffer<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.values[..self.len]
    }
}

impl<T: Real> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.values[..self.len]
    }
}

impl<T> Spare<T> {
    /// None yet.
    pub const fn new() -> Self {
        Spare(RefCell::new([const { Vec::new() }; usize::BITS as usize]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_buffer_is_lent_again() {
        let first = Buffer::<f32>::zeros(1000);
        let at = first.as_ptr();
        assert_eq!((first.len(), first.iter().sum::<f32>()), (1000, 0.0));
        drop(first);
        let (second, other) = (Buffer::<f32>::zeros(600), Buffer::<f32>::zeros(600));
        assert_eq!((second.as_ptr(), second.len()), (at, 600));
        assert_ne!(other.as_ptr(), at);
        assert_eq!(Buffer::<f64>::zeros(0).len(), 0);
    }
}
