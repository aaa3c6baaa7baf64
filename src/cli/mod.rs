//! The `sezm` program: `info` says what a checkpoint is, `eval` evaluates structures.

mod eval;
mod info;
pub mod xyz;

use crate::{Error, Result};
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

const EXIT_CODES: &str = "\
Exit status:
  0  done
  1  a failure that is none of these
  2  wrong use: unknown command, option or device
  3  bad input: a model or structure file that is missing, damaged or cannot be evaluated
  4  the model uses an option that this version does not evaluate
  5  a device that is missing, failed or has too little memory";

/// DeePMD-kit's SeZM / DPA4 interatomic potential: look into checkpoints, evaluate structures.
#[derive(Debug, Parser)]
#[command(name = "sezm", version, after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Architecture, options, elements and checksum of a checkpoint, and what of it can be evaluated where
    #[command(after_help = EXIT_CODES)]
    Info(InfoArgs),
    /// Energy, forces and virials of the structures in an extended XYZ file
    #[command(after_help = EXIT_CODES)]
    Eval(EvalArgs),
}

#[derive(Debug, Args)]
struct InfoArgs {
    /// Checkpoint (.pt) as `dp --pt train` writes it
    model: PathBuf,
    /// Model of a multi-task checkpoint: a branch name or an alias
    #[arg(long)]
    branch: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct EvalArgs {
    /// Checkpoint (.pt) as `dp --pt train` writes it
    model: PathBuf,
    /// Structures in extended XYZ, Å; one or more frames, each with `Lattice`, `pbc` and `Properties` as it needs
    structure: PathBuf,
    /// Arithmetic of the evaluation; sums of energies, forces and virials are always in f64
    #[arg(long, value_enum, default_value_t = Precision::Fp32)]
    precision: Precision,
    /// auto, cpu, gpu, gpu:N or cuda:N
    #[arg(long, default_value = "auto")]
    device: String,
    /// Model of a multi-task checkpoint: a branch name or an alias
    #[arg(long)]
    branch: Option<String>,
    /// Also give the descriptor of each atom (in JSON only)
    #[arg(long, requires = "json")]
    descriptor: bool,
    /// Write JSON to FILE, or to standard output with `-`; every number reads back as the same double
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Precision {
    Fp32,
    Fp64,
}

/// Runs the program on the arguments of the process.
pub fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Info(args) => info::run(&args),
        Command::Eval(args) => eval::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("sezm: error: {error}");
            exit_code(&error)
        }
    }
}

fn exit_code(error: &Error) -> ExitCode {
    ExitCode::from(match error {
        Error::Exchange(_) | Error::Internal(_) => 1,
        Error::Argument(_) => 2,
        Error::Io { .. } | Error::Format { .. } | Error::Structure(_) => 3,
        Error::Unsupported(_) => 4,
        Error::Device(_) | Error::OutOfMemory(_) => 5,
    })
}

/// Writes to standard output; a reader that has gone away (`| head`) is no error.
fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(Error::io("standard output".as_ref(), e)),
        _ => Ok(()),
    }
}

/// Indented JSON with a newline at the end.
fn pretty(value: &serde_json::Value) -> String {
    format!("{value:#}\n")
}
