//! NVRTC, opened at run time: a dozen functions of its C interface, and where to look for it.

use super::compiler::{Target, Version};
use super::program::Program;
use super::sources::HEADERS;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

type Handle = *mut c_void;

/// A loaded NVRTC. Its library is never unloaded.
#[derive(Debug, Clone)]
pub(super) struct Nvrtc {
    pub version: Version,
    pub path: String,
    /// Architectures that it compiles for, 10 x major + minor.
    pub known: Vec<i32>,
    api: Api,
}

#[derive(Debug, Clone, Copy)]
struct Api {
    create: unsafe extern "C" fn(
        *mut Handle,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    compile: unsafe extern "C" fn(Handle, c_int, *const *const c_char) -> c_int,
    destroy: unsafe extern "C" fn(*mut Handle) -> c_int,
    log: Output,
    cubin: Output,
    ptx: Output,
}

/// A pair of calls: the size of an output, and the output.
#[derive(Debug, Clone, Copy)]
struct Output {
    size: unsafe extern "C" fn(Handle, *mut usize) -> c_int,
    get: unsafe extern "C" fn(Handle, *mut c_char) -> c_int,
}

impl Nvrtc {
    /// Every NVRTC that loads, best first, opened one by one as they are asked for; and, for when there is none, a
    /// phrase that says where this looked. SEZM_NVRTC, when set, is the only place.
    pub(super) fn candidates() -> (Box<dyn Iterator<Item = Nvrtc>>, String) {
        if let Some(named) = std::env::var_os("SEZM_NVRTC").filter(|v| !v.is_empty()) {
            let named = PathBuf::from(named);
            let reason = format!("SEZM_NVRTC={} is no libnvrtc.so and holds none that loads", named.display());
            return (Box::new(in_folder(&named).into_iter()), reason);
        }
        let by_name = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
        let from_loader = by_name.into_iter().filter_map(|name| Nvrtc::open(Path::new(name)));
        let from_folders = folders().into_iter().flat_map(|folder| in_folder(&folder));
        let reason = "no libnvrtc.so.13 or .12 in the loader's path, CUDA installations or Python environments, \
                      and no nvcc";
        (Box::new(from_loader.chain(from_folders)), reason.into())
    }

    fn open(path: &Path) -> Option<Nvrtc> {
        // SAFETY: loads NVIDIA's library; its constructors have no preconditions.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.ok()?;
        // SAFETY: the signatures are those of nvrtc.h, the same from CUDA 11.2 to 13.
        let (api, version, known) = unsafe { read_api(&library) }?;
        std::mem::forget(library); // `api` points into it for ever
        Some(Nvrtc { version, path: path.display().to_string(), known, api })
    }

