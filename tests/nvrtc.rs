//! Kernels through NVRTC, without a GPU: every architecture, no spills, no warnings; the cache.
//!
//! NVRTC is taken from SEZM_NVRTC, `.local/nvrtc` (scripts/setup_nvrtc.sh) or the system. SEZM_REQUIRE_NVRTC=1
//! makes its absence a failure.

mod support;

use rayon::prelude::*;
use sezm::cuda::{Cache, Capability, Compiler, CudaError, Program, Version, engine, images, sources, wigner};
use sezm::model::Model;
use std::path::Path;
use std::sync::Once;
use support::cases;

const ARCHITECTURES: [Capability; 6] =
    [Capability(8, 0), Capability(8, 6), Capability(8, 9), Capability(9, 0), Capability(10, 0), Capability(12, 0)];

/// The compiler, or none with the reason printed.
fn compiler() -> Option<Compiler> {
    static POINT: Once = Once::new();
    POINT.call_once(|| {
        let local = Path::new(env!("CARGO_MANIFEST_DIR")).join(".local/nvrtc/nvidia/cu13/lib");
        if std::env::var_os("SEZM_NVRTC").is_none() && local.is_dir() {
            // SAFETY: set once before any other thread of this process reads the environment: every test begins
            // with this function, and the ones that come second wait here.
            unsafe { std::env::set_var("SEZM_NVRTC", local) };
        }
    });
    match Compiler::find(None) {
        Ok(compiler) => Some(compiler),
        Err(e) => {
            assert!(std::env::var_os("SEZM_REQUIRE_NVRTC").is_none(), "{e}");
            println!("SKIPPED: {e}");
            None
        }
    }
}

/// Every program of the table and of a whole model's engine once.
fn programs() -> Vec<Program> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/cuau/cuau.pt");
    let mut all = engine::programs::<f32>(&Model::open(&file, None).unwrap()).unwrap();
    for case in cases::all() {
        if !all.contains(&case.program) {
            all.push(case.program);
        }
    }
    all
}

#[test]
fn every_kernel_compiles_without_spills_or_warnings() {
    let Some(compiler) = compiler() else { return };
    println!("{}", compiler.describe());
    let work: Vec<(Program, Capability)> = programs()
        .into_iter()
        .flat_map(|p| ARCHITECTURES.map(|a| (p.clone(), a)))
        .filter(|(p, a)| a.has_wgmma() || !p.needs_wgmma())
        .collect();
    let failures: Vec<String> = work
        .par_iter()
        .filter_map(|(program, device)| {
            let what = format!("{} {:?} for {device}", program.name(), program.options());
            let compiled = match compiler.compile(program, *device) {
                Ok(compiled) => compiled,
                Err(e) => return Some(format!("{what}: {e}")),
            };
            let known = device.to_string();
            if !compiled.target.starts_with(&known) {
                return Some(format!("{what}: compiled for {}", compiled.target));
            }
            let mut found: Vec<String> = compiled.resources().into_iter().map(|r| r.kernel).collect();
            let mut listed: Vec<&str> = program.kernels().to_vec();
            found.sort();
            listed.sort();
            if found != listed {
                return Some(format!("{what}: reports on {found:?}, the source lists {listed:?}"));
            }
            let spills = compiled.resources().into_iter().find(|r| r.spill_bytes > 0);
            let warnings = compiled.warnings();
            (spills.is_some() || !warnings.is_empty()).then(|| format!("{what}: {spills:?} {warnings:?}"))
        })
        .collect();
    assert!(work.len() > 6 * sources::ALL.len());
    assert!(failures.is_empty(), "{} of {} fail:\n{}", failures.len(), work.len(), failures.join("\n"));
}

#[test]
fn a_spill_and_a_warning_would_be_seen() {
    static SPILLING: sources::Source = sources::Source {
        name: "spilling",
        text: "extern \"C\" __global__ void __launch_bounds__(1024, 2) spill(float* x) {\n\
               int unused;\n\
               float v[64];\n\
               #pragma unroll\n for (int i = 0; i < 64; ++i) v[i] = x[i * 1024 + threadIdx.x];\n\
               __syncthreads();\n\
               #pragma unroll\n for (int i = 0; i < 64; ++i) x[i * 1024 + threadIdx.x] = v[i] * v[63 - i];\n\
               }\n",
        kernels: &["spill"],
    };
    let Some(compiler) = compiler() else { return };
    let compiled = compiler.compile(&Program::new(&SPILLING), Capability(8, 0)).unwrap();
    assert!(compiled.resources()[0].spill_bytes > 0, "{}", compiled.log);
    assert!(!compiled.warnings().is_empty(), "{}", compiled.log);
}

