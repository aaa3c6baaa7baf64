//! The reader of torch checkpoints, against what torch itself wrote and read (tests/data/checkpoint/make.py).

use proptest::prelude::*;
use serde_json::{Value, json};
use sezm::checkpoint::{Checkpoint, Tensor};
use sezm::model::{Model, read_config};
use sha2::{Digest, Sha256};
use std::fs;
use std::io::{Cursor, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use zip::CompressionMethod;
use zip::write::SimpleFileOptions;

// ---------------------------------------------------------------------------------------------------- helpers

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/checkpoint").join(name)
}

fn json_file(name: &str) -> Value {
    serde_json::from_slice(&fs::read(data(name)).unwrap()).unwrap()
}

fn expected(name: &str) -> Value {
    json_file("expected.json")[name].clone()
}

/// The reference data, where they are.
fn shared() -> Option<PathBuf> {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared");
    let path = std::env::var_os("SEZM_SHARED").map_or_else(beside, PathBuf::from);
    if path.join("refs").is_dir() {
        return Some(path);
    }
    eprintln!("SKIPPED: no reference data in {} (set SEZM_SHARED)", path.display());
    None
}

/// The message of the error that opening `path` and reading all its tensors gives.
fn failure(path: &Path, branch: Option<&str>) -> String {
    let all = || -> sezm::Result<()> {
        let checkpoint = Checkpoint::open(path, branch)?;
        checkpoint.names().iter().try_for_each(|name| checkpoint.tensor(name).map(drop))
    };
    all().expect_err("it can be read").to_string()
}

/// Opening `path` fails with a message that names the file and holds every one of `parts`.
fn refused(path: &Path, parts: &[&str]) {
    let message = failure(path, None);
    let file = path.display().to_string();
    for part in parts.iter().chain([&file.as_str()]) {
        assert!(message.contains(part), "'{part}' is not in: {message}");
    }
}

fn matches(name: &str) {
    let checkpoint = Checkpoint::open(&data(name), None).unwrap();
    let expected = expected(name);
    let expected = expected.as_object().unwrap();
    let mut names = checkpoint.names();
    names.sort_unstable();
    let mut wanted: Vec<&str> = expected.keys().map(String::as_str).collect();
    wanted.sort_unstable();
    assert_eq!(names, wanted, "{name}");
    for (key, value) in expected {
        let tensor = checkpoint.tensor(key).unwrap().unwrap();
        let shape: Vec<usize> = serde_json::from_value(value["shape"].clone()).unwrap();
        let numbers: Vec<f64> = serde_json::from_value(value["data"].clone()).unwrap();
        assert_eq!(checkpoint.shape(key), Some(&shape[..]), "{name} {key}");
        assert_eq!(tensor.shape, shape, "{name} {key}");
        assert_eq!(bits(&tensor.data), bits(&numbers), "{name} {key}");
    }
    assert_eq!(checkpoint.tensor("no such tensor").unwrap(), None);
    assert_eq!(checkpoint.shape("no such tensor"), None);
}

fn bits(numbers: &[f64]) -> Vec<u64> {
    numbers.iter().map(|x| x.to_bits()).collect()
}

// ------------------------------------------------------------------------------- writing files, good and bad

/// Pickle text.
fn text(s: &str) -> Vec<u8> {
    [b"X".as_slice(), &(s.len() as u32).to_le_bytes(), s.as_bytes()].concat()
}
fn integer(i: i64) -> Vec<u8> {
    [b"\x8a\x08".as_slice(), &i.to_le_bytes()].concat()
}
fn tuple(items: &[Vec<u8>]) -> Vec<u8> {
    [b"(".as_slice(), &items.concat(), b"t"].concat()
}
fn dict(items: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let items: Vec<u8> = items.iter().flat_map(|(k, v)| [text(k), v.clone()].concat()).collect();
    [b"}(".as_slice(), &items, b"u"].concat()
}
fn pickled(value: &Value) -> Vec<u8> {
    match value {
        Value::Null => b"N".to_vec(),
        Value::Bool(true) => b"\x88".to_vec(),
        Value::Bool(false) => b"\x89".to_vec(),
        Value::Number(n) => match n.as_i64() {
            Some(i) => integer(i),
            None => [b"G".as_slice(), &n.as_f64().unwrap().to_be_bytes()].concat(),
        },
        Value::String(s) => text(s),
        Value::Array(a) => [b"](".to_vec(), a.iter().flat_map(pickled).collect(), b"e".to_vec()].concat(),
        Value::Object(o) => dict(&o.iter().map(|(k, v)| (k.as_str(), pickled(v))).collect::<Vec<_>>()),
    }
}
/// A view of storage `key` of `len` elements, as torch describes it.
fn view(class: &str, key: &str, len: i64, offset: i64, shape: &[i64], stride: &[i64]) -> Vec<u8> {
    let class = format!("ctorch\n{class}\n").into_bytes();
    let storage = tuple(&[text("storage"), class, text(key), text("cpu"), integer(len)]);
    let numbers = |list: &[i64]| tuple(&list.iter().map(|&i| integer(i)).collect::<Vec<_>>());
    let hooks = b"ccollections\nOrderedDict\n)R".to_vec();
    let arguments = [[storage, b"Q".to_vec()].concat(), integer(offset), numbers(shape), numbers(stride)];
    let arguments = tuple(&[&arguments[..], &[b"\x89".to_vec(), hooks]].concat());
    [b"ctorch._utils\n_rebuild_tensor_v2\n".to_vec(), arguments, b"R".to_vec()].concat()
}
/// `{"model": {items.., "_extra_state": {"model_params": params}}}`.
fn root(params: Vec<u8>, items: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let mut items = items.to_vec();
    items.push(("_extra_state", dict(&[("model_params", params)])));
    [b"\x80\x02".to_vec(), dict(&[("model", dict(&items))]), b".".to_vec()].concat()
}
fn params() -> Value {
    json!({"type_map": ["O", "H"], "descriptor": {"type": "dpa4"}, "fitting_net": {}})
}

