//! The `sezm` program: info, eval.
