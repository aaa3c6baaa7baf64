//! What the kernel tests share: cases (a launch, its data, what must come out) and the two places that run them.
#![allow(dead_code)] // each test binary uses its part

pub mod cases;
pub mod emulation;
pub mod memory;

use memory::Memory;
use sezm::cuda::{Args, Launch, Plain, Program};

/// One argument of a kernel.
#[derive(Clone)]
pub enum Argument {
    /// A pointer to this.
    Buffer(Memory),
    /// These bytes, by value.
    Value(Vec<u8>),
}

impl Argument {
    /// A buffer that holds `values`.
    pub fn input<T: Plain>(values: &[T]) -> Self {
        Argument::Buffer(Memory::of(values))
    }
    /// A buffer of `len` values, NaN where they are floating-point.
    pub fn output<T: Plain>(len: usize) -> Self {
        Argument::Buffer(Memory::unset(len * size_of::<T>()))
    }
    /// A number.
    pub fn value<T: Plain>(value: T) -> Self {
        Argument::Value(Memory::of(&[value]).bytes().to_vec())
    }
    /// The contents of a buffer.
    pub fn read<T: Plain>(&self) -> Vec<T> {
        match self {
            Argument::Buffer(memory) => memory.to_vec(),
            Argument::Value(_) => panic!("a value argument comes back unchanged"),
        }
    }
}

/// The kernel arguments with each buffer at the address that `place` gives it.
pub fn pack(arguments: &[Argument], mut place: impl FnMut(usize) -> u64) -> Args {
    arguments.iter().enumerate().fold(Args::new(), |args, (i, argument)| match argument {
        Argument::Buffer(_) => args.address(place(i)),
        Argument::Value(bytes) => args.bytes(bytes),
    })
}

/// A kernel launch with known results.
pub struct Case {
    pub name: String,
    pub program: Program,
    pub kernel: &'static str,
    pub launch: Launch,
    pub arguments: Vec<Argument>,
    pub check: Check,
}

/// What is wrong with the arguments after a launch, if anything.
pub type Check = Box<dyn Fn(&[Argument]) -> Result<(), String> + Sync>;

/// Fails unless every `found[i]` is within `tolerance` of `expected[i]`; NaN never is.
pub fn within(what: &str, found: &[f64], expected: &[f64], tolerance: f64) -> Result<(), String> {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        if (f - e).abs() <= tolerance {
            continue;
        }
        return Err(format!("{what}[{i}]: found {f}, expected {e} within {tolerance:e}"));
    }
    Ok(())
}

/// Reproducible numbers, uniform in [-1, 1): a linear congruential generator's high bits.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }
    pub fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
    pub fn vector<T>(&mut self, len: usize, convert: impl Fn(f64) -> T) -> Vec<T> {
        (0..len).map(|_| convert(self.next())).collect()
    }
}