fn zipped(path: &Path, entries: &[(&str, &[u8])], method: CompressionMethod) {
    let mut zip = zip::ZipWriter::new(fs::File::create(path).unwrap());
    for (name, bytes) in entries {
        zip.start_file(*name, SimpleFileOptions::default().compression_method(method)).unwrap();
        zip.write_all(bytes).unwrap();
    }
    zip.finish().unwrap();
}
/// A checkpoint of the given pickle and storages.
fn archive(path: &Path, pickle: &[u8], storages: &[(&str, &[u8])]) {
    let names: Vec<String> = storages.iter().map(|(key, _)| format!("x/data/{key}")).collect();
    let mut entries: Vec<(&str, &[u8])> = vec![("x/data.pkl", pickle)];
    entries.extend(names.iter().zip(storages).map(|(name, (_, bytes))| (name.as_str(), *bytes)));
    zipped(path, &entries, CompressionMethod::Stored);
}
/// A checkpoint of dense f64 tensors.
fn write(path: &Path, params: &Value, tensors: &[(String, Tensor)]) {
    let names: Vec<String> = tensors.iter().map(|(name, _)| format!("model.Default.{name}")).collect();
    let items = names.iter().zip(tensors).enumerate().map(|(key, (name, (_, t)))| {
        let shape: Vec<i64> = t.shape.iter().map(|&n| n as i64).collect();
        let mut stride = vec![1; shape.len()];
        (1..shape.len()).rev().for_each(|i| stride[i - 1] = stride[i] * shape[i]);
        let size = t.data.len() as i64;
        (name.as_str(), view("DoubleStorage", &key.to_string(), size, 0, &shape, &stride))
    });
    let pickle = root(pickled(params), &items.collect::<Vec<_>>());
    let storages: Vec<(String, Vec<u8>)> = tensors
        .iter()
        .enumerate()
        .map(|(key, (_, t))| (key.to_string(), t.data.iter().flat_map(|x| x.to_le_bytes()).collect()))
        .collect();
    let storages: Vec<(&str, &[u8])> = storages.iter().map(|(k, b)| (k.as_str(), b.as_slice())).collect();
    archive(path, &pickle, &storages);
}
fn all_tensors(checkpoint: &Checkpoint) -> Vec<(String, Tensor)> {
    let read = |name: &str| (name.to_string(), checkpoint.tensor(name).unwrap().unwrap());
    checkpoint.names().into_iter().map(read).collect()
}
/// Entries of a zip file.
fn entries(path: &Path) -> Vec<(String, Vec<u8>)> {
    let mut zip = zip::ZipArchive::new(Cursor::new(fs::read(path).unwrap())).unwrap();
    (0..zip.len())
        .map(|i| {
            let mut file = zip.by_index(i).unwrap();
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes).unwrap();
            (file.name().unwrap().to_string(), bytes)
        })
        .collect()
}
/// A copy of a committed file with its entries changed.
fn repacked(name: &str, to: &Path, method: CompressionMethod, change: impl Fn(&str, Vec<u8>) -> Vec<u8>) {
    let entries = entries(&data(name)).into_iter().map(|(name, bytes)| (name.clone(), change(&name, bytes)));
    let entries: Vec<(String, Vec<u8>)> = entries.collect();
    zipped(to, &entries.iter().map(|(n, b)| (n.as_str(), b.as_slice())).collect::<Vec<_>>(), method);
}

// ------------------------------------------------------------------------------------------------ good files

#[test]
fn every_dtype_is_read_as_torch_reads_it() {
    matches("dtypes.pt");
}

#[test]
fn views_of_shared_storages_and_parameters_are_made_dense() {
    matches("views.pt");
}

#[test]
fn bare_state_dicts_and_training_checkpoints_are_read() {
    matches("bare.pt");
    matches("training.pt");
}

#[test]
fn a_name_as_long_as_the_zip64_records_is_read() {
    matches("name_of_21_characters.pt");
}

