//! Neighbours and positions in, energies, forces and virials out.

use super::engine::{State, sezm_engine};
use super::pointers::{count, null_pointer, output, reference, slice};
use super::status::{enter, sezm_status};
use crate::engine::{Evaluation, Exchange, OneRank, Request, Rows};
use crate::graph::{Graph, LammpsList, NeighbourList, Structure};
use crate::{Error, Result};
use std::ffi::{c_int, c_void};
use std::ptr::null;

/// Asks for the virial of each node.
pub const SEZM_ATOM_VIRIAL: u32 = 1;
/// Asks for the descriptor of each owned atom.
pub const SEZM_DESCRIPTOR: u32 = 2;

/// To the exchange callback: overwrite the rows of remote nodes with their owners' rows.
pub const SEZM_FORWARD: i32 = 0;
/// To the exchange callback: add the rows of remote nodes to their owners' rows.
pub const SEZM_REVERSE: i32 = 1;

/// A full neighbour list of one rank, as LAMMPS lays it out.
///
/// Atoms are the `n_local` owned ones first, then the ghosts. Nodes carry features: the owned atoms first, then one
/// node for each atom of another rank that has a ghost here. A ghost of an atom of this rank has its owner's node.
/// Pointers are read during the call only; where a count is 0 they may be null.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct sezm_neighbours {
    /// Owned atoms.
    pub n_local: i32,
    /// Owned atoms and ghosts.
    pub n_all: i32,
    /// Owned atoms and remote owners; `n_local` on one rank.
    pub n_nodes: i32,
    /// Position of each of the `n_all` atoms at this rebuild: `n_all` x 3, Å.
    pub x: *const f64,
    /// Model type of each of the `n_all` atoms; -1 for an atom that is not of this model.
    pub types: *const i32,
    /// Node of each of the `n_all` atoms; that of owned atom `i` is `i`, those of remote owners follow without gaps.
    pub nodes: *const u32,
    /// Length of `ilist`.
    pub inum: i32,
    /// The owned atoms whose neighbours are listed.
    pub ilist: *const i32,
    /// Number of neighbours of atom `i`, at `numneigh[i]`.
    pub numneigh: *const i32,
    /// Neighbours of atom `i`, at `firstneigh[i]`: atom indices, with the flag bits of LAMMPS in the top three bits
    /// or without; they may lie beyond the cutoff (skin).
    pub firstneigh: *const *const i32,
}

/// Moves rows of node features between ranks in the midst of `sezm_engine_compute`.
///
/// `rows` is `n_nodes` x `width`, row-major, of `float` (`element_size` 4) or `double` (8), in host memory;
/// `direction` is `SEZM_FORWARD` or `SEZM_REVERSE`. All ranks call it equally often in the same order.
/// Returns 0, or anything else to make the call fail with `SEZM_EXCHANGE_FAILED`. It must not throw or jump out.
pub type sezm_exchange_callback = Option<
    unsafe extern "C" fn(
        context: *mut c_void,
        direction: i32,
        rows: *mut c_void,
        element_size: i32,
        n_nodes: usize,
        width: usize,
    ) -> c_int,
>;

/// How rows travel between ranks.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct sezm_exchange {
    /// Given to the callback.
    pub context: *mut c_void,
    /// Called on the thread that called `sezm_engine_compute`.
    pub callback: sezm_exchange_callback,
}

/// The answer. Pointers lead into memory of the engine, valid until its next computation or its end.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct sezm_results {
    /// Total energy of the owned atoms, eV.
    pub energy: f64,
    /// Global virial, the sum of force times coordinate, eV, row-major: force component, coordinate component.
    /// Pressure times volume is a third of its trace, and the kinetic part. Ranks add up to the whole system.
    pub virial: [f64; 9],
    /// Energy of each owned atom, eV: `n_local` values.
    pub atom_energy: *const f64,
    /// Force on each node, eV/Å: `n_nodes` x 3. Those of remote nodes are to be added at their owners.
    pub forces: *const f64,
    /// Virial of each node, eV: `n_nodes` x 9, laid out as `virial`; null unless asked for.
    pub atom_virial: *const f64,
    /// Descriptor of each owned atom: `n_local` x `descriptor_width`; null unless asked for.
    pub descriptor: *const f64,
    /// Length of a descriptor; 0 unless asked for.
    pub descriptor_width: usize,
    /// Owned atoms.
    pub n_local: usize,
    /// Nodes.
    pub n_nodes: usize,
    /// Directed edges: pairs of a centre and a neighbour within the cutoff.
    pub n_edges: usize,
}

