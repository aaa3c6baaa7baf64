//! The border, with engines that misbehave.

use super::*;
use crate::engine::{Engine, Evaluation, Exchange, Request, Rows};
use crate::graph::Graph;
use crate::{Error, Result};
use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::{null, null_mut};
use std::sync::Mutex;

/// An engine whose energy is the number of edges, and which does one thing more.
struct Fake(fn(&mut dyn Exchange, usize) -> Result<()>);

impl Engine for Fake {
    fn evaluate(&mut self, graph: &Graph, want: Request, exchange: &mut dyn Exchange) -> Result<Evaluation> {
        (self.0)(exchange, graph.n_nodes())?;
        let forces = (0..graph.n_nodes()).map(|i| [i as f64, 0.5, -1.0]).collect();
        Ok(Evaluation {
            energy: graph.n_edges() as f64,
            atom_energy: vec![1.0; graph.n_owned],
            forces,
            atom_virial: if want.atom_virial { vec![[2.0; 9]; graph.n_nodes()] } else { vec![] },
            descriptor: if want.descriptor { vec![3.0; 4 * graph.n_owned] } else { vec![] },
            ..Evaluation::default()
        })
    }
    fn describe(&self) -> String {
        "fake\0engine".into()
    }
    fn profile(&self) -> Vec<(&'static str, u64, f64)> {
        vec![("wigner", 2, 0.25), ("readout", 1, 0.5)]
    }
    fn memory_usage(&self) -> usize {
        17
    }
}

fn fake(behaviour: fn(&mut dyn Exchange, usize) -> Result<()>) -> sezm_engine {
    sezm_engine::new(Box::new(Fake(behaviour)), 3.0, 2, vec![])
}

const X: [f64; 6] = [0.0, 0.0, 0.0, 2.0, 0.0, 0.0];

fn empty_results() -> sezm_results {
    // SAFETY: null pointers and zeros are values of every field.
    unsafe { std::mem::zeroed() }
}

/// Two atoms 2 Å apart in free space.
fn compute_pair(engine: &mut sezm_engine, flags: u32, results: &mut sezm_results) -> sezm_status {
    // SAFETY: live arrays of two atoms.
    unsafe { sezm_engine_compute_cell(engine, 2, X.as_ptr(), [0, 1].as_ptr(), null(), null(), flags, results) }
}

/// The same pair as a neighbour list with a remote node; `exchange` as given.
fn compute_remote(engine: &mut sezm_engine, exchange: &sezm_exchange, results: &mut sezm_results) -> sezm_status {
    let (row, types, nodes) = ([1 | (2 << 30)], [0, 1], [0, 1]);
    let rows = [row.as_ptr()];
    let list = sezm_neighbours {
        n_local: 1,
        n_all: 2,
        n_nodes: 2,
        x: X.as_ptr(),
        types: types.as_ptr(),
        nodes: nodes.as_ptr(),
        inum: 1,
        ilist: [0].as_ptr(),
        numneigh: [1].as_ptr(),
        firstneigh: rows.as_ptr(),
    };
    // SAFETY: live arrays of two atoms, one of them listed.
    unsafe {
        assert_eq!(sezm_engine_set_neighbours(engine, &list), sezm_status::SEZM_OK, "{}", last_error());
        sezm_engine_compute(engine, X.as_ptr(), 0, exchange, results)
    }
}

fn last_error() -> String {
    // SAFETY: never null, ends in NUL.
    unsafe { CStr::from_ptr(sezm_last_error()) }.to_str().unwrap().to_owned()
}

#[test]
fn results_point_at_the_answer() {
    let mut engine = fake(|_, _| Ok(()));
    let mut results = empty_results();
    assert_eq!(compute_pair(&mut engine, SEZM_ATOM_VIRIAL | SEZM_DESCRIPTOR, &mut results), sezm_status::SEZM_OK);
    assert_eq!((results.energy, results.n_local, results.n_nodes, results.n_edges), (2.0, 2, 2, 2));
    assert_eq!(results.descriptor_width, 4);
    // SAFETY: as long as the counts say, and the engine lives.
    unsafe {
        assert_eq!(std::slice::from_raw_parts(results.forces, 6), [0.0, 0.5, -1.0, 1.0, 0.5, -1.0]);
        assert_eq!(std::slice::from_raw_parts(results.atom_virial, 18), [2.0; 18]);
        assert_eq!(std::slice::from_raw_parts(results.descriptor, 8), [3.0; 8]);
    }
    assert_eq!(compute_pair(&mut engine, 0, &mut results), sezm_status::SEZM_OK);
    assert!(results.atom_virial.is_null() && results.descriptor.is_null());
    assert_eq!(results.descriptor_width, 0);
}