#[test]
fn lora_factors_are_folded_with_their_scaling() {
    let name = "lora.pt";
    let checkpoint = Checkpoint::open(&data(name), None).unwrap();
    let expected = expected(name);
    let expected = expected.as_object().unwrap();
    assert_eq!(checkpoint.names(), expected.keys().map(String::as_str).collect::<Vec<_>>());
    for (key, value) in expected {
        let tensor = checkpoint.tensor(key).unwrap().unwrap();
        let numbers: Vec<f64> = serde_json::from_value(value["data"].clone()).unwrap();
        assert_eq!(tensor.data.len(), numbers.len());
        for (x, y) in tensor.data.iter().zip(numbers) {
            // Two products a sum: the orders of summation differ by a rounding of the largest term.
            assert!((x - y).abs() <= 1e-14, "{key}: {x} {y}");
        }
    }
    refused(&data("lora_lone_factor.pt"), &["tensor x.weight", "x.A_by_l", "x.B_by_l is missing"]);
    refused(&data("lora_wrong_shape.pt"), &["tensor x.weight", "[3, 2, 4]", "[3, 6, 2]", "[3, 4, 5]"]);
}

#[test]
fn versions_and_the_old_name_of_the_layers_are_understood() {
    let version = |name: &str| read_config(&Checkpoint::open(&data(name), None).unwrap()).unwrap();
    assert_eq!(version("version_11.pt").version, 1.1);
    assert_eq!(version("version_11.pt").mixing_layers, 4);
    let old = version("version_missing_so2_layers.pt");
    assert_eq!((old.version, old.mixing_layers), (1.0, 2));
}

#[test]
fn numbers_of_the_configuration_lose_nothing() {
    let checkpoint = Checkpoint::open(&data("numbers.pt"), None).unwrap();
    let (descriptor, numbers) = (&checkpoint.params()["descriptor"], &checkpoint.params()["numbers"]);
    assert_eq!(descriptor["seed"].as_u64(), Some(u64::MAX));
    assert_eq!(descriptor["rcut"].as_f64(), Some(0.1 + 0.2));
    assert_eq!(descriptor["eps"].as_f64(), Some(1e-7));
    assert_eq!(descriptor["exclude_types"], json!([[0, 1]]));
    assert_eq!(numbers["small"].as_f64(), Some(5e-324));
    assert_eq!(numbers["large"].as_f64(), Some(f64::MAX));
    assert_eq!(numbers["third"].as_f64(), Some(1.0 / 3.0));
    assert_eq!(numbers["int"].as_i64(), Some(i64::MIN));
    assert!(numbers["none"].is_null());
    // And through text and back, as `--json` writes it.
    let text = serde_json::to_string(checkpoint.params()).unwrap();
    assert_eq!(&serde_json::from_str::<Value>(&text).unwrap(), checkpoint.params());
}

#[test]
fn branches_are_chosen_by_name_or_alias() {
    let path = data("branches.pt");
    let open = |branch| Checkpoint::open(&path, Some(branch)).unwrap();
    for (asked, branch, channels) in [
        ("Omat24", "Omat24", 8),
        ("omat24", "Omat24", 8),
        ("materials", "Omat24", 8),
        ("MATERIALS", "Omat24", 8),
        ("Bulk", "Omat24", 8),
        ("SPICE", "SPICE", 16),
        ("Molecules", "SPICE", 16),
        ("bulk", "bulk", 32),
        ("BULK", "bulk", 32),
    ] {
        let checkpoint = open(asked);
        assert_eq!(checkpoint.branch(), branch, "{asked}");
        assert_eq!(checkpoint.branches(), ["Omat24", "SPICE", "bulk"]);
        assert_eq!(checkpoint.params()["descriptor"]["channels"], channels, "{asked}");
        assert_eq!(checkpoint.names(), ["a.weight"]);
        let numbers: Vec<f64> = serde_json::from_value(expected("branches.pt")[branch]["data"].clone()).unwrap();
        assert_eq!(checkpoint.tensor("a.weight").unwrap().unwrap().data, numbers, "{asked}");
    }
    let listing = "Omat24 (alias materials, Bulk); SPICE (alias molecules); bulk";
    for (branch, part) in [(None, "several models"), (Some("none"), "no branch or alias 'none'")] {
        let message = failure(&path, branch);
        assert!(message.contains(listing) && message.contains(part), "{message}");
        assert!(message.contains(&path.display().to_string()), "{message}");
    }
    assert_eq!(Checkpoint::open(&data("branches_default.pt"), None).unwrap().branch(), "second");
    assert_eq!(Checkpoint::open(&data("branches_default.pt"), Some("first")).unwrap().branch(), "first");
}

#[test]
fn a_single_model_is_the_branch_default() {
    for branch in [None, Some("Default"), Some("default")] {
        let checkpoint = Checkpoint::open(&data("bare.pt"), branch).unwrap();
        assert_eq!((checkpoint.branch(), checkpoint.branches()), ("Default", &["Default".to_string()][..]));
    }
    let message = failure(&data("bare.pt"), Some("other"));
    assert!(message.contains("one model only") && message.contains("'other'"), "{message}");
}