/// Takes over a new neighbour list; to be called at each rebuild, before `sezm_engine_compute`.
///
/// The list may contain pairs beyond the cutoff and must contain all within it, of each owned atom in both directions.
///
/// Status: `SEZM_ARGUMENT` for counts, types, nodes or neighbours that do not fit each other, `SEZM_STRUCTURE` for
/// positions that are not finite; the engine then has no list.
///
/// # Safety
/// `engine` and `neighbours` are null or live, and the arrays are as long as `sezm_neighbours` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sezm_engine_set_neighbours(
    engine: *mut sezm_engine,
    neighbours: *const sezm_neighbours,
) -> sezm_status {
    enter(|| {
        // SAFETY: the caller's promise.
        let (engine, neighbours) = unsafe { (reference(engine, "engine")?, reference(neighbours, "neighbours")?) };
        let mut state = engine.lock()?;
        state.neighbours = None;
        // SAFETY: the caller's promise.
        let list = unsafe { read_neighbours(neighbours, &state)? };
        // Read as a count above.
        state.n_all = neighbours.n_all as usize;
        state.neighbours = Some(list);
        Ok(())
    })
}

/// Energy, forces and virial at positions `x` (`n_all` x 3, Å, ghosts in place) with the last neighbour list.
///
/// `flags` is a sum of `SEZM_ATOM_VIRIAL` and `SEZM_DESCRIPTOR`, or 0. `exchange` is null on one rank. In a distributed
/// run every rank makes the same calls, also a rank without atoms. `results` is emptied first, filled on success.
///
/// Status: `SEZM_ARGUMENT` (no neighbour list, remote nodes without an exchange, unknown flags), `SEZM_STRUCTURE`,
/// `SEZM_EXCHANGE_FAILED`, `SEZM_OUT_OF_MEMORY`, `SEZM_DEVICE`.
///
/// # Safety
/// Pointers are null or live; `x` has `3 n_all` values, where `n_all` is that of the last neighbour list.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sezm_engine_compute(
    engine: *mut sezm_engine,
    x: *const f64,
    flags: u32,
    exchange: *const sezm_exchange,
    results: *mut sezm_results,
) -> sezm_status {
    enter(|| {
        // SAFETY: the caller's promise.
        let (engine, results) = unsafe { (reference(engine, "engine")?, output(results, "results")?) };
        *results = sezm_results::EMPTY;
        let want = request(flags)?;
        let State { engine, n_all, neighbours, evaluation, .. } = &mut *engine.lock()?;
        let list = neighbours.as_mut().ok_or_else(|| {
            Error::Argument("this engine has no neighbour list: call sezm_engine_set_neighbours first".into())
        })?;
        // SAFETY: the caller's promise.
        let graph = list.graph(unsafe { slice(x.cast::<[f64; 3]>(), *n_all, "x")? })?;
        *evaluation = if exchange.is_null() {
            refuse_remote_nodes(graph)?;
            engine.evaluate(graph, want, &mut OneRank)?
        } else {
            // SAFETY: the caller's promise.
            let exchange = unsafe { reference(exchange, "exchange")? };
            engine.evaluate(graph, want, &mut Callback::new(exchange, graph.n_nodes())?)?
        };
        *results = sezm_results::of(evaluation, graph, want);
        Ok(())
    })
}

/// Energy, forces and virial of `n_atoms` atoms in a cell or in free space: for programs without neighbour lists.
///
/// `x` is `n_atoms` x 3 (Å); `types` are model types, -1 for an atom that is not of this model; `cell` holds the three
/// lattice vectors one after the other (Å), or is null for free space; `pbc` says along which of them the cell repeats
/// (not 0); null means all of them, or none where there is no cell. Nodes are the atoms. The neighbour list of
/// `sezm_engine_set_neighbours` stays.
/// `flags` and `results` are those of `sezm_engine_compute`.
///
/// Status: `SEZM_ARGUMENT` (types, flags, periodic without a cell), `SEZM_STRUCTURE`, `SEZM_OUT_OF_MEMORY`, `SEZM_DEVICE`.
///
/// # Safety
/// Pointers are null or live; `x` has `3 n_atoms` values, `types` has `n_atoms`, `cell` has 9 and `pbc` has 3.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sezm_engine_compute_cell(
    engine: *mut sezm_engine,
    n_atoms: usize,
    x: *const f64,
    types: *const i32,
    cell: *const f64,
    pbc: *const i32,
    flags: u32,
    results: *mut sezm_results,
) -> sezm_status {
    enter(|| {
        // SAFETY: the caller's promise.
        let (engine, results) = unsafe { (reference(engine, "engine")?, output(results, "results")?) };
        *results = sezm_results::EMPTY;
        let want = request(flags)?;
        let State { engine, cutoff, element_count, excluded, evaluation, .. } = &mut *engine.lock()?;
        // SAFETY: the caller's promise.
        let structure = unsafe { read_structure(n_atoms, x, types, cell, pbc, *element_count)? };
        let graph = crate::graph::build(&structure, *cutoff, excluded)?;
        *evaluation = engine.evaluate(&graph, want, &mut OneRank)?;
        *results = sezm_results::of(evaluation, &graph, want);
        Ok(())
    })
}

