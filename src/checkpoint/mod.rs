//! Bytes -> named tensors + configuration: the `.pt` file that `dp --pt train` writes (SPEC section 1).
//!
//! The file is mapped, not read: opening it costs the pickle's directory, and a tensor costs its own bytes.

mod archive;
mod lora;
mod pickle;
mod tensor;

use crate::{Error, Result};
use archive::Archive;
use pickle::{Id, Pickle, TensorRef, Value};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
pub use tensor::Tensor;

/// Longest name of a tensor; longer ones are not of a model.
const MAX_NAME: usize = 512;
/// Name of the only branch of a single-task file.
const DEFAULT_BRANCH: &str = "Default";

/// An opened checkpoint: the configuration and a directory of tensors of one branch.
///
/// Names are relative to the branch: `model.Default.atomic_model.out_bias` is `atomic_model.out_bias` here.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    archive: Archive,
    branch: String,
    branches: Vec<String>,
    params: serde_json::Value,
    entries: Vec<Entry>,
    index: HashMap<String, usize>,
}

#[derive(Debug)]
struct Entry {
    name: String,
    shape: Vec<usize>,
    view: View,
}

/// A [`TensorRef`] that may cross threads.
#[derive(Debug)]
struct View {
    kind: String,
    key: String,
    storage_len: u64,
    offset: u64,
    stride: Vec<u64>,
}

impl Checkpoint {
    /// Opens `path`; `branch` chooses the model of a multi-task file (a branch name or an alias).
    ///
    /// Errors: `Io`; `Format` for what is no checkpoint of this kind, damaged, or ambiguous about its branch.
    pub fn open(path: &Path, branch: Option<&str>) -> Result<Self> {
        let archive = Archive::open(path)?;
        let damaged = |reason: String| Error::format(path, reason);
        let bytes = archive.verified("data.pkl").map_err(damaged)?;
        let pickle = Pickle::read(bytes).map_err(|e| damaged(format!("cannot be read as a checkpoint: {e}")))?;
        let root = pickle.root();
        let state = pickle.get(root, "model").unwrap_or(root);
        let no_params = || {
            damaged(
                "holds no model configuration (_extra_state.model_params): it is not a checkpoint of `dp --pt train`; \
                 give the .pt file that the training wrote"
                    .into(),
            )
        };
        let extra = pickle.get(state, "_extra_state").ok_or_else(no_params)?;
        let params = pickle.get(extra, "model_params").ok_or_else(no_params)?;
        let params = pickle.json(params).map_err(|e| damaged(format!("model_params: {e}")))?;
        let (branch, branches, params) = choose_branch(path, params, branch)?;
        let prefix = format!("model.{branch}.");
        let mut entries: Vec<Entry> = Vec::new();
        let mut index = HashMap::new();
        for &(key, value) in pickle.items(state) {
            let Some(name) = pickle.text(key).and_then(|k| k.strip_prefix(&prefix)) else { continue };
            if name.len() > MAX_NAME {
                return Err(damaged(format!("holds a tensor with a name of {} characters", name.len())));
            }
            let Some(entry) = entry(path, &archive, &pickle, name, value)? else { continue };
            // As in Python the last of equal keys counts.
            match index.entry(name.to_string()) {
                std::collections::hash_map::Entry::Occupied(at) => entries[*at.get()] = entry,
                std::collections::hash_map::Entry::Vacant(slot) => {
                    slot.insert(entries.len());
                    entries.push(entry);
                }
            }
        }
        if entries.is_empty() {
            return Err(damaged(format!("holds no tensors of the branch {branch} (names that begin with {prefix})")));
        }
        Ok(Checkpoint { path: path.to_path_buf(), archive, branch, branches, params, entries, index })
    }
    /// The file this checkpoint was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }
    /// The chosen branch; `Default` in a single-task file.
    pub fn branch(&self) -> &str {
        &self.branch
    }
    /// All branches of the file.
    pub fn branches(&self) -> &[String] {
        &self.branches
    }
    /// The model JSON of the chosen branch (`descriptor`, `fitting_net`, `type_map`, ...), SPEC section 20.1.
    pub fn params(&self) -> &serde_json::Value {
        &self.params
    }
    /// Names of the tensors of the branch, in file order; LoRA factors and scalings, which are folded into their
    /// weights, left out.
    pub fn names(&self) -> Vec<&str> {
        let folded = |name: &str| {
            lora::is_scaling(name) || lora::target(name).is_some_and(|weight| self.index.contains_key(&weight))
        };
        self.entries.iter().map(|e| e.name.as_str()).filter(|name| !folded(name)).collect()
    }
    /// Shape of a tensor without reading it; `None` if there is none of this name.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.index.get(name).map(|&i| &self.entries[i].shape[..])
    }
    /// Reads a tensor (LoRA folded, SPEC section 15); `Ok(None)` if there is none of this name.
    /// Errors: `Format` for a damaged storage, a value that is not finite, LoRA factors that do not fit.
    pub fn tensor(&self, name: &str) -> Result<Option<Tensor>> {
        let Some(mut tensor) = self.stored(name)? else { return Ok(None) };
        let Some([a, b, scaling]) = lora::factors(name) else { return Ok(Some(tensor)) };
        let wrong = |reason: String| Error::format(&self.path, format!("tensor {name}: {reason}"));
        match (self.stored(&a)?, self.stored(&b)?) {
            (None, None) => {}
            (Some(a), Some(b)) => {
                let scaling = self.stored(&scaling)?.and_then(|t| t.data.first().copied()).unwrap_or(1.0);
                lora::fold(&mut tensor, &a, &b, scaling).map_err(wrong)?;
            }
            (found, _) => {
                let (found, missing) = if found.is_some() { (a, b) } else { (b, a) };
                return Err(wrong(format!("has the LoRA factor {found} but {missing} is missing; was the file cut?")));
            }
        }
        Ok(Some(tensor))
    }
    /// SHA-256 of the file, hexadecimal.
    pub fn sha256(&self) -> Result<String> {
        Ok(Sha256::digest(self.archive.bytes()).iter().map(|b| format!("{b:02x}")).collect())
    }

    /// A tensor as the file holds it.
    fn stored(&self, name: &str) -> Result<Option<Tensor>> {
        let Some(&i) = self.index.get(name) else { return Ok(None) };
        let entry = &self.entries[i];
        let wrong = |reason: String| Error::format(&self.path, format!("tensor {name} {reason}"));
        let view = entry.view.tensor_ref(&entry.shape);
        let bytes = self.archive.verified(&format!("data/{}", view.key)).map_err(wrong)?;
        let tensor = tensor::read(&view, bytes).map_err(wrong)?;
        if let Some(at) = tensor.data.iter().position(|x| !x.is_finite()) {
            return Err(wrong(format!(
                "holds {} at element {at}: the weights are not finite; was the training diverging?",
                tensor.data[at]
            )));
        }
        Ok(Some(tensor))
    }
}