#[test]
fn reference_checkpoints_hold_what_torch_reads() {
    let Some(shared) = shared() else { return };
    let files = json_file("shared.json");
    let files = files.as_object().unwrap();
    assert!(files.len() > 40);
    for (file, expected) in files {
        let checkpoint = Checkpoint::open(&shared.join(file), None).unwrap();
        let names = checkpoint.names();
        assert_eq!(names.len() as u64, expected["tensors"].as_u64().unwrap(), "{file}");
        let mut digest = Sha256::new();
        for name in names {
            let tensor = checkpoint.tensor(name).unwrap().unwrap();
            assert_eq!(checkpoint.shape(name), Some(&tensor.shape[..]));
            tensor.data.iter().for_each(|x| digest.update(x.to_le_bytes()));
        }
        let digest: String = digest.finalize().iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(digest, expected["sha256"], "{file}");
        read_config(&checkpoint).unwrap();
    }
}

#[test]
fn the_digest_is_that_of_the_file() {
    let checkpoint = Checkpoint::open(&data("bare.pt"), None).unwrap();
    let digest = Sha256::digest(fs::read(data("bare.pt")).unwrap());
    assert_eq!(checkpoint.sha256().unwrap(), digest.iter().map(|b| format!("{b:02x}")).collect::<String>());
    assert_eq!(checkpoint.path(), data("bare.pt"));
}

// ------------------------------------------------------------------------------------------------- bad files

#[test]
fn other_kinds_of_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.pt");
    let hint = "the checkpoint (.pt) that `dp --pt train` writes";
    let file = |bytes: &[u8], parts: &[&str]| {
        fs::write(&path, bytes).unwrap();
        refused(&path, parts);
    };
    file(b"", &["is empty", "interrupted"]);
    file(b"ITEM: TIMESTEP\n0\n", &["text file", hint]);
    file("Kupfer für später, äöü".as_bytes(), &["text file", hint]);
    file(b"{\"model\": {}}", &["text file", hint]);
    file(b"\x89HDF\r\n\x1a\n\0\0\0\0", &["HDF5", hint]);
    file(b"\x40\0\0\0\0\0\0\0{\"a\":{\"dtype\":\"F32\"}}\0\0", &["safetensors", hint]);
    file(b"\x0a\x0f\x0a\x04main\x12\x07\xff\0\0\x01\x02\x80", &["TensorFlow", hint]);
    file(b"\x7fELF\x02\x01\x01\0\0\0\xff\xfe", &["not a torch checkpoint", "7f, 45, 4c, 46", hint]);
    file(b"P", &["text file"]);
    file(b"PK\x03\x04", &["cut short or damaged", "interrupted"]);
    file(b"PK\x05\x06\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", &["not a torch checkpoint", hint]);
    refused(folder.path(), &["is a directory", "give the .pt"]);
    refused(&folder.path().join("missing.pt"), &["cannot be opened"]);
    refused(&data("bad_torchscript.pth"), &["TorchScript", hint]);
    refused(&data("bad_legacy.pt"), &["before torch 1.6", "save it again", hint]);
    let zip = |names: &[&str], parts: &[&str]| {
        let entries: Vec<(&str, &[u8])> = names.iter().map(|&n| (n, b"x".as_slice())).collect();
        zipped(&path, &entries, CompressionMethod::Stored);
        refused(&path, parts);
    };
    zip(&["m/archive_format", "m/models/model.json"], &["(.pt2)", hint]);
    zip(&["m/data/aotinductor/model/x.so"], &["(.pt2)", hint]);
    zip(&["word/document.xml"], &["zip archive without data.pkl", "give the .pt"]);
    zip(&["m/code/__torch__.py", "m/data.pkl"], &["TorchScript", hint]);
}

#[test]
fn checkpoints_of_another_make_are_named() {
    refused(&data("bad_no_params.pt"), &["no model configuration", "_extra_state.model_params", "give the .pt"]);
    refused(&data("bad_not_a_dict.pt"), &["no model configuration"]);
    refused(&data("bad_no_tensors.pt"), &["no tensors of the branch Default", "model.Default."]);
    refused(&data("bad_complex.pt"), &["torch.ComplexFloatStorage"]);
    refused(&data("bad_class.pt"), &["random.Random", "nothing in a checkpoint is executed", "save it again"]);
}

#[test]
fn nothing_in_a_checkpoint_is_run() {
    // The pickle calls os.system("touch pwned").
    refused(&data("bad_command.pt"), &["posix.system", "nothing in a checkpoint is executed", "save it again"]);
    assert!(!Path::new("pwned").exists());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.pt");
    for (module, name) in [
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("os", "system"),
        ("torch._utils", "_rebuild_qtensor"),
        ("torch", "load"),
        ("torch.storage", "_load_from_bytes"),
        ("collections", "defaultdict"),
    ] {
        let pickle = format!("\x02c{module}\n{name}\n(U\x01xtR.").into_bytes();
        archive(&path, &[b"\x80".as_slice(), &pickle].concat(), &[]);
        refused(&path, &[&format!("{module}.{name}"), "executed"]);
    }
}

