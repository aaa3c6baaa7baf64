//! The `sezm` program as a user meets it: its numbers, its messages, its exit status.

mod common;

use common::{EVERYTHING, committed, committed_model, committed_reference};
use serde_json::Value;
use sezm::engine::{self, OneRank, Precision};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

fn sezm(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_sezm")).args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The program's standard output after success.
fn answer(arguments: &[&str]) -> String {
    let output = sezm(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// Exit status and message of a failure.
fn failure(arguments: &[&str]) -> (i32, String) {
    let output = sezm(arguments);
    assert!(!output.status.success(), "{arguments:?} succeeded");
    (output.status.code().unwrap(), text(&output.stderr))
}

fn model(name: &str) -> String {
    committed().join(format!("{name}.pt")).display().to_string()
}

fn write(folder: &TempDir, name: &str, content: &str) -> String {
    let path = folder.path().join(name);
    std::fs::write(&path, content).unwrap();
    path.display().to_string()
}

/// The committed structures of a model as frames of one file.
fn frames(name: &str, structures: &[&str]) -> String {
    let model = committed_model(name);
    let mut out = String::new();
    for structure in structures {
        let reference = committed_reference(&model, name, structure);
        writeln!(out, "{}", reference.positions.len()).unwrap();
        if let Some(cell) = reference.cell {
            let numbers: Vec<String> = cell.as_flattened().iter().map(f64::to_string).collect();
            write!(out, "Lattice=\"{}\" ", numbers.join(" ")).unwrap();
        }
        writeln!(out, "Properties=id:I:1:species:S:1:pos:R:3 energy=0").unwrap();
        for (i, (p, &t)) in reference.positions.iter().zip(&reference.types).enumerate() {
            writeln!(out, "{i} {} {} {} {}", model.elements()[t as usize], p[0], p[1], p[2]).unwrap();
        }
    }
    out
}

/// The numbers of a JSON value, however deep.
fn numbers(value: &Value) -> Vec<f64> {
    match value {
        Value::Array(items) => items.iter().flat_map(numbers).collect(),
        number => vec![number.as_f64().unwrap()],
    }
}

#[test]
fn eval_gives_the_engine_s_numbers_to_the_bit() {
    let folder = TempDir::new().unwrap();
    let structures = ["cellOH", "moleculeOH"];
    let xyz = write(&folder, "two.xyz", &frames("neo_like", &structures));
    let file = folder.path().join("out.json");
    for (word, precision) in [("fp64", Precision::Fp64), ("fp32", Precision::Fp32)] {
        let common =
            ["eval", &model("neo_like"), &xyz, "--precision", word, "--device", "cpu", "--descriptor", "--json"];
        let printed = answer(&[&common[..], &["-"]].concat());
        answer(&[&common[..], &[file.to_str().unwrap()]].concat());
        assert_eq!(std::fs::read_to_string(&file).unwrap(), printed);
        let document: Value = serde_json::from_str(&printed).unwrap();
        assert_eq!(document["frames"].as_array().unwrap().len(), structures.len());
        let model = committed_model("neo_like");
        let mut engine = engine::create(&model, precision, "cpu").unwrap();
        for (structure, frame) in structures.iter().zip(document["frames"].as_array().unwrap()) {
            let graph = committed_reference(&model, "neo_like", structure).graph(&model);
            let expected = engine.evaluate(&graph, EVERYTHING, &mut OneRank).unwrap();
            assert_eq!(numbers(&frame["energy"]), [expected.energy]);
            assert_eq!(numbers(&frame["atom_energy"]), expected.atom_energy);
            assert_eq!(numbers(&frame["forces"]), expected.forces.as_flattened());
            assert_eq!(numbers(&frame["virial"]), expected.virial);
            assert_eq!(numbers(&frame["atom_virial"]), expected.atom_virial.as_flattened());
            assert_eq!(numbers(&frame["descriptor"]), expected.descriptor);
            assert_eq!(frame["descriptor"].as_array().unwrap().len(), graph.n_owned);
        }
    }
}

#[test]
fn eval_prints_a_table_for_people() {
    let folder = TempDir::new().unwrap();
    let xyz = write(&folder, "cell.xyz", &frames("base", &["cellOH"]));
    let table = answer(&["eval", &model("base"), &xyz, "--precision", "fp64"]);
    let model = committed_model("base");
    let reference = committed_reference(&model, "base", "cellOH");
    assert!(table.contains(&format!("energy  {:.8} eV", reference.value("f64", "energy")[0])), "{table}");
    assert!(table.contains(&format!("{:16.8}", reference.value("f64", "force")[0])), "{table}");
    assert!(table.contains("frame 1: 5 atoms"), "{table}");
}

#[test]
fn info_describes_a_model() {
    let path = model("neo_like");
    let report: Value = serde_json::from_str(&answer(&["info", &path, "--json"])).unwrap();
    let expected = committed_model("neo_like");
    assert_eq!(report["parameters"], expected.parameters());
    assert_eq!(report["elements"], serde_json::json!(["O", "H"]));
    assert_eq!(report["descriptor_version"], 1.2);
    assert_eq!(report["cutoff"], 6.0);
    assert_eq!(report["branches"], serde_json::json!(["Default"]));
    assert_eq!(report["refused"], serde_json::json!([]));
    assert_eq!(report["engines"]["cpu"]["supported"], true);
    assert_eq!(report["options"]["n_focus"], 2);
    assert_eq!(report["options"]["radial_mode"]["degree_channel"]["rank"], 1);
    assert_eq!(report["configuration"]["descriptor"]["lmax"], 3);
    let sum = Command::new("sha256sum").arg(&path).output().unwrap();
    assert_eq!(report["sha256"].as_str(), text(&sum.stdout).split_whitespace().next());
    let for_people = answer(&["info", &path]);
    for word in ["architecture", expected.architecture(), "O H", "evaluated on cpu", "n_focus"] {
        assert!(for_people.contains(word), "{word} is not in\n{for_people}");
    }
}

#[test]
fn info_names_what_is_refused_and_eval_refuses_it() {
    let path = refused();
    let config = {
        let checkpoint = sezm::checkpoint::Checkpoint::open(Path::new(&path), None).unwrap();
        sezm::model::read_config(&checkpoint).unwrap()
    };
    let names = config.unsupported();
    assert!(!names.is_empty());
    let report: Value = serde_json::from_str(&answer(&["info", &path, "--json"])).unwrap();
    assert_eq!(report["refused"], serde_json::json!(names));
    assert_eq!(report["engines"]["cpu"]["supported"], false);
    assert!(answer(&["info", &path]).contains(&names[0]));
    let folder = TempDir::new().unwrap();
    let xyz = write(&folder, "a.xyz", "1\n\nO 0 0 0\n");
    let (status, message) = failure(&["eval", &path, &xyz]);
    assert_eq!(status, 4, "{message}");
    assert!(message.contains(&names[0]), "{message}");
}

/// A committed checkpoint with an option that is not evaluated.
fn refused() -> String {
    model("layer_scale")
}

#[test]
fn failures_have_their_exit_status_and_say_what_to_do() {
    let folder = TempDir::new().unwrap();
    let good = write(&folder, "good.xyz", "1\n\nO 0 0 0\n");
    let bad = write(&folder, "bad.xyz", "2\n\nO 0 0 0\nH 0 zero 0\n");
    let foreign = write(&folder, "foreign.xyz", "3\n\nO 0 0 0\nXe 2 0 0\nAu 4 0 0\n");
    let close = write(&folder, "close.xyz", "2\n\nO 0 0 0\nH 0 0 1e-9\n");
    let text_file = write(&folder, "model.txt", "hello");
    let base = model("base");
    let missing = folder.path().join("missing").display().to_string();
    let cases: [(&[&str], i32, &str); 12] = [
        (&["eval", &base], 2, "STRUCTURE"),
        (&["evaluate"], 2, "unrecognized"),
        (&["eval", &base, &good, "--precision", "fp16"], 2, "fp64"),
        (&["eval", &base, &good, "--device", "abacus"], 2, "abacus"),
        (&["eval", &base, &good, "--descriptor"], 2, "--json"),
        (&["eval", &base, &missing], 3, "missing"),
        (&["eval", &missing, &good], 3, "missing"),
        (&["eval", &base, &bad], 3, "line 4: coordinate: expected a number, found 'zero'"),
        (&["eval", &base, &foreign], 3, "no element Au, Xe; it has O H"),
        (&["eval", &base, &close], 3, "frame of line 1"),
        (&["info", &text_file], 3, "is a text file"),
        (&["info", &base, "--branch", "Other"], 3, "Other"),
    ];
    for (arguments, status, reason) in cases {
        let (found, message) = failure(arguments);
        assert_eq!(found, status, "{arguments:?}: {message}");
        assert!(message.contains(reason), "{arguments:?}: {message}");
    }
}

#[test]
fn an_unwritable_output_is_an_error() {
    let folder = TempDir::new().unwrap();
    let good = write(&folder, "good.xyz", "1\n\nO 0 0 0\n");
    let nowhere: PathBuf = folder.path().join("no/such/folder.json");
    let (status, message) = failure(&["eval", &model("base"), &good, "--json", nowhere.to_str().unwrap()]);
    assert_eq!(status, 3);
    assert!(message.contains("no/such/folder.json"), "{message}");
}

#[test]
fn help_lists_the_exit_status() {
    for arguments in [&["--help"][..], &["info", "--help"], &["eval", "--help"]] {
        let help = answer(arguments);
        for line in ["0  done", "2  wrong use", "3  bad input", "4  the model uses an option", "5  a device"] {
            assert!(help.contains(line), "{line} is not in\n{help}");
        }
    }
}