#[test]
fn an_error_comes_with_its_line() {
    static WRONG: sources::Source = sources::Source {
        name: "wrong",
        text: "\nextern \"C\" __global__ void k() { undefined_name(); }\n",
        kernels: &[],
    };
    let Some(compiler) = compiler() else { return };
    match compiler.compile(&Program::new(&WRONG), Capability(9, 0)) {
        Err(e @ CudaError::Compile { .. }) => {
            let message = e.to_string();
            assert!(message.contains("wrong.cu(2): error"), "{message}");
            assert!(message.contains("undefined_name") && message.contains("sm_90a"), "{message}");
            assert!(matches!(sezm::Error::from(e), sezm::Error::Device(_)));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn devices_beyond_the_compiler() {
    let Some(compiler) = compiler() else { return };
    let program = wigner::program::<f32>(1);
    // A device of the future gets PTX, which its driver compiles; one from before the oldest gets a message.
    let future = compiler.compile(&program, Capability(99, 0)).unwrap();
    assert!(future.target.starts_with("compute_"), "{}", future.target);
    assert_eq!(future.image.last(), Some(&0));
    assert!(matches!(compiler.compile(&program, Capability(1, 0)), Err(CudaError::NoImage { .. })));
}

#[test]
fn a_compiler_newer_than_the_driver_is_not_taken() {
    let Some(compiler) = compiler() else { return };
    let old = Version(compiler.version().0 - 1, 0);
    match Compiler::find(Some(old)) {
        Ok(other) => assert!(other.version().0 <= old.0),
        Err(e) => assert!(matches!(e, CudaError::CompilerTooNew { .. }), "{e}"),
    }
}

#[test]
fn images_come_from_the_cache_the_second_time() {
    if compiler().is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path());
    let programs: Vec<Program> = (0..4).map(wigner::program::<f32>).collect();
    let files = || {
        let mut all: Vec<_> = std::fs::read_dir(folder.path())
            .unwrap()
            .map(|e| e.unwrap())
            .map(|e| (e.path(), e.metadata().unwrap().modified().unwrap()))
            .collect();
        all.sort();
        all
    };
    let first = images(&programs, Capability(9, 0), &cache, None).unwrap();
    let stored = files();
    assert_eq!(stored.len(), programs.len());
    assert_eq!(images(&programs, Capability(9, 0), &cache, None).unwrap(), first);
    // Nor does a machine whose driver suits no compiler need one when the cache is full.
    assert_eq!(images(&programs, Capability(9, 0), &cache, Some(Version(1, 0))).unwrap(), first);
    assert_eq!(files(), stored, "nothing was written again");
    assert!(images(&programs, Capability(8, 0), &cache, Some(Version(1, 0))).is_err(), "another device is not cached");

    std::fs::write(&stored[0].0, b"damaged").unwrap();
    assert_eq!(images(&programs, Capability(9, 0), &cache, None).unwrap(), first);
    assert!(std::fs::metadata(&stored[0].0).unwrap().len() > 1000, "and replaced");
}

#[test]
fn nvcc_stands_in_for_nvrtc() {
    let Some(nvcc) = Compiler::nvcc() else {
        println!("SKIPPED: no nvcc in SEZM_NVCC, the path or a CUDA installation");
        return;
    };
    println!("{}", nvcc.describe());
    let compiled = nvcc.compile(&wigner::program::<f32>(3), Capability(9, 0)).unwrap();
    assert_eq!(compiled.target, "sm_90a");
    assert!(compiled.image.starts_with(b"\x7fELF"), "a cubin");
    assert!(compiled.warnings().is_empty(), "{}", compiled.log);
    assert_eq!(compiled.resources()[0].spill_bytes, 0);
    let text = nvcc.compile(&wigner::program::<f32>(3), Capability(99, 0)).unwrap();
    assert_eq!(text.image.last(), Some(&0), "PTX ends in zero");
    static WRONG: sources::Source =
        sources::Source { name: "wrong", text: "__global__ void k() { undefined_name(); }\n", kernels: &[] };
    let error = nvcc.compile(&Program::new(&WRONG), Capability(9, 0)).unwrap_err();
    assert!(matches!(&error, CudaError::Compile { log, .. } if log.contains("undefined_name")), "{error}");
}