#[test]
fn every_error_has_its_status() {
    type Make = fn() -> Error;
    let cases: [(Make, sezm_status); 9] = [
        (|| Error::Argument("a".into()), sezm_status::SEZM_ARGUMENT),
        (|| Error::io("p".as_ref(), "a"), sezm_status::SEZM_IO),
        (|| Error::format("p".as_ref(), "a"), sezm_status::SEZM_FORMAT),
        (|| Error::Unsupported("a".into()), sezm_status::SEZM_UNSUPPORTED),
        (|| Error::Structure("a".into()), sezm_status::SEZM_STRUCTURE),
        (|| Error::Device("a".into()), sezm_status::SEZM_DEVICE),
        (|| Error::OutOfMemory("a".into()), sezm_status::SEZM_OUT_OF_MEMORY),
        (|| Error::Exchange("a".into()), sezm_status::SEZM_EXCHANGE_FAILED),
        (|| Error::Internal("a".into()), sezm_status::SEZM_INTERNAL),
    ];
    for (make, status) in cases {
        assert_eq!(status::enter(|| Err(make())), status);
        assert_eq!(last_error(), make().to_string());
    }
}

#[test]
fn a_panic_is_a_status_and_the_engine_is_closed() {
    let mut engine = fake(|_, _| panic!("seven is not prime enough"));
    let mut results = empty_results();
    assert_eq!(compute_pair(&mut engine, 0, &mut results), sezm_status::SEZM_INTERNAL);
    assert_eq!(last_error(), "internal error: seven is not prime enough (please report this)");
    assert_eq!(compute_pair(&mut engine, 0, &mut results), sezm_status::SEZM_INTERNAL);
    assert!(last_error().contains("make a new one"), "{}", last_error());
    assert!(results.forces.is_null());
}

#[test]
fn rows_travel_in_the_precision_of_the_engine() {
    unsafe extern "C" fn copy(
        context: *mut c_void,
        way: i32,
        rows: *mut c_void,
        size: i32,
        n: usize,
        width: usize,
    ) -> i32 {
        // SAFETY: `n` rows of `width` values of `size` bytes; the context is the log of calls below.
        unsafe {
            if size == 4 {
                rows.cast::<f32>().add(width).copy_from(rows.cast(), width);
            } else {
                rows.cast::<f64>().add(width).copy_from(rows.cast(), width);
            }
            (*context.cast::<Vec<(i32, i32, usize, usize)>>()).push((way, size, n, width));
        }
        0
    }
    let mut engine = fake(|exchange, n_nodes| {
        let mut single = vec![1.5f32, 2.5, 3.5, 0.0, 0.0, 0.0];
        exchange.forward(Rows::F32(&mut single), 3)?;
        assert_eq!((n_nodes, &single[3..]), (2, &[1.5, 2.5, 3.5][..]));
        let mut double = vec![4.5f64, 0.0];
        exchange.reverse(Rows::F64(&mut double), 1)?;
        assert_eq!(double, [4.5, 4.5]);
        Ok(())
    });
    let mut calls: Vec<(i32, i32, usize, usize)> = Vec::new();
    let exchange = sezm_exchange { context: (&raw mut calls).cast(), callback: Some(copy) };
    let mut results = empty_results();
    assert_eq!(compute_remote(&mut engine, &exchange, &mut results), sezm_status::SEZM_OK, "{}", last_error());
    assert_eq!(calls, [(SEZM_FORWARD, 4, 2, 3), (SEZM_REVERSE, 8, 2, 1)]);
    assert_eq!((results.n_local, results.n_nodes, results.n_edges), (1, 2, 1));
}

