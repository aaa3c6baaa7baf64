//! One evaluation's view of a machine: step memory handed out from one block, products, launches, stage times.

use super::machine::{Machine, bytes_of, bytes_of_mut};
use super::products::Products;
use super::{Args, CudaError, Launch, Plain, Result};
use std::marker::PhantomData;

/// Elements of `T` at a device address.
pub struct Array<T> {
    pub address: u64,
    pub len: usize,
    marker: PhantomData<T>,
}
impl<T> Clone for Array<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Array<T> {}

impl<T> Array<T> {
    /// `len` elements at an address that the caller knows to hold them.
    pub fn at(address: u64, len: usize) -> Self {
        Array { address, len, marker: PhantomData }
    }
    /// No elements: a null pointer.
    pub fn none() -> Self {
        Self::at(0, 0)
    }
    /// The elements from `start` on.
    pub fn from(self, start: usize) -> Self {
        debug_assert!(start <= self.len);
        Self::at(self.address + (start * size_of::<T>()) as u64, self.len - start.min(self.len))
    }
}

/// Memory of one step, given out in order and taken back to a mark; in a dry run only counted.
pub struct Context<'a, M: Machine> {
    machine: &'a mut M,
    base: u64,
    size: usize,
    used: usize,
    peak: usize,
    dry: bool,
}

/// Alignment of every array, bytes.
const ALIGNMENT: usize = 256;
/// Blocks of a launch whose threads go on with the stride of the grid.
const MOST_BLOCKS: u32 = 1 << 16;

/// A table of products on the device.
#[derive(Debug, Clone, Copy)]
pub struct Table {
    jobs: u64,
    segments: u64,
    count: usize,
    /// Largest fixed rows and columns.
    m: i32,
    n: i32,
    /// The constant factors.
    pub weights: u64,
}

/// Sizes of a product that its table leaves open.
#[derive(Debug, Clone, Copy, Default)]
pub struct Shape {
    pub m: usize,
    pub n: usize,
    pub lda: usize,
    pub ldb: usize,
    pub ldc: usize,
    pub a_plane: usize,
    pub b_plane: usize,
    pub c_plane: usize,
    pub add: bool,
}