#[test]
fn weights_that_are_not_finite_are_refused() {
    for (file, found) in [("bad_nan.pt", "holds NaN at element 4"), ("bad_inf.pt", "holds -inf at element 4")] {
        refused(&data(file), &["tensor a.weight", found, "not finite", "diverging"]);
        // The others can be read: only what is asked for is looked at.
        assert!(Checkpoint::open(&data(file), None).unwrap().tensor("b.weight").unwrap().is_some());
    }
    refused(&data("bad_nan_option.pt"), &["model_params", "NaN is not finite"]);
}

#[test]
fn truncated_files_are_refused_at_every_length() {
    let whole = fs::read(data("views.pt")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cut.pt");
    for length in (0..whole.len()).step_by(7).chain([whole.len() - 1]) {
        fs::write(&path, &whole[..length]).unwrap();
        let parts: &[&str] = match length {
            0 => &["empty"],
            1..4 => &[],
            _ => &["cut short or damaged", "interrupted"],
        };
        refused(&path, parts);
    }
}

#[test]
fn storages_must_be_as_the_pickle_says() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.pt");
    repacked("bare.pt", &path, CompressionMethod::Stored, |_, bytes| bytes);
    assert!(Checkpoint::open(&path, None).is_ok());
    repacked("bare.pt", &path, CompressionMethod::Deflated, |_, bytes| bytes);
    refused(&path, &["is compressed", "data.pkl", "zip -0"]);
    repacked("bare.pt", &path, CompressionMethod::Stored, |name, bytes| {
        if name.ends_with("byteorder") { b"big".to_vec() } else { bytes }
    });
    refused(&path, &["byte order 'big'", "little-endian machine"]);
    repacked("bare.pt", &path, CompressionMethod::Stored, |name, bytes| {
        if name.ends_with("data/0") { bytes[..12].to_vec() } else { bytes }
    });
    refused(&path, &["tensor a.weight", "4 elements (F32)", "data/0 holds 12 bytes"]);
    let entries = entries(&data("bare.pt"));
    let kept = entries.iter().filter(|(name, _)| !name.ends_with("data/0"));
    zipped(&path, &kept.map(|(n, b)| (n.as_str(), b.as_slice())).collect::<Vec<_>>(), CompressionMethod::Stored);
    refused(&path, &["tensor a.weight", "data/0", "does not have", "cut"]);
}

#[test]
fn views_must_lie_inside_their_storage() {
    refused(&data("bad_expanded.pt"), &["tensor a.weight", "1000 elements in a storage of 1"]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.pt");
    let big = i64::MAX;
    let cases: &[(&[i64], &[i64], i64, &str)] = &[
        (&[2, 2], &[2, 1], 1, "reaches element 4 of a storage of 4"),
        (&[5], &[1], 0, "reaches element 4"),
        (&[2], &[1], big, "reaches element"),
        (&[2, 2, big], &[1, 1, 1], 0, "impossible shape"),
        (&[2, 3], &[big, big], 0, "impossible strides"),
        (&[2, 4], &[0, 1], 0, "8 elements in a storage of 4"),
        (&[-1], &[1], 0, "not described as torch does it"),
        (&[2], &[-1], 3, "not described as torch does it"),
        (&[2], &[1], -1, "not described as torch does it"),
        (&[2], &[1, 1], 0, "not described as torch does it"),
        (&[1; 17], &[1; 17], 0, "not described as torch does it"),
    ];
    for (shape, stride, offset, found) in cases {
        let tensor = view("FloatStorage", "0", 4, *offset, shape, stride);
        archive(&path, &root(pickled(&params()), &[("model.Default.a", tensor)]), &[("0", &[0; 16])]);
        refused(&path, &[found]);
    }
    // The same writer makes good files.
    let tensor = view("FloatStorage", "0", 4, 1, &[3], &[1]);
    archive(&path, &root(pickled(&params()), &[("model.Default.a", tensor)]), &[("0", &[0; 16])]);
    assert_eq!(Checkpoint::open(&path, None).unwrap().tensor("a").unwrap().unwrap().data, [0.0; 3]);
}

#[test]
fn configurations_that_hold_themselves_or_are_too_large_are_refused() {
    refused(&data("bad_self.pt"), &["model_params", "nested too deeply (or holds itself)"]);
    refused(&data("bad_deep.pt"), &["model_params", "nested too deeply"]);
    refused(&data("bad_laughs.pt"), &["model_params", "too large to be a configuration"]);
}

#[test]
fn small_files_cannot_stand_for_large_ones() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.pt");
    let started = Instant::now();
    let one = || view("FloatStorage", "0", 4, 0, &[4], &[1]);
    let storage: &[(&str, &[u8])] = &[("0", &[0; 16])];
    // Five million values, marks, members and memo slots.
    for opcodes in [&b"N"[..], b"(", b"h\0", b"q\0", b"]"] {
        let pickle = [b"\x80\x02Nq\0".to_vec(), opcodes.repeat(5_000_000), b".".to_vec()].concat();
        archive(&path, &pickle, &[]);
        refused(&path, &["more than 4000000 values"]);
    }
    // One megabyte of text a hundred thousand times: 100 GB of JSON.
    let long = [text(&"x".repeat(1 << 20)), b"q\x07".to_vec()].concat();
    let many = [b"](".to_vec(), long.clone(), b"h\x07".repeat(100_000), b"e".to_vec()].concat();
    let params_of = |value: Vec<u8>| dict(&[("type_map", value)]);
    archive(&path, &root(params_of(many), &[("model.Default.a", one())]), storage);
    refused(&path, &["model_params", "too large to be a configuration"]);
    // The same as keys.
    let keys = [b"}(".to_vec(), long, b"N".to_vec(), b"h\x07N".repeat(100_000), b"u".to_vec()].concat();
    archive(&path, &root(params_of(keys), &[("model.Default.a", one())]), storage);
    refused(&path, &["model_params", "too large to be a configuration"]);
    // A tensor name of a megabyte.
    let name = format!("model.Default.{}", "x".repeat(1 << 20));
    archive(&path, &root(pickled(&params()), &[(&name, one())]), storage);
    refused(&path, &["a tensor with a name of 1048576 characters"]);
    // One tensor under one name half a million times is one tensor.
    let pair = [text("model.Default.a"), b"q\x08".to_vec(), one(), b"q\x09".to_vec()].concat();
    let model = [b"}(".to_vec(), pair, b"h\x08h\x09".repeat(500_000)].concat();
    let extra = [text("_extra_state"), dict(&[("model_params", pickled(&params()))]), b"u".to_vec()].concat();
    let pickle = [b"\x80\x02}(".to_vec(), text("model"), model, extra, b"u.".to_vec()].concat();
    archive(&path, &pickle, storage);
    assert_eq!(Checkpoint::open(&path, None).unwrap().names(), ["a"]);
    assert!(started.elapsed() < Duration::from_secs(60), "{:?}", started.elapsed());
}

