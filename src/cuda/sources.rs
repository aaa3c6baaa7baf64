//! The kernel files, embedded: the library carries the text that it compiles.

/// One kernel file: a program of its own.
#[derive(Debug, PartialEq, Eq)]
pub struct Source {
    /// The stage, and the file `kernels/NAME.cu`.
    pub name: &'static str,
    /// CUDA C++.
    pub text: &'static str,
    /// The `extern "C"` kernels that it defines.
    pub kernels: &'static [&'static str],
}

macro_rules! file {
    ($name:literal) => {
        include_str!(concat!("../../kernels/", $name))
    };
}

/// What kernel files may include: (name, text).
pub const HEADERS: &[(&str, &str)] = &[
    ("common.cuh", file!("common.cuh")),
    ("prims.cuh", file!("prims.cuh")),
    ("wgmma.cuh", file!("wgmma.cuh")),
    ("wigner.cuh", file!("wigner.cuh")),
];

/// Stage `wigner`.
pub static WIGNER: Source = Source { name: "wigner", text: file!("wigner.cu"), kernels: &["wigner_assemble"] };

/// Every kernel file.
pub static ALL: &[&Source] = &[&WIGNER];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_is_listed() {
        for source in ALL {
            let defined: Vec<&str> = source
                .text
                .split("extern \"C\" __global__")
                .skip(1)
                .filter_map(|after| {
                    // The name is the last word before the parameter list, which launch bounds may precede.
                    let start = after.find("void").map(|i| &after[i..])?;
                    let start = match start.find("__launch_bounds__") {
                        Some(i) if i < start.find('{')? => &start[i + start[i..].find(')')? + 1..],
                        _ => &start[4..],
                    };
                    start.split('(').next().map(str::trim)
                })
                .collect();
            assert_eq!(defined, source.kernels, "kernels/{}.cu", source.name);
        }
    }
}
