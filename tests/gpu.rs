//! The kernels and the runtime layer on a GPU. Without one each test says SKIPPED; SEZM_REQUIRE_GPU=1 makes that a
//! failure. The binary needs nothing of the build: it can be carried to a machine that has a GPU and no Rust
//! (`cargo test --test gpu --no-run` names it; run it with `--nocapture`).

mod support;

use sezm::cuda::{Cache, CudaError, Device, MemoryPlan, Module, Program, StageClock, devices, driver_version, wigner};
use std::time::Instant;
use support::emulation::same_bits;
use support::{Argument, Case, cases, pack};

fn device() -> Option<Device> {
    match Device::open(0) {
        Ok(device) => Some(device),
        Err(e) => {
            assert!(std::env::var_os("SEZM_REQUIRE_GPU").is_none(), "{e}");
            println!("SKIPPED: {e}");
            None
        }
    }
}

/// The programs of the table that run on this device, each once.
fn programs(device: &Device, cases: &[Case]) -> Vec<Program> {
    let mut all: Vec<Program> = Vec::new();
    for case in cases {
        let runs = device.info().capability.has_wgmma() || !case.program.needs_wgmma();
        if runs && !all.contains(&case.program) {
            all.push(case.program.clone());
        }
    }
    all
}

/// What the arguments of a case hold after its launch.
fn run(device: &Device, module: &Module, case: &Case) -> Result<Vec<Argument>, CudaError> {
    let stream = device.stream()?;
    let kernel = module.kernel(case.kernel)?;
    let mut buffers = Vec::new();
    for argument in &case.arguments {
        buffers.push(match argument {
            Argument::Buffer(memory) => Some(device.upload(memory.bytes())?),
            Argument::Value(_) => None,
        });
    }
    let mut args = pack(&case.arguments, |i| buffers[i].as_ref().map_or(0, |b| b.address()));
    // SAFETY: the emulation ran this case: its arguments match the kernel and stay inside their buffers.
    unsafe { stream.launch(&kernel, case.launch, &mut args) }?;
    let mut after = case.arguments.clone();
    for (argument, buffer) in after.iter_mut().zip(&buffers) {
        if let (Argument::Buffer(memory), Some(buffer)) = (argument, buffer) {
            stream.download(buffer, memory.bytes_mut())?;
        }
    }
    stream.synchronize()?;
    Ok(after)
}

#[test]
fn kernels_compile_load_from_the_cache_and_agree_with_the_cpu() {
    let Some(device) = device() else { return };
    println!("{}, driver of CUDA {}", device.describe(), device.driver());
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path());
    let cases = cases::all();
    let programs = programs(&device, &cases);

    let start = Instant::now();
    device.load(&programs, &cache).unwrap();
    let cold = start.elapsed();
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), programs.len(), "one file a program");
    let start = Instant::now();
    let modules = device.load(&programs, &cache).unwrap();
    let warm = start.elapsed();
    println!("{} programs: compiled and loaded in {cold:.2?}, from the cache in {warm:.2?}", programs.len());
    assert!(warm < cold / 2, "the cache was not used");

    let (mut ran, mut failures) = (0, Vec::new());
    for case in &cases {
        let Some(i) = programs.iter().position(|p| *p == case.program) else { continue };
        let results =
            [(); 3].map(|()| run(&device, &modules[i], case).unwrap_or_else(|e| panic!("{}: {e}", case.name)));
        ran += 1;
        let again = results[1..].iter().try_for_each(|r| same_bits(&results[0], r));
        if let Err(e) = (case.check)(&results[0]).and(again) {
            failures.push(format!("{}: {e}", case.name));
        }
    }
    println!("{ran} cases, three times each, the same bits");
    assert!(failures.is_empty(), "{} of {ran} cases fail:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn a_damaged_cache_file_is_made_anew() {
    let Some(device) = device() else { return };
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path());
    let programs = [wigner::program::<f32>(2)];
    device.load(&programs, &cache).unwrap();
    let file = std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
    let good = std::fs::read(&file).unwrap();
    std::fs::write(&file, &good[..good.len() / 2]).unwrap();
    device.load(&programs, &cache).unwrap();
    assert_eq!(std::fs::read(&file).unwrap().len(), good.len());
}

