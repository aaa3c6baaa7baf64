//! The `sezm` program; all of it is in `sezm::cli`.

fn main() -> std::process::ExitCode {
    sezm::cli::main()
}