impl View {
    fn tensor_ref(&self, shape: &[usize]) -> TensorRef {
        TensorRef {
            kind: self.kind.as_str().into(),
            key: self.key.as_str().into(),
            storage_len: self.storage_len,
            offset: self.offset,
            shape: shape.iter().map(|&s| s as u64).collect(),
            stride: self.stride.clone(),
        }
    }
}

/// A tensor of the state dictionary, checked against its storage; `None` for what is no tensor.
fn entry(path: &Path, archive: &Archive, pickle: &Pickle, name: &str, value: Id) -> Result<Option<Entry>> {
    let Value::Tensor(t) = pickle.value(value) else { return Ok(None) };
    let wrong = |reason: String| Error::format(path, format!("tensor {name} {reason}"));
    let storage = format!("data/{}", t.key);
    let bytes = archive
        .entry(&storage)
        .ok_or_else(|| wrong(format!("points to {storage}, which the archive does not have; was the file cut?")))?;
    tensor::check_view(t, bytes.len()).map_err(wrong)?;
    Ok(Some(Entry {
        name: name.to_string(),
        shape: t.shape.iter().map(|&s| s as usize).collect(),
        view: View {
            kind: t.kind.to_string(),
            key: t.key.to_string(),
            storage_len: t.storage_len,
            offset: t.offset,
            stride: t.stride.clone(),
        },
    }))
}

/// (branch, all branches, parameters of the branch).
fn choose_branch(
    path: &Path,
    mut params: serde_json::Value,
    wanted: Option<&str>,
) -> Result<(String, Vec<String>, serde_json::Value)> {
    let Some(dict) = params.get_mut("model_dict").map(serde_json::Value::take) else {
        return match wanted {
            None => Ok((DEFAULT_BRANCH.into(), vec![DEFAULT_BRANCH.into()], params)),
            Some(name) if name.eq_ignore_ascii_case(DEFAULT_BRANCH) => choose_branch(path, params, None),
            Some(other) => Err(Error::format(
                path,
                format!("has one model only, so there is no branch '{other}'; leave the branch out"),
            )),
        };
    };
    let serde_json::Value::Object(mut dict) = dict else {
        return Err(Error::format(path, "model_dict of the configuration is no dictionary"));
    };
    let aliases = |params: &serde_json::Value| -> Vec<String> {
        let list = params.get("model_branch_alias").and_then(|a| a.as_array());
        list.into_iter().flatten().filter_map(|a| a.as_str().map(str::to_string)).collect()
    };
    let listing = dict.iter().map(|(name, params)| match &aliases(params)[..] {
        [] => name.clone(),
        alias => format!("{name} (alias {})", alias.join(", ")),
    });
    let listing = listing.collect::<Vec<_>>().join("; ");
    // A file may name the branch to take unasked by the alias `Default`.
    let asked = wanted.unwrap_or(DEFAULT_BRANCH);
    let known: Vec<(String, String)> = dict
        .keys()
        .map(|name| (name.clone(), name.clone()))
        .chain(dict.iter().flat_map(|(name, params)| aliases(params).into_iter().map(|alias| (alias, name.clone()))))
        .collect();
    // The exact word first; names before aliases, as they stand in the list.
    let exact = known.iter().find(|(word, _)| word == asked);
    let found = exact.or_else(|| known.iter().find(|(word, _)| wanted.is_some() && word.eq_ignore_ascii_case(asked)));
    let Some(name) = found.map(|(_, name)| name.clone()) else {
        let reason = match wanted {
            None => format!("holds several models; choose one with the branch option: {listing}"),
            Some(other) => format!("has no branch or alias '{other}'; it has: {listing}"),
        };
        return Err(Error::format(path, reason));
    };
    let branches = dict.keys().cloned().collect();
    let params = dict.remove(&name).unwrap_or_default();
    Ok((name, branches, params))
}