#[test]
fn damaged_pickles_say_where() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.pt");
    for (pickle, found) in [
        (&b""[..], "ends early, at byte 0"),
        (b"\x80\x02", "ends early, at byte 2"),
        (b"\x80\x09.", "protocol 9"),
        (b"\x80\x02.", "empty pickle stack"),
        (b"\x80\x02o.", "opcode 0x6f at byte 2"),
        (b"\x80\x02t.", "mark is missing"),
        (b"\x80\x02h\x05.", "memo 5 was never set"),
        (b"\x80\x02NNa.", "appends to something that is no list"),
        (b"\x80\x02NNNs.", "no dictionary"),
        (b"\x80\x02}(Nu.", "no dictionary"),
        (b"\x80\x02NN\x86R.", "empty pickle stack"),
        (b"\x80\x02NN\x85R.", "calls something that is no function"),
        (b"\x80\x02NNb.", "attributes of something that is no dictionary"),
        (b"\x80\x02NQ.", "not described as torch does it"),
        (b"\x80\x02X\xff\xff\xff\xffx.", "ends early"),
        (b"\x80\x02X\x01\0\0\0\xff.", "not UTF-8"),
        (b"\x80\x02\x8a\xff", "whole number of 255 bytes"),
        (b"\x80\x02](a.", "more than it has put"),
        (b"\x80\x02cos", "name does not end"),
        (b"\x80\x02ccollections\nOrderedDict\nN\x85R.", "arguments that torch does not give"),
    ] {
        archive(&path, pickle, &[]);
        refused(&path, &["cannot be read as a checkpoint", found]);
    }
}

// ------------------------------------------------------------------------------------------------------ fuzz

/// Opening and reading everything gives a result or an error, in bounded time, and never a panic.
fn survives(path: &Path) {
    let started = Instant::now();
    if let Ok(checkpoint) = Checkpoint::open(path, None) {
        let total: usize =
            checkpoint.names().iter().map(|n| checkpoint.shape(n).unwrap().iter().product::<usize>()).sum();
        assert!(total < 1_000_000);
        checkpoint.names().iter().for_each(|name| drop(checkpoint.tensor(name)));
        let _ = Model::from_checkpoint(&checkpoint);
    }
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
}

