//! Host memory of a kernel argument, with guards at both ends that show a write out of bounds.

use sezm::cuda::Plain;

const GUARD_WORDS: usize = 8;
const GUARD: u128 = 0x5a5a_5a5a_5a5a_5a5a_5a5a_5a5a_5a5a_5a5a;

/// Bytes, aligned to 16.
#[derive(Clone)]
pub struct Memory {
    words: Vec<u128>,
    len: usize,
}

impl Memory {
    /// `len` bytes of 0xff, which is NaN in f32 and f64.
    pub fn unset(len: usize) -> Self {
        let mut words = vec![GUARD; len.div_ceil(16) + 2 * GUARD_WORDS];
        // The last word may be shared with the guard: only its own bytes are overwritten.
        bytes_of_mut(&mut words)[16 * GUARD_WORDS..][..len].fill(0xff);
        Memory { words, len }
    }
    pub fn of<T: Plain>(values: &[T]) -> Self {
        // SAFETY: T is a primitive number.
        let bytes = unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) };
        let mut memory = Self::unset(bytes.len());
        memory.bytes_mut().copy_from_slice(bytes);
        memory
    }
    pub fn bytes(&self) -> &[u8] {
        &bytes_of(&self.words)[16 * GUARD_WORDS..][..self.len]
    }
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let len = self.len;
        &mut bytes_of_mut(&mut self.words)[16 * GUARD_WORDS..][..len]
    }
    pub fn to_vec<T: Plain>(&self) -> Vec<T> {
        assert_eq!(self.len % size_of::<T>(), 0);
        let start = self.bytes().as_ptr().cast::<T>();
        // SAFETY: aligned to 16, long enough, every bit pattern is a T.
        (0..self.len / size_of::<T>()).map(|i| unsafe { *start.add(i) }).collect()
    }
    /// Whether nothing outside was written.
    pub fn guards_hold(&self) -> bool {
        let all = bytes_of(&self.words);
        let outside = all[..16 * GUARD_WORDS].iter().chain(&all[16 * GUARD_WORDS + self.len..]);
        outside.into_iter().all(|&b| b == 0x5a)
    }
}

fn bytes_of(words: &[u128]) -> &[u8] {
    // SAFETY: any memory is bytes.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), size_of_val(words)) }
}

fn bytes_of_mut(words: &mut [u128]) -> &mut [u8] {
    // SAFETY: any bytes are u128s.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), size_of_val(words)) }
}