    /// Compiles a program: (image, log), or the log.
    pub(super) fn compile(
        &self,
        program: &Program,
        target: &Target,
        options: &[String],
    ) -> Result<(Vec<u8>, String), String> {
        let text = |s: &str| CString::new(s).map_err(|_| format!("a zero byte in the text of {}", program.name()));
        let all = |v: Vec<&str>| v.into_iter().map(text).collect::<Result<Vec<_>, _>>();
        let pointers = |v: &[CString]| v.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
        let (source, name) = (text(program.text())?, text(&format!("{}.cu", program.name()))?);
        let header_names = all(HEADERS.iter().map(|h| h.0).collect())?;
        let header_texts = all(HEADERS.iter().map(|h| h.1).collect())?;
        let architecture = format!("--gpu-architecture={}", target.name);
        let options = all([architecture.as_str()].into_iter().chain(options.iter().map(String::as_str)).collect())?;

        let mut handle = std::ptr::null_mut();
        // SAFETY: all strings end in zero and outlive the call, which copies them; counts match the arrays.
        let code = unsafe {
            (self.api.create)(
                &mut handle,
                source.as_ptr(),
                name.as_ptr(),
                HEADERS.len() as c_int,
                pointers(&header_texts).as_ptr(),
                pointers(&header_names).as_ptr(),
            )
        };
        if code != 0 {
            return Err(format!("nvrtcCreateProgram failed with code {code}"));
        }
        // SAFETY: `handle` is the program made above; options as the strings before.
        let code = unsafe { (self.api.compile)(handle, options.len() as c_int, pointers(&options).as_ptr()) };
        let log = self.api.log.read(handle).unwrap_or_default();
        let log = CStr::from_bytes_until_nul(&log).map_or_else(|_| String::new(), |s| s.to_string_lossy().into_owned());
        let output = if target.is_machine_code() { self.api.cubin } else { self.api.ptx };
        let image = if code == 0 { output.read(handle) } else { None };
        // SAFETY: destroyed once.
        unsafe { (self.api.destroy)(&mut handle) };
        match image {
            Some(image) if !image.is_empty() => Ok((image, log)),
            _ => Err(format!("{log}(NVRTC code {code})")),
        }
    }
}

impl Output {
    fn read(self, program: Handle) -> Option<Vec<u8>> {
        let mut size = 0;
        // SAFETY: `program` is live; the second call writes the `size` bytes that the first one names.
        unsafe {
            if (self.size)(program, &mut size) != 0 {
                return None;
            }
            let mut bytes = vec![0u8; size];
            ((self.get)(program, bytes.as_mut_ptr().cast()) == 0).then_some(bytes)
        }
    }
}

/// # Safety
/// `library` must be NVRTC.
unsafe fn read_api(library: &Library) -> Option<(Api, Version, Vec<i32>)> {
    macro_rules! symbol {
        ($name:literal) => {
            // SAFETY: the caller's promise; each field has the type that nvrtc.h declares.
            *unsafe { library.get($name) }.ok()?
        };
    }
    let api = Api {
        create: symbol!(b"nvrtcCreateProgram\0"),
        compile: symbol!(b"nvrtcCompileProgram\0"),
        destroy: symbol!(b"nvrtcDestroyProgram\0"),
        log: Output { size: symbol!(b"nvrtcGetProgramLogSize\0"), get: symbol!(b"nvrtcGetProgramLog\0") },
        cubin: Output { size: symbol!(b"nvrtcGetCUBINSize\0"), get: symbol!(b"nvrtcGetCUBIN\0") },
        ptx: Output { size: symbol!(b"nvrtcGetPTXSize\0"), get: symbol!(b"nvrtcGetPTX\0") },
    };
    let version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int = symbol!(b"nvrtcVersion\0");
    let count: unsafe extern "C" fn(*mut c_int) -> c_int = symbol!(b"nvrtcGetNumSupportedArchs\0");
    let list: unsafe extern "C" fn(*mut c_int) -> c_int = symbol!(b"nvrtcGetSupportedArchs\0");
    let (mut major, mut minor, mut n) = (0, 0, 0);
    // SAFETY: plain outputs; the list has the length that `count` names.
    unsafe {
        if version(&mut major, &mut minor) != 0 || count(&mut n) != 0 {
            return None;
        }
        let mut known = vec![0; n.max(0) as usize];
        (list(known.as_mut_ptr()) == 0).then_some((api, Version(major, minor), known))
    }
}

/// The NVRTCs in a folder, the newest first; or the one that the path names.
fn in_folder(path: &Path) -> Vec<Nvrtc> {
    let folder = if path.is_file() { path.parent().unwrap_or(Path::new(".")) } else { path };
    let mut libraries = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.contains(".alt.") {
            continue;
        }
        if name.starts_with("libnvrtc-builtins.so") {
            // libnvrtc looks for its builtins in the loader's path only, not beside itself.
            // SAFETY: loads NVIDIA's library; its constructors have no preconditions.
            if let Ok(builtins) = unsafe { Library::open(Some(entry.path()), RTLD_NOW | RTLD_LOCAL) } {
                std::mem::forget(builtins);
            }
        } else if name == "libnvrtc.so" || name.starts_with("libnvrtc.so.") {
            libraries.push(entry.path());
        }
    }
    if path.is_file() {
        libraries = vec![path.to_path_buf()];
    }
    libraries.sort();
    libraries.iter().rev().filter_map(|p| Nvrtc::open(p)).collect()
}

/// Roots of CUDA installations, named ones first.
pub(super) fn toolkit_roots() -> Vec<PathBuf> {
    let named = ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "CUDA_TOOLKIT_ROOT_DIR", "CONDA_PREFIX"];
    let mut roots: Vec<PathBuf> = named.iter().filter_map(std::env::var_os).map(PathBuf::from).collect();
    let beside_nvcc = path_folders().into_iter().filter(|d| d.join("nvcc").is_file());
    roots.extend(beside_nvcc.filter_map(|d| d.parent().map(Path::to_path_buf)));
    roots.extend(["/usr/local/cuda", "/opt/cuda"].map(PathBuf::from));
    roots
}

fn path_folders() -> Vec<PathBuf> {
    std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).collect()
}

/// Folders that may hold libnvrtc.so.
fn folders() -> Vec<PathBuf> {
    let mut all = Vec::new();
    for root in toolkit_roots() {
        all.extend(["lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib", "lib"].map(|l| root.join(l)));
    }
    // The wheels nvidia-cuda-nvrtc (13) and nvidia-cuda-nvrtc-cu12, in the environments of the pythons on the path.
    let pythons = path_folders().into_iter().filter(|d| d.join("python3").exists());
    let mut environments: Vec<PathBuf> = std::env::var_os("VIRTUAL_ENV").map(PathBuf::from).into_iter().collect();
    environments.extend(pythons.filter_map(|d| d.parent().map(Path::to_path_buf)));
    for environment in environments {
        for library in std::fs::read_dir(environment.join("lib")).into_iter().flatten().flatten() {
            if !library.file_name().to_string_lossy().starts_with("python3") {
                continue;
            }
            for packages in ["site-packages", "dist-packages"] {
                let nvidia = library.path().join(packages).join("nvidia");
                all.extend(["cu13/lib", "cuda_nvrtc/lib"].map(|l| nvidia.join(l)));
            }
        }
    }
    all
}