/// Pieces of pickles: an opcode that is allowed, with an argument.
fn opcode() -> impl Strategy<Value = Vec<u8>> {
    let plain = prop::sample::select(&b"}])N\x88\x89(t\x85\x86\x87aesubQR."[..]).prop_map(|b| vec![b]);
    let slot = (prop::sample::select(&b"qhK"[..]), 0..8u8).prop_map(|(op, n)| vec![op, n]);
    let number = any::<i64>().prop_map(integer);
    let word = prop::sample::select(
        &["model", "_extra_state", "model_params", "model_dict", "storage", "0", "model.Default.a", "descriptor"][..],
    );
    let global = prop::sample::select(
        &[
            "torch\nFloatStorage",
            "torch._utils\n_rebuild_tensor_v2",
            "torch._utils\n_rebuild_parameter",
            "collections\nOrderedDict",
        ][..],
    );
    prop_oneof![
        6 => plain,
        3 => slot,
        1 => number,
        2 => word.prop_map(text),
        1 => global.prop_map(|g| format!("c{g}\n").into_bytes()),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damaged_files_never_panic(
        cut in 0..60_000usize,
        flips in prop::collection::vec((any::<prop::sample::Index>(), 0..8u8), 0..12),
        file in prop::sample::select(&["tiny.pt", "views.pt", "lora.pt", "branches_default.pt", "training.pt"][..]),
    ) {
        let mut bytes = fs::read(data(file)).unwrap();
        for (at, bit) in flips {
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
        }
        // Most files stay whole, so that the damage is met behind the zip directory too.
        if cut < 20_000 {
            bytes.truncate(cut);
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.pt");
        fs::write(&path, bytes).unwrap();
        survives(&path);
    }

    #[test]
    fn damaged_pickles_never_panic(
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        file in prop::sample::select(&["tiny.pt", "views.pt", "lora.pt", "branches_default.pt", "training.pt"][..]),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.pt");
        repacked(file, &path, CompressionMethod::Stored, |name, mut bytes| {
            if name.ends_with("data.pkl") {
                for (at, byte) in &flips {
                    let at = at.index(bytes.len());
                    bytes[at] = *byte;
                }
            }
            bytes
        });
        survives(&path);
    }

    #[test]
    fn random_pickles_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.pt");
        archive(&path, &bytes, &[("0", &[0; 16])]);
        survives(&path);
    }

    #[test]
    fn random_opcodes_never_panic(pieces in prop::collection::vec(opcode(), 0..60)) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.pt");
        let pickle = [b"\x80\x02".to_vec(), pieces.concat(), b".".to_vec()].concat();
        archive(&path, &pickle, &[("0", &[0; 16])]);
        survives(&path);
    }
}

// ----------------------------------------------------------------------------------------------------- speed

/// A file of the size of the largest published model opens and gives all its tensors in well under a second:
///
///     cargo test --release --test checkpoint -- --ignored --nocapture large
#[test]
#[ignore = "writes 90 MB; a measurement for release builds"]
fn large_files_are_read_in_a_blink() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("large.pt");
    // 600 tensors of f32, as the largest model has, 90 MB in all.
    let (count, size) = (600usize, 37_500usize);
    let bytes: Vec<u8> = (0..size).flat_map(|i| (i as f32).sin().to_le_bytes()).collect();
    let names: Vec<String> = (0..count).map(|i| format!("model.Default.atomic_model.descriptor.t.{i}")).collect();
    let keys: Vec<String> = (0..count).map(|i| i.to_string()).collect();
    let items: Vec<(&str, Vec<u8>)> = names
        .iter()
        .zip(&keys)
        .map(|(name, key)| (name.as_str(), view("FloatStorage", key, size as i64, 0, &[size as i64], &[1])))
        .collect();
    let storages: Vec<(&str, &[u8])> = keys.iter().map(|key| (key.as_str(), bytes.as_slice())).collect();
    archive(&path, &root(pickled(&params()), &items), &storages);
    let started = Instant::now();
    let checkpoint = Checkpoint::open(&path, None).unwrap();
    let opened = started.elapsed();
    let sum: f64 = checkpoint.names().iter().map(|n| checkpoint.tensor(n).unwrap().unwrap().data[1]).sum();
    let read = started.elapsed();
    assert!((sum - 600.0 * f64::from(1f32.sin())).abs() < 1e-6);
    println!(
        "{} MB: opened in {opened:?}, all tensors read after {read:?}",
        path.metadata().unwrap().len() / 1_000_000
    );
    assert!(read < Duration::from_millis(500), "{read:?}");
}

// ------------------------------------------------------------------------------------------- tensors of models

#[test]
fn a_whole_model_is_typed_and_counted() {
    let model = Model::open(&data("tiny.pt"), None).unwrap();
    assert_eq!(model.parameters() as u64, expected("tiny.pt")["parameters"].as_u64().unwrap());
    assert_eq!(model.elements(), ["O", "H"]);
    assert_eq!(model.cutoff(), 4.0);
    assert_eq!(model.config().n_focus, 2);
}

/// Tensors without which energies are the same: version 1.0 is assumed, or nobody reads them.
const OPTIONAL: &[&str] = &["version_tensor", "out_std"];