impl sezm_results {
    /// No answer.
    const EMPTY: Self = sezm_results {
        energy: 0.0,
        virial: [0.0; 9],
        atom_energy: null(),
        forces: null(),
        atom_virial: null(),
        descriptor: null(),
        descriptor_width: 0,
        n_local: 0,
        n_nodes: 0,
        n_edges: 0,
    };

    fn of(evaluation: &Evaluation, graph: &Graph, want: Request) -> Self {
        sezm_results {
            energy: evaluation.energy,
            virial: evaluation.virial,
            atom_energy: evaluation.atom_energy.as_ptr(),
            forces: evaluation.forces.as_ptr().cast(),
            atom_virial: if want.atom_virial { evaluation.atom_virial.as_ptr().cast() } else { null() },
            descriptor: if want.descriptor { evaluation.descriptor.as_ptr() } else { null() },
            descriptor_width: evaluation.descriptor.len().checked_div(graph.n_owned).unwrap_or(0),
            n_local: graph.n_owned,
            n_nodes: graph.n_nodes(),
            n_edges: graph.n_edges(),
        }
    }
}

fn refuse_remote_nodes(graph: &Graph) -> Result<()> {
    match graph.n_nodes() - graph.n_owned {
        0 => Ok(()),
        remote => Err(Error::Argument(format!("there are {remote} remote nodes, but exchange is a null pointer"))),
    }
}

/// The neighbour list behind the pointers of C, checked.
///
/// # Safety
/// The arrays are as long as [`sezm_neighbours`] says.
unsafe fn read_neighbours(raw: &sezm_neighbours, state: &State) -> Result<NeighbourList> {
    let n_local = count(raw.n_local, "n_local")?;
    let n_all = count(raw.n_all, "n_all")?;
    let inum = count(raw.inum, "inum")?;
    if n_local > n_all {
        return Err(Error::Argument(format!(
            "n_all is {n_all}, but n_local is {n_local}: owned atoms are the first of all"
        )));
    }
    // SAFETY: the caller's promise.
    let (positions, types) = unsafe { (slice(raw.x.cast(), n_all, "x")?, slice(raw.types, n_all, "types")?) };
    // SAFETY: the caller's promise.
    let (node, centres) = unsafe { (slice(raw.nodes, n_all, "nodes")?, slice(raw.ilist, inum, "ilist")?) };
    check_types(types, state.element_count)?;
    check_nodes(node, n_local, count(raw.n_nodes, "n_nodes")?)?;
    // SAFETY: the caller's promise.
    let rows = centres.iter().map(|&i| unsafe { row(raw, i, n_local) }).collect::<Result<Vec<_>>>()?;
    NeighbourList::new(&LammpsList { n_local, positions, types, node, rows: &rows }, state.cutoff, &state.excluded)
}

/// Owned atom `i` and its neighbours.
///
/// # Safety
/// `numneigh` and `firstneigh` hold the row of `i` if it is an owned atom.
unsafe fn row<'a>(raw: &sezm_neighbours, i: i32, n_local: usize) -> Result<(u32, &'a [i32])> {
    let owned = u32::try_from(i).ok().filter(|&i| (i as usize) < n_local);
    let i =
        owned.ok_or_else(|| Error::Argument(format!("ilist names atom {i}: expected one of {n_local} owned atoms")))?;
    if raw.numneigh.is_null() {
        return Err(null_pointer("numneigh"));
    }
    if raw.firstneigh.is_null() {
        return Err(null_pointer("firstneigh"));
    }
    // SAFETY: the arrays have a row for each atom that `ilist` names. Others may never have been written, so no slice
    // is made of the arrays.
    let (len, first) = unsafe { (raw.numneigh.add(i as usize).read(), raw.firstneigh.add(i as usize).read()) };
    // SAFETY: the caller's promise.
    Ok((i, unsafe { slice(first, count(len, "numneigh")?, "firstneigh")? }))
}

