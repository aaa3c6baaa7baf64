//! `include/sezm.h` says what `src/c_api` says.
//!
//! `SEZM_WRITE_HEADER=1 cargo test --test header` writes it anew.

use std::path::Path;

fn header() -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).unwrap();
    // In the order in which one needs them.
    let files = ["version", "status", "logging", "model", "engine", "compute"];
    let builder = files.iter().fold(cbindgen::Builder::new().with_config(config), |builder, file| {
        builder.with_src(root.join(format!("src/c_api/{file}.rs")))
    });
    let mut text = Vec::new();
    builder.generate().unwrap().write(&mut text);
    // The heading that rustdoc wants is none in C.
    String::from_utf8(text).unwrap().replace("* # Safety\n", "* Requires:\n")
}

#[test]
fn header_is_fresh() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/sezm.h");
    let fresh = header();
    if std::env::var_os("SEZM_WRITE_HEADER").is_some() {
        std::fs::write(&path, &fresh).unwrap();
    }
    let stored = std::fs::read_to_string(&path).unwrap();
    assert!(
        stored == fresh,
        "include/sezm.h is stale: run SEZM_WRITE_HEADER=1 cargo test --test header, and commit it"
    );
}