#[test]
fn every_missing_tensor_and_wrong_shape_is_named() {
    let checkpoint = Checkpoint::open(&data("tiny.pt"), None).unwrap();
    let tensors = all_tensors(&checkpoint);
    assert!(tensors.len() > 40);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.pt");
    let error = |tensors: &[(String, Tensor)]| {
        write(&path, checkpoint.params(), tensors);
        Model::open(&path, None).map(drop).map_err(|e| e.to_string())
    };
    assert_eq!(error(&tensors), Ok(()));
    for (i, (name, tensor)) in tensors.iter().enumerate() {
        let optional = OPTIONAL.iter().any(|leaf| name.ends_with(leaf));
        let mut without = tensors.clone();
        without.remove(i);
        match error(&without) {
            Ok(()) => assert!(optional, "{name} can be left out"),
            Err(message) => {
                assert!(!optional, "{message}");
                let shape = format!("{:?}", tensor.shape);
                for part in [name.as_str(), "is missing", &shape, &path.display().to_string()] {
                    assert!(message.contains(part), "'{part}' is not in: {message}");
                }
            }
        }
        if optional {
            continue;
        }
        // One row more, and the axes the other way round.
        let mut longer = tensors.clone();
        let row: usize = tensor.shape[1..].iter().product();
        longer[i].1.shape[0] += 1;
        longer[i].1.data.extend(vec![0.0; row]);
        let message = error(&longer).unwrap_err();
        let shapes = [format!("{:?}", longer[i].1.shape), format!("{:?}", tensor.shape)];
        for part in [name.as_str(), &shapes[0], &shapes[1], "do not belong together"] {
            assert!(message.contains(part), "'{part}' is not in: {message}");
        }
        let mut turned = tensors.clone();
        turned[i].1.shape.reverse();
        if turned[i].1.shape != tensor.shape {
            assert!(error(&turned).unwrap_err().contains(name.as_str()));
        }
        let mut broken = tensors.clone();
        broken[i].1.data[0] = f64::NAN;
        // The last row of a type table is padding, but a file with a NaN is damaged all the same.
        let message = error(&broken).unwrap_err();
        assert!(message.contains(name.as_str()) && message.contains("holds NaN at element 0"), "{message}");
    }
    // Unknown tensors are no harm (SPEC section 1, rule 3).
    let mut more = tensors.clone();
    more.push(("atomic_model.descriptor._empty_tensor".into(), Tensor { shape: vec![0], data: vec![] }));
    more.push((
        "atomic_model.descriptor.blocks.0.so2_conv.coeff_index_m".into(),
        Tensor { shape: vec![1], data: vec![1.0] },
    ));
    assert_eq!(error(&more), Ok(()));
    assert_eq!(
        Model::open(&path, None).unwrap().parameters() as u64,
        expected("tiny.pt")["parameters"].as_u64().unwrap()
    );
}

#[test]
fn versions_of_the_descriptor_are_known_or_refused() {
    let checkpoint = Checkpoint::open(&data("tiny.pt"), None).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.pt");
    for (stored, known) in [(1.0, true), (1.1f32.into(), true), (1.2f32.into(), true), (1.3, false), (2.0, false)] {
        let mut tensors = all_tensors(&checkpoint);
        let version = tensors.iter_mut().find(|(name, _)| name.ends_with("version_tensor")).unwrap();
        version.1.data[0] = stored;
        write(&path, checkpoint.params(), &tensors);
        match Model::open(&path, None) {
            Ok(model) => assert!(known && (model.config().version - stored).abs() < 1e-6),
            Err(e) => {
                let message = e.to_string();
                assert!(!known && message.contains(&format!("version {stored} is not known")), "{message}");
            }
        }
    }
}

/// SPEC section 20: the counts of the published files.
#[test]
fn released_models_have_their_published_parameter_counts() {
    let Some(shared) = shared() else { return };
    for (file, count) in [("nano", 480_268), ("mini", 654_988), ("neo", 1_124_910)] {
        let model = Model::open(&shared.join(format!("refs/{file}/{file}_s1.pt")), None).unwrap();
        assert_eq!(model.parameters(), count, "{file}");
    }
}

/// The large architectures, made by `reference/make_ref.py --config configs/NAME.json --out $SEZM_REFS_EXTRA/NAME`.
#[test]
fn large_models_have_their_published_parameter_counts() {
    let Some(folder) = std::env::var_os("SEZM_REFS_EXTRA").map(PathBuf::from) else {
        eprintln!("SKIPPED: SEZM_REFS_EXTRA names no folder of full-size checkpoints");
        return;
    };
    for (name, count) in [
        ("mini_edgenorm_on", 655_084),
        ("neo_edgenorm_off", 1_124_686),
        ("air", 5_148_101),
        ("plus", 8_848_710),
        ("pro_mptrj_401", 22_678_990),
        ("paper_neo", 1_596_356),
        ("paper_pro", 20_906_830),
    ] {
        let path = folder.join(format!("{name}.pt"));
        if !path.exists() {
            eprintln!("SKIPPED: {} is missing", path.display());
            continue;
        }
        assert_eq!(Model::open(&path, None).unwrap().parameters(), count, "{name}");
    }
}
