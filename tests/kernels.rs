//! The kernels on the CPU, by emulation: the same text, several thread orders, against mathematics.

mod support;

use rayon::prelude::*;
use sezm::cuda::sources::Source;
use sezm::cuda::{Launch, Program};
use support::emulation::{Emulated, SEEDS};
use support::{Argument, Case, cases};

/// Runs the cases, each program compiled once, and reports all that fail.
fn run(cases: Vec<Case>) {
    let failures: Vec<String> = cases
        .chunk_by(|a, b| a.program == b.program)
        .collect::<Vec<_>>()
        .into_par_iter()
        .flat_map_iter(|group| {
            let emulated = Emulated::build(&group[0].program);
            let failure = |case: &Case| emulated.run(case).err().map(|e| format!("{}: {e}", case.name));
            group.iter().filter_map(failure).collect::<Vec<_>>()
        })
        .collect();
    assert!(!cases.is_empty(), "no case");
    assert!(failures.is_empty(), "{} of {} cases fail:\n{}", failures.len(), cases.len(), failures.join("\n"));
}

fn of_program(name: &str) -> Vec<Case> {
    cases::all().into_iter().filter(|c| c.program.name() == name).collect()
}

#[test]
fn primitives() {
    run(of_program("primitives"));
}

#[test]
fn warpgroup_products() {
    run(of_program("warpgroup"));
}

#[test]
fn wigner() {
    run(of_program("wigner"));
}

static BROKEN: Source = Source {
    name: "broken",
    text: include_str!("support/broken.cu"),
    kernels: &["missing_barrier", "missing_wait", "divergent_barrier", "shared_overrun", "output_overrun"],
};

/// What the emulation says of a kernel of `broken.cu`, whose right result is given by `source`.
fn verdict(kernel: &'static str, threads: u32, source: fn(usize) -> usize) -> Result<(), String> {
    let input: Vec<f32> = (0..threads).map(|i| i as f32).collect();
    let case = Case {
        name: kernel.into(),
        program: Program::new(&BROKEN),
        kernel,
        launch: Launch::new(1, threads).shared(4 * threads),
        arguments: vec![Argument::input(&input), Argument::output::<f32>(input.len())],
        check: Box::new(move |arguments| {
            let out = arguments[1].read::<f32>();
            match (0..out.len()).find(|&i| out[i] != source(i) as f32) {
                Some(i) => Err(format!("wrong value {}", out[i])),
                None => Ok(()),
            }
        }),
    };
    Emulated::build(&case.program).run(&case)
}

#[test]
fn mistakes_are_found() {
    assert!(SEEDS.len() >= 3, "ascending, descending and shuffled");
    for (kernel, threads, message) in [
        ("missing_barrier", 64, "wrong value NaN"),
        ("missing_wait", 64, "wrong value NaN"),
        ("divergent_barrier", 32, "deadlock"),
        ("shared_overrun", 32, "past the end of dynamic shared memory"),
        ("output_overrun", 32, "write outside argument 1"),
    ] {
        // The sanitizer finds these itself, and ends the process.
        if std::env::var_os("SEZM_EMU_ASAN").is_some() && kernel.ends_with("overrun") {
            continue;
        }
        let source: fn(usize) -> usize = if kernel == "missing_barrier" { |i| 63 - i } else { |i| i };
        let error = verdict(kernel, threads, source).expect_err(kernel);
        assert!(error.contains(message), "{kernel}: {error}");
    }
}

#[test]
fn impossible_launches_are_refused() {
    let emulated = Emulated::build(&Program::new(&BROKEN));
    let mut memory = [0f32; 4];
    let mut args = sezm::cuda::Args::new().address(memory.as_mut_ptr() as u64).address(memory.as_mut_ptr() as u64);
    let mut refused = |launch| emulated.launch("output_overrun", launch, &mut args, 0).unwrap_err();
    assert!(refused(Launch::new(1, 1025)).contains("1 to 1024 threads"));
    assert!(refused(Launch::new(1, 32).shared(1 << 20)).contains("shared memory"));
}
