//! A C program (`c_api/test_sezm.c`) uses the library through `sezm.h`: plain, under valgrind, and with its own side
//! built with the address sanitizer.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// What the standard library of Rust needs on Linux: `rustc --print native-static-libs`.
const NATIVE_LIBRARIES: [&str; 6] = ["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn a_c_program_loads_evaluates_and_frees() {
    run_test_program(&["-O1"], &[]);
}

#[test]
fn no_invalid_access_and_no_leak_under_valgrind() {
    if !runs("valgrind", "--version") {
        println!("SKIPPED: no valgrind (apt-get install valgrind)");
        return;
    }
    // The thread pool lives until the process ends: reachable, not lost.
    let lost = ["--show-leak-kinds=definite,indirect", "--errors-for-leak-kinds=definite,indirect"];
    let suppressions = format!("--suppressions={}", root().join("tests/c_api/valgrind.supp").display());
    let valgrind = ["valgrind", "--quiet", "--error-exitcode=9", "--leak-check=full", lost[0], lost[1], &suppressions];
    run_test_program(&["-g", "-O1"], &valgrind);
}

#[test]
fn no_invalid_access_and_no_leak_under_the_address_sanitizer() {
    let flags = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"];
    if !compiles("int main(void) { return 0; }", &flags) {
        println!("SKIPPED: this compiler has no address sanitizer (apt-get install libasan8 libubsan1)");
        return;
    }
    run_test_program(&flags, &[]);
}

#[test]
fn the_program_of_the_guide_works() {
    let guide = std::fs::read_to_string(root().join("docs/c_abi.md")).unwrap();
    let program = guide.split("```c\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("program.c");
    std::fs::write(&source, program).unwrap();
    let Some(executable) = compile(&source, folder.path(), &[]) else { return };
    let output = succeed(Command::new(executable).current_dir(root()));
    let line = String::from_utf8(output.stdout).unwrap();
    assert!(line.contains(" eV, force on atom 0: "), "{line}");
}

#[test]
fn the_header_is_cpp_too() {
    if !runs("c++", "--version") {
        println!("SKIPPED: no C++ compiler (apt-get install g++)");
        return;
    }
    let header = root().join("include/sezm.h");
    let compiler = ["-std=c++11", "-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only", "-x", "c++"];
    succeed(Command::new("c++").args(compiler).arg(header));
}

/// Compiles a C program against the library; `None`, with the reason, where there is no C compiler.
fn compile(source: &Path, folder: &Path, flags: &[&str]) -> Option<PathBuf> {
    if !runs("cc", "--version") {
        println!("SKIPPED: no C compiler (apt-get install gcc)");
        return None;
    }
    let executable = folder.join("program");
    let mut cc = Command::new("cc");
    cc.args(["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic"]).args(flags);
    cc.arg("-I").arg(root().join("include")).arg("-o").arg(&executable);
    succeed(cc.arg(source).arg(library()).args(NATIVE_LIBRARIES));
    Some(executable)
}

/// Compiles the test program with `flags` and runs it, by way of `launcher` if that is not empty.
fn run_test_program(flags: &[&str], launcher: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = compile(&root().join("tests/c_api/test_sezm.c"), folder.path(), flags) else { return };
    let model = root().join("examples/cuau/cuau.pt");
    let unsupported = folder.path().join("unsupported.pt");
    write_unsupported(&model, &unsupported);
    let mut words = launcher.iter().map(PathBuf::from).chain([program]);
    let mut command = Command::new(words.next().expect("the program at least"));
    succeed(command.args(words).arg(&model).arg(root().join("tests/c_api/cuau.ref")).arg(&unsupported));
}

/// `libsezm.a` of the profile that the tests run in; cargo has it built already, or builds it now.
fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let profile = if cfg!(debug_assertions) { "test" } else { "release" };
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
        cargo.current_dir(root()).args(["build", "--lib", "--message-format=json", "--profile", profile]);
        let output = succeed(&mut cargo);
        let messages = String::from_utf8(output.stdout).unwrap();
        let file = messages.lines().find_map(|line| {
            let message: serde_json::Value = serde_json::from_str(line).unwrap();
            let files = message["filenames"].as_array()?.clone();
            files.iter().filter_map(|file| file.as_str().map(PathBuf::from)).find(|file| file.ends_with("libsezm.a"))
        });
        file.expect("cargo names libsezm.a")
    })
}

/// A copy of a checkpoint with an option switched on that no engine evaluates.
fn write_unsupported(model: &Path, copy: &Path) {
    let mut archive = zip::ZipArchive::new(std::fs::File::open(model).unwrap()).unwrap();
    let mut writer = zip::ZipWriter::new(std::fs::File::create(copy).unwrap());
    let stored = zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    for index in 0..archive.len() {
        let mut entry = archive.by_index(index).unwrap();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).unwrap();
        let name = entry.name().unwrap().into_owned();
        if name.ends_with("/data.pkl") {
            switch_on(&mut bytes, b"node_wise_s2");
        }
        writer.start_file(name, stored).unwrap();
        writer.write_all(&bytes).unwrap();
    }
    writer.finish().unwrap();
}

/// Makes the value of `key` in a pickled dictionary true: NEWFALSE, after the key and its memo entry, becomes NEWTRUE.
fn switch_on(pickle: &mut [u8], key: &[u8]) {
    const NEWTRUE: u8 = 0x88;
    const NEWFALSE: u8 = 0x89;
    let end = pickle.windows(key.len()).position(|window| window == key).unwrap() + key.len();
    let memo_entry = match pickle[end] {
        b'q' => 2, // BINPUT, one byte of index
        b'r' => 5, // LONG_BINPUT, four
        _ => 0,
    };
    let value = end + memo_entry;
    assert_eq!(pickle[value], NEWFALSE, "the checkpoint has this option off");
    pickle[value] = NEWTRUE;
}

fn runs(program: &str, argument: &str) -> bool {
    Command::new(program).arg(argument).output().is_ok_and(|output| output.status.success())
}

/// Does this program compile, link and run with these flags?
fn compiles(text: &str, flags: &[&str]) -> bool {
    let folder = tempfile::tempdir().unwrap();
    let (source, executable) = (folder.path().join("probe.c"), folder.path().join("probe"));
    std::fs::write(&source, text).unwrap();
    let built = Command::new("cc").args(flags).arg(source).arg("-o").arg(&executable).output();
    built.is_ok_and(|output| output.status.success()) && Command::new(executable).status().is_ok_and(|s| s.success())
}

fn succeed(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{text}", output.status);
    output
}