/// The atoms and the cell behind the pointers of C, checked.
///
/// # Safety
/// `x` has `3 n_atoms` values, `types` has `n_atoms`, `cell` has 9 and `pbc` has 3, or they are null.
unsafe fn read_structure<'a>(
    n_atoms: usize,
    x: *const f64,
    types: *const i32,
    cell: *const f64,
    pbc: *const i32,
    element_count: usize,
) -> Result<Structure<'a>> {
    // SAFETY: the caller's promise.
    let (positions, types) = unsafe { (slice(x.cast(), n_atoms, "x")?, slice(types, n_atoms, "types")?) };
    check_types(types, element_count)?;
    let cell = match cell.is_null() {
        true => None,
        // SAFETY: the caller's promise.
        false => Some(*unsafe { reference(cell.cast::<[[f64; 3]; 3]>(), "cell")? }),
    };
    let pbc = match pbc.is_null() {
        true => [cell.is_some(); 3],
        // SAFETY: the caller's promise.
        false => unsafe { reference(pbc.cast::<[i32; 3]>(), "pbc")? }.map(|repeats| repeats != 0),
    };
    Ok(Structure { positions, types, cell, pbc })
}

/// The engine finds the nodes itself; what the host believes of them must be the same.
fn check_nodes(nodes: &[u32], n_local: usize, n_nodes: usize) -> Result<()> {
    let found = nodes.iter().map(|&node| node as usize + 1).max().unwrap_or(0).max(n_local);
    match found == n_nodes {
        true => Ok(()),
        false => Err(Error::Argument(format!("n_nodes is {n_nodes}, but the nodes of the atoms lead to {found}"))),
    }
}

fn check_types(types: &[i32], element_count: usize) -> Result<()> {
    let valid = -1..element_count as i32;
    match types.iter().position(|kind| !valid.contains(kind)) {
        None => Ok(()),
        Some(atom) => Err(Error::Argument(format!(
            "atom {atom} has type {}: expected 0 to {}, or -1 for an atom that is not of this model",
            types[atom],
            element_count - 1
        ))),
    }
}

fn request(flags: u32) -> Result<Request> {
    let unknown = flags & !(SEZM_ATOM_VIRIAL | SEZM_DESCRIPTOR);
    if unknown != 0 {
        return Err(Error::Argument(format!(
            "unknown flags {unknown:#x}: expected a sum of SEZM_ATOM_VIRIAL (1) and SEZM_DESCRIPTOR (2)"
        )));
    }
    Ok(Request { atom_virial: flags & SEZM_ATOM_VIRIAL != 0, descriptor: flags & SEZM_DESCRIPTOR != 0 })
}

/// The exchange callback of the host as an [`Exchange`].
struct Callback {
    context: *mut c_void,
    function: unsafe extern "C" fn(*mut c_void, i32, *mut c_void, i32, usize, usize) -> c_int,
    n_nodes: usize,
}

impl Callback {
    fn new(exchange: &sezm_exchange, n_nodes: usize) -> Result<Self> {
        let function = exchange.callback.ok_or_else(|| null_pointer("exchange.callback"))?;
        Ok(Callback { context: exchange.context, function, n_nodes })
    }

    fn call(&self, direction: i32, rows: Rows<'_>, width: usize) -> Result<()> {
        let (pointer, len, element_size) = match rows {
            Rows::F32(rows) => (rows.as_mut_ptr().cast::<c_void>(), rows.len(), size_of::<f32>()),
            Rows::F64(rows) => (rows.as_mut_ptr().cast(), rows.len(), size_of::<f64>()),
        };
        if len != self.n_nodes * width {
            return Err(Error::Internal(format!("{len} values for {} rows of {width}", self.n_nodes)));
        }
        // SAFETY: the host's own function with its own context; the rows are as large as it is told.
        let status =
            unsafe { (self.function)(self.context, direction, pointer, element_size as i32, self.n_nodes, width) };
        if status == 0 {
            return Ok(());
        }
        let way = if direction == SEZM_FORWARD { "forward" } else { "reverse" };
        Err(Error::Exchange(format!("the exchange callback ({way}, {width} values a row) returned status {status}")))
    }
}

impl Exchange for Callback {
    fn forward(&mut self, rows: Rows<'_>, width: usize) -> Result<()> {
        self.call(SEZM_FORWARD, rows, width)
    }

    fn reverse(&mut self, rows: Rows<'_>, width: usize) -> Result<()> {
        self.call(SEZM_REVERSE, rows, width)
    }
}
