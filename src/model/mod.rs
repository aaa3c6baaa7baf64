//! Configuration + tensors -> typed, shape-checked parameters. The only place that knows tensor names.

pub mod config;
pub mod merge;
pub mod parameters;
mod read;

use crate::checkpoint::Checkpoint;
use crate::{Error, Result};
pub use config::Config;
pub use parameters::Parameters;
use std::path::Path;

/// A model ready to be evaluated.
#[derive(Debug, Clone)]
pub struct Model {
    config: Config,
    weights: Parameters<f64>,
    parameters: usize,
    architecture: String,
}

impl Model {
    /// Reads and checks a checkpoint; `branch` chooses the model of a multi-task file.
    pub fn open(path: &Path, branch: Option<&str>) -> Result<Self> {
        Self::from_checkpoint(&Checkpoint::open(path, branch)?)
    }
    /// Types the tensors of a checkpoint. Errors: `Format` for a missing tensor or a wrong shape; `Unsupported`, by
    /// name, for an unknown value of a known option and for an option that no engine evaluates.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Self> {
        let config = read_config(checkpoint)?;
        let refused = config.unsupported();
        if !refused.is_empty() {
            return Err(Error::Unsupported(format!(
                "{}: the model uses options that this version of sezm does not evaluate: {}",
                checkpoint.path().display(),
                refused.join(", ")
            )));
        }
        let weights = read::parameters(checkpoint, &config)?;
        let parameters = read::count_parameters(checkpoint);
        let architecture = architecture(&config, parameters);
        Ok(Model { config, weights, parameters, architecture })
    }
    /// Every option of the model.
    pub fn config(&self) -> &Config {
        &self.config
    }
    /// The weights in f64.
    pub fn weights(&self) -> &Parameters<f64> {
        &self.weights
    }
    /// Element symbols in the order of the model's types.
    pub fn elements(&self) -> &[String] {
        &self.config.type_map
    }
    /// Cutoff radius, Å.
    pub fn cutoff(&self) -> f64 {
        self.config.rcut
    }
    /// Trainable parameters.
    pub fn parameters(&self) -> usize {
        self.parameters
    }
    /// One line for people: degrees, channels, blocks, layers, focuses, parameters.
    pub fn architecture(&self) -> &str {
        &self.architecture
    }
    /// Unordered type pairs between which there are no edges (SPEC section 2).
    pub fn excluded_pairs(&self) -> &[(u32, u32)] {
        &self.config.exclude_types
    }
}

/// The options of a checkpoint, whether they are evaluated or not. Errors name the file and the option.
pub fn read_config(checkpoint: &Checkpoint) -> Result<Config> {
    let version = match checkpoint.tensor("atomic_model.descriptor.version_tensor")? {
        // One decimal: a file stored in f32 holds 1.10000002.
        Some(tensor) => (tensor.data.first().copied().unwrap_or(1.0) * 10.0).round() / 10.0,
        None => 1.0,
    };
    Config::from_json(checkpoint.params(), version).map_err(|e| match e {
        Error::Unsupported(reason) => Error::Unsupported(format!("{}: {reason}", checkpoint.path().display())),
        other => other,
    })
}

/// Trainable parameters of a checkpoint, whether its options are evaluated or not.
pub fn count_parameters(checkpoint: &Checkpoint) -> usize {
    read::count_parameters(checkpoint)
}

/// One line for people.
pub fn architecture(config: &Config, parameters: usize) -> String {
    let degrees: Vec<String> = config.blocks.iter().map(|b| b.l.to_string()).collect();
    let degrees = match degrees.first() {
        None => format!("lmax {}", config.lmax),
        Some(first) if degrees.iter().all(|d| d == first) => format!("lmax {first}"),
        Some(_) => format!("degrees {}", degrees.join("-")),
    };
    format!(
        "DPA4 (SeZM) version {}: {degrees}, {} channels, {} blocks x {} layers, {} focus{}, {} head{}, {parameters} parameters",
        config.version,
        config.channels,
        config.blocks.len(),
        config.mixing_layers,
        config.n_focus,
        if config.n_focus == 1 { "" } else { "es" },
        config.n_atten_head,
        if config.n_atten_head == 1 { "" } else { "s" },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn line(descriptor: serde_json::Value) -> String {
        let params = json!({"type_map": ["O"], "descriptor": descriptor, "fitting_net": {}});
        architecture(&Config::from_json(&params, 1.1).unwrap(), 1234)
    }

    #[test]
    fn the_architecture_is_told_in_one_line() {
        let expected =
            "DPA4 (SeZM) version 1.1: lmax 3, 64 channels, 3 blocks x 4 layers, 1 focus, 1 head, 1234 parameters";
        assert_eq!(line(json!({})), expected);
        let schedule = line(json!({"l_schedule": [4, 4, 2], "n_focus": 2, "n_atten_head": 4}));
        assert!(schedule.contains("degrees 4-4-2, 64 channels, 3 blocks"), "{schedule}");
        assert!(schedule.contains("2 focuses, 4 heads"), "{schedule}");
        assert!(line(json!({"n_blocks": 0, "lmax": 2})).contains("lmax 2, 64 channels, 0 blocks"));
    }

    #[test]
    fn a_checkpoint_becomes_a_model_or_an_error_that_names_the_file() {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/checkpoint");
        let model = Model::open(&data.join("tiny.pt"), None).unwrap();
        assert_eq!((model.elements(), model.cutoff()), (&["O".to_string(), "H".to_string()][..], 4.0));
        assert!(model.excluded_pairs().is_empty());
        assert!(model.architecture().contains("lmax 1, 4 channels, 1 blocks x 2 layers, 2 focuses"));
        let message = Model::open(&data.join("bare.pt"), None).unwrap_err().to_string();
        assert!(message.contains("bare.pt: tensor ") && message.contains("is missing"), "{message}");
        // Options that no engine evaluates are refused before a tensor is read, all of them by name.
        let path = data.join("unsupported.pt");
        let message = Model::open(&path, None).unwrap_err().to_string();
        for part in ["unsupported.pt", "does not evaluate", "mlp_bias: true", "layer_scale: true", "bridging_method"] {
            assert!(message.contains(part), "{message}");
        }
        let message = Model::open(&data.join("unknown_value.pt"), None).unwrap_err().to_string();
        assert!(message.contains("unknown_value.pt") && message.contains("descriptor.basis_type"), "{message}");
        assert!(message.contains("found gaussian/fix, expected bessel or gaussian"), "{message}");
    }
}