#[test]
fn missing_devices_and_kernels_are_named() {
    // Where there is no driver at all this is an error too, not a panic.
    let Some(device) = device() else {
        let e = driver_version().and_then(|_| devices()).unwrap_err();
        assert!(matches!(e, CudaError::NoDriver | CudaError::NoDevice { .. } | CudaError::DriverTooOld { .. }), "{e}");
        assert!(e.to_string().contains("use device cpu"), "{e}");
        return;
    };
    let all = devices().unwrap();
    assert_eq!(all[0], *device.info());
    match Device::open(all.len()).err() {
        Some(e @ CudaError::NoSuchDevice { count, .. }) => {
            assert_eq!(count, all.len());
            println!("{e}");
        }
        other => panic!("{other:?}"),
    }
    let module = device.load(&[wigner::program::<f32>(1)], &Cache::from_environment()).unwrap().remove(0);
    let e = module.kernel("no_such_kernel").err().unwrap();
    assert!(e.to_string().contains("no_such_kernel"), "{e}");
    let attributes = module.kernel("wigner_assemble").unwrap().attributes().unwrap();
    assert!(attributes.registers > 0 && attributes.max_threads >= 256 && attributes.local_bytes == 0, "{attributes:?}");
}

#[test]
fn memory_is_counted_checked_and_returned() {
    let Some(device) = device() else { return };
    let stream = device.stream().unwrap();
    let values: Vec<f64> = (0..1000).map(f64::from).collect();
    let mut from = device.pinned::<f64>(1000).unwrap();
    from.write().unwrap().copy_from_slice(&values);
    let mut buffer = device.allocate::<f64>(1200).unwrap();
    let mut copy = device.zeros::<f64>(1200).unwrap();
    let mut to = device.pinned::<f64>(1100).unwrap();
    assert_eq!(device.held_memory(), 2 * 1200 * 8);
    stream.zero(&mut buffer, 1200).unwrap();
    stream.upload_pinned(&mut from, &mut buffer, 1000).unwrap();
    stream.copy(&buffer, &mut copy, 1100).unwrap();
    stream.download_pinned(&copy, &mut to, 1100).unwrap();
    let back = to.read().unwrap();
    assert_eq!(back[..1000], values[..]);
    assert!(back[1000..].iter().all(|&v| v == 0.0));
    assert!(matches!(stream.upload(&[0.0; 1201], &mut buffer), Err(CudaError::Size(_))));
    assert!(matches!(stream.download(&buffer, &mut [0.0; 1201]), Err(CudaError::Size(_))));
    drop((buffer, copy));
    assert_eq!((device.held_memory(), device.peak_memory()), (0, 2 * 1200 * 8));
    device.restart_peak();
    assert_eq!(device.peak_memory(), 0);

    let total = device.info().total_memory;
    assert!(device.free_memory().unwrap() <= total);
    let e = device.allocate::<u8>(total + 1).err().unwrap();
    assert!(matches!(e, CudaError::OutOfMemory(_)), "{e}");
    println!("{e}");
    let plan = MemoryPlan::new().growing("node features", 2 * total);
    let e = plan.check_device(&device, 1000).unwrap_err();
    println!("{e}");
    assert!(plan.atoms_that_fit(total as u64, 1000) == Some(500));
    assert!(device.allocate::<f32>(0).unwrap().is_empty());
}

#[test]
fn the_wigner_stage_runs_and_is_timed() {
    let Some(device) = device() else { return };
    let (lmax, n_edges) = (3, 647_168);
    let stream = device.stream().unwrap();
    let module = device.load(&[wigner::program::<f32>(lmax)], &Cache::from_environment()).unwrap().remove(0);
    let stage = wigner::Wigner::new(&module, lmax).unwrap();
    let mut random = support::Random::new(9);
    let vec = device.upload(&random.vector(3 * n_edges, |v| 6.0 * v)).unwrap();
    let mut record = device.allocate::<f32>(n_edges * wigner::record_len(lmax)).unwrap();
    assert!(matches!(stage.run(&stream, &vec, &mut record, n_edges + 1), Err(CudaError::Size(_))));
    stage.run(&stream, &vec, &mut record, 0).unwrap();
    let mut clock = StageClock::default();
    for _ in 0..10 {
        clock.start(&stream, "wigner").unwrap();
        stage.run(&stream, &vec, &mut record, n_edges).unwrap();
    }
    clock.stop(&stream).unwrap();
    clock.collect().unwrap();
    let (name, calls, seconds) = clock.totals()[0];
    assert_eq!((name, calls), ("wigner", 10));
    println!("wigner, {n_edges} edges, lmax {lmax}: {:.3} ms", seconds * 100.0);
    assert!(seconds > 0.0);
    // Every row of every block has length one: the whole output was written.
    let mut host = vec![f32::NAN; record.len()];
    stream.download(&record, &mut host).unwrap();
    for record in host.chunks(wigner::record_len(lmax)) {
        let rows = record[35..].chunks(7).chain(record[10..35].chunks(5)).chain(record[1..10].chunks(3));
        for row in rows.chain([&record[..1]]) {
            let length: f32 = row.iter().map(|v| v * v).sum();
            assert!((length - 1.0).abs() < 1e-6, "{row:?}");
        }
    }
}
