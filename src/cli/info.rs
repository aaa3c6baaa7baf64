//! `sezm info`: what a checkpoint is, and what of it can be evaluated where. Also answers for models that are refused.

use super::{InfoArgs, pretty, print};
use crate::checkpoint::Checkpoint;
use crate::engine::{self, Precision};
use crate::model::{self, Model};
use crate::{Error, Result};
use serde_json::{Value, json};
use std::fmt::Write;

/// Engines that may be asked for.
const DEVICES: [&str; 2] = ["cpu", "gpu"];

pub fn run(args: &InfoArgs) -> Result<()> {
    let report = report(&Checkpoint::open(&args.model, args.branch.as_deref())?)?;
    if args.json {
        return print(&pretty(&report));
    }
    print(&text(&report))
}

/// Everything that is printed, as JSON.
fn report(checkpoint: &Checkpoint) -> Result<Value> {
    let config = model::read_config(checkpoint)?;
    let parameters = model::count_parameters(checkpoint);
    let refused = config.unsupported();
    let options = serde_json::to_value(&config).map_err(|e| Error::Internal(format!("options as JSON: {e}")))?;
    Ok(json!({
        "file": checkpoint.path().display().to_string(),
        "sha256": checkpoint.sha256()?,
        "branch": checkpoint.branch(),
        "branches": checkpoint.branches(),
        "architecture": model::architecture(&config, parameters),
        "parameters": parameters,
        "descriptor_version": config.version,
        "cutoff": config.rcut,
        "elements": config.type_map,
        "refused": refused,
        "engines": engines(checkpoint, &refused)?,
        "options": options,
        "configuration": checkpoint.params(),
    }))
}

/// For each device: the engines that evaluate this model here, or why there is none.
fn engines(checkpoint: &Checkpoint, refused: &[String]) -> Result<Value> {
    if !refused.is_empty() {
        let reason = format!("does not evaluate {}", refused.join(", "));
        return Ok(DEVICES.iter().map(|&d| (d.to_string(), json!({"supported": false, "reason": reason}))).collect());
    }
    let model = Model::from_checkpoint(checkpoint)?;
    let device = |name: &str| match engine::create(&model, Precision::Fp32, name) {
        Ok(engine) => json!({"supported": true, "engine": engine.describe()}),
        Err(e) => json!({"supported": false, "reason": e.to_string()}),
    };
    Ok(DEVICES.iter().map(|&d| (d.to_string(), device(d))).collect())
}

/// The report for people.
fn text(report: &Value) -> String {
    let words = |key: &str| -> String {
        let list = report[key].as_array().map(Vec::as_slice).unwrap_or_default();
        list.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" ")
    };
    let word = |key: &str| report[key].as_str().map_or_else(|| report[key].to_string(), str::to_string);
    let mut out = String::new();
    // Writing to a string cannot fail.
    let mut line = |name: &str, value: &str| {
        let _ = writeln!(out, "{name:22}{value}");
    };
    line("file", &word("file"));
    line("sha256", &word("sha256"));
    line("branch", &format!("{} (of {})", word("branch"), words("branches")));
    line("architecture", &word("architecture"));
    line("parameters", &word("parameters"));
    line("descriptor version", &word("descriptor_version"));
    line("cutoff", &format!("{} Å", word("cutoff")));
    line("elements", &words("elements"));
    for device in DEVICES {
        let entry = &report["engines"][device];
        let (answer, why) = match entry["supported"].as_bool() {
            Some(true) => ("yes", &entry["engine"]),
            _ => ("no", &entry["reason"]),
        };
        line(&format!("evaluated on {device}"), &format!("{answer}: {}", why.as_str().unwrap_or_default()));
    }
    line("options", "");
    for (name, value) in report["options"].as_object().into_iter().flatten() {
        if name != "type_map" {
            line(&format!("  {name}"), &value.to_string());
        }
    }
    out
}