#[test]
fn an_engine_serves_one_call_at_a_time() {
    unsafe extern "C" fn call_again(engine: *mut c_void, _: i32, _: *mut c_void, _: i32, _: usize, _: usize) -> i32 {
        let mut bytes = 0;
        // SAFETY: the context is the engine that is computing.
        unsafe { sezm_engine_memory_usage(engine.cast(), &mut bytes) as i32 }
    }
    let mut engine = fake(|exchange, n_nodes| exchange.forward(Rows::F64(&mut vec![0.0; n_nodes]), 1));
    let exchange = sezm_exchange { context: (&raw mut engine).cast(), callback: Some(call_again) };
    let mut results = empty_results();
    assert_eq!(compute_remote(&mut engine, &exchange, &mut results), sezm_status::SEZM_EXCHANGE_FAILED);
    assert_eq!(last_error(), "the exchange callback (forward, 1 values a row) returned status 1");
}

#[test]
fn an_engine_describes_itself() {
    let mut engine = fake(|_, _| Ok(()));
    let (mut text, mut stages, mut count, mut bytes) = (null(), null(), 0, 0);
    // SAFETY: a live engine and places for the answers.
    unsafe {
        assert_eq!(sezm_engine_describe(&engine, &mut text), sezm_status::SEZM_OK);
        assert_eq!(CStr::from_ptr(text), c"fake");
        assert_eq!(sezm_engine_memory_usage(&engine, &mut bytes), sezm_status::SEZM_OK);
        assert_eq!(bytes, 17);
        assert_eq!(sezm_engine_profile(&mut engine, &mut stages, &mut count), sezm_status::SEZM_OK);
        let stages = std::slice::from_raw_parts(stages, count);
        let names: Vec<&CStr> = stages.iter().map(|stage| CStr::from_ptr(stage.name)).collect();
        assert_eq!(names, [c"wigner", c"readout"]);
        assert_eq!((stages[1].calls, stages[1].seconds), (1, 0.5));
    }
}

#[test]
fn log_lines_reach_the_host() {
    unsafe extern "C" fn keep(level: i32, message: *const c_char, context: *mut c_void) {
        // SAFETY: text that ends in NUL, and the list of lines below.
        let (message, lines) = unsafe { (CStr::from_ptr(message), &*context.cast::<Mutex<Vec<(i32, CString)>>>()) };
        if message.to_bytes().starts_with(b"to the host") {
            lines.lock().unwrap().push((level, message.to_owned()));
        }
    }
    let lines: Mutex<Vec<(i32, CString)>> = Mutex::default();
    let context = (&raw const lines).cast_mut().cast();
    // SAFETY: the callback and its list outlive the last call, which unsets it.
    unsafe {
        assert_eq!(sezm_set_log_callback(Some(keep), context, 9), sezm_status::SEZM_ARGUMENT);
        assert_eq!(sezm_set_log_callback(Some(keep), context, SEZM_LOG_WARN), sezm_status::SEZM_OK);
        log::warn!("to the host: {}", 1);
        log::info!("to the host: below the level");
        assert_eq!(sezm_set_log_callback(None, null_mut(), 0), sezm_status::SEZM_OK);
        log::error!("to the host: nobody listens");
    }
    assert_eq!(*lines.lock().unwrap(), [(SEZM_LOG_WARN, c"to the host: 1".to_owned())]);
}

#[test]
fn pointers_are_checked() {
    // SAFETY: nothing is dereferenced: null, misaligned or too long.
    unsafe {
        assert!(pointers::slice(null::<f64>(), 0, "x").unwrap().is_empty());
        let message = |result: Result<&[f64]>| result.unwrap_err().to_string();
        assert_eq!(message(pointers::slice(null(), 1, "x")), "x is a null pointer");
        assert_eq!(message(pointers::slice(X.as_ptr().byte_add(4), 1, "x")), "x is not aligned to 8 bytes");
        let too_long = isize::MAX as usize;
        assert!(message(pointers::slice(X.as_ptr(), too_long, "x")).contains("do not fit into memory"));
        assert!(pointers::output(null_mut::<f64>(), "y").is_err());
    }
    // SAFETY: text that ends in NUL.
    let text = unsafe { pointers::text(c"\xff.pt".as_ptr(), "path") };
    assert!(text.unwrap_err().to_string().contains("not UTF-8"));
}