impl<'a, M: Machine> Context<'a, M> {
    /// A run on `size` bytes at `base`.
    pub fn new(machine: &'a mut M, base: u64, size: usize) -> Self {
        Context { machine, base, size, used: 0, peak: 0, dry: false }
    }
    /// A run that launches nothing and counts the memory.
    pub fn dry(machine: &'a mut M) -> Self {
        Context { machine, base: ALIGNMENT as u64, size: usize::MAX, used: 0, peak: 0, dry: true }
    }
    /// Most bytes given out so far.
    pub fn peak(&self) -> usize {
        self.peak
    }
    /// The point to which [`Self::release`] goes back.
    pub fn mark(&self) -> usize {
        self.used
    }
    /// Takes back everything given out since a mark.
    pub fn release(&mut self, mark: usize) {
        self.used = mark;
    }
    /// `len` elements of step memory, not initialised.
    pub fn take<T>(&mut self, len: usize) -> Result<Array<T>> {
        let bytes = (len * size_of::<T>()).next_multiple_of(ALIGNMENT);
        if bytes > self.size - self.used {
            return Err(CudaError::Size(format!(
                "step memory of {} bytes is used up ({} taken, {bytes} asked for)",
                self.size, self.used
            )));
        }
        let address = self.base + self.used as u64;
        self.used += bytes;
        self.peak = self.peak.max(self.used);
        Ok(Array::at(address, len))
    }
    /// Step memory set to zero.
    pub fn zeros<T>(&mut self, len: usize) -> Result<Array<T>> {
        let array = self.take(len)?;
        self.zero(array)?;
        Ok(array)
    }
    /// Sets an array to zero.
    pub fn zero<T>(&mut self, array: Array<T>) -> Result<()> {
        if self.dry { Ok(()) } else { self.machine.zero(array.address, array.len * size_of::<T>()) }
    }
    /// Step memory with these values.
    pub fn upload<T: Plain>(&mut self, values: &[T]) -> Result<Array<T>> {
        let array = self.take(values.len())?;
        if !self.dry {
            self.machine.upload(array.address, bytes_of(values))?;
        }
        Ok(array)
    }
    /// Values back; zeros in a dry run.
    pub fn download<T: Plain + Default>(&mut self, array: Array<T>) -> Result<Vec<T>> {
        let mut values = vec![T::default(); array.len];
        if !self.dry {
            self.machine.download(array.address, bytes_of_mut(&mut values))?;
        }
        Ok(values)
    }
    /// Runs a kernel.
    pub fn run(&mut self, program: usize, kernel: &'static str, launch: Launch, args: Args) -> Result<()> {
        if self.dry || launch.is_empty() {
            return Ok(());
        }
        self.machine.launch(program, kernel, launch, args)
    }
    /// Runs a kernel with a thread an item.
    pub fn each(&mut self, program: usize, kernel: &'static str, items: usize, args: Args) -> Result<()> {
        self.run(program, kernel, Launch::over(items, 256, 256, MOST_BLOCKS), args)
    }
    /// Runs a kernel with a warp an item, four warps a block.
    pub fn warps(&mut self, program: usize, kernel: &'static str, items: usize, args: Args) -> Result<()> {
        self.run(program, kernel, Launch::over(items, 4, 128, MOST_BLOCKS), args)
    }
    /// Grouped products `C <- A B` (`kernels/node_linear.cu`, program `program` with tiles of `tile`).
    #[allow(clippy::too_many_arguments)]
    pub fn product(
        &mut self,
        program: usize,
        tile: (usize, usize),
        table: &Table,
        a: u64,
        b: u64,
        c: u64,
        s: Shape,
    ) -> Result<()> {
        let m = if table.m > 0 { table.m as usize } else { s.m };
        let n = if table.n > 0 { table.n as usize } else { s.n };
        let launch = Launch {
            grid: [m.div_ceil(tile.0) as u32, n.div_ceil(tile.1) as u32, table.count as u32],
            block: [128, 1, 1],
            shared: 0,
        };
        let args = Args::new().address(a).address(b).address(c).address(table.jobs).address(table.segments);
        let args = args.value(s.a_plane as i64).value(s.b_plane as i64).value(s.c_plane as i64);
        let args = args.value(s.m as i32).value(s.n as i32);
        let args = args.value(s.lda as i32).value(s.ldb as i32).value(s.ldc as i32).value(i32::from(s.add));
        self.run(program, "grouped_product", launch, args)
    }
}

/// Constants of a model on the device: weights in the run's precision, tables, lists.
pub struct Constants<'a, M: Machine> {
    machine: &'a mut M,
    held: Vec<u64>,
    bytes: usize,
}

impl<'a, M: Machine> Constants<'a, M> {
    pub fn new(machine: &'a mut M) -> Self {
        Constants { machine, held: Vec::new(), bytes: 0 }
    }
    /// Values of their own type.
    pub fn keep<T: Plain>(&mut self, values: &[T]) -> Result<u64> {
        if values.is_empty() {
            return Ok(0);
        }
        let bytes = bytes_of(values);
        let address = self.machine.allocate(bytes.len())?;
        self.held.push(address);
        self.bytes += bytes.len();
        self.machine.upload(address, bytes)?;
        Ok(address)
    }
    /// f64 values rounded to `T`.
    pub fn real<T: Plain + crate::cpu::real::Real>(&mut self, values: &[f64]) -> Result<u64> {
        self.keep(&values.iter().map(|&x| T::of(x)).collect::<Vec<T>>())
    }
    /// A table with its weights.
    pub fn table<T: Plain + crate::cpu::real::Real>(&mut self, products: &Products) -> Result<Table> {
        let (m, n) = products.largest();
        let words = |bytes: &[u8]| bytes.to_vec();
        // SAFETY: both structures are made of integers without padding.
        let (jobs, segments) = unsafe {
            (
                words(std::slice::from_raw_parts(products.jobs.as_ptr().cast(), size_of_val(&products.jobs[..]))),
                words(std::slice::from_raw_parts(
                    products.segments.as_ptr().cast(),
                    size_of_val(&products.segments[..]),
                )),
            )
        };
        Ok(Table {
            jobs: self.keep(&jobs)?,
            segments: self.keep(&segments)?,
            count: products.jobs.len(),
            m,
            n,
            weights: self.real::<T>(&products.weights)?,
        })
    }
    /// What was allocated, and how many bytes.
    pub fn finish(self) -> (Vec<u64>, usize) {
        (self.held, self.bytes)
    }
}
