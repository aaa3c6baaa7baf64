//! Compiled kernels on disk, so that only the first run on a kind of GPU compiles.
//!
//! A file holds the whole text that made the image (the key) and a digest of the image; both are compared, so neither
//! a collision of file names nor a damaged file gives a wrong kernel. Files are written aside and renamed: readers
//! and other ranks see a whole file or none.

use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

/// First bytes of every file; a change of the layout changes them.
const MAGIC: &[u8; 16] = b"sezm kernel 1\n\0\0";

/// A folder of compiled kernels, or none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cache {
    folder: Option<PathBuf>,
}

/// What makes an image: all text and options, and the GPU. The compiler's version is no part of it, so that a
/// machine without a compiler can use what another one built.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Key {
    name: String,
    text: String,
}

impl Key {
    /// `name` begins the file name; `text` is what is compared.
    pub(super) fn new(name: String, text: String) -> Self {
        Key { name, text }
    }
    fn file_name(&self) -> String {
        let digest = Sha256::digest(&self.text);
        let short: String = digest[..12].iter().map(|b| format!("{b:02x}")).collect();
        format!("{}-{short}.bin", self.name)
    }
}

impl Cache {
    /// SEZM_CACHE_DIR (empty: no cache), else XDG_CACHE_HOME/sezm, else ~/.cache/sezm.
    pub fn from_environment() -> Self {
        let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let folder = match std::env::var_os("SEZM_CACHE_DIR") {
            Some(_) => set("SEZM_CACHE_DIR"),
            None => set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|h| h.join(".cache"))).map(|d| d.join("sezm")),
        };
        Cache { folder }
    }
    /// A cache in `folder`, which is made when something is stored.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Cache { folder: Some(folder.into()) }
    }
    /// Finds nothing and keeps nothing.
    pub fn disabled() -> Self {
        Cache { folder: None }
    }
    /// Where it is.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// The image of `key`; none when there is no file, or one that is damaged or made from other text.
    pub(super) fn load(&self, key: &Key) -> Option<Vec<u8>> {
        let bytes = std::fs::read(self.folder.as_ref()?.join(key.file_name())).ok()?;
        unpack(&bytes, key).map(<[u8]>::to_vec)
    }

    /// Keeps an image. A cache that cannot be written costs compile time, not the run: it is logged once.
    pub(super) fn store(&self, key: &Key, image: &[u8]) {
        static WARNED: Once = Once::new();
        let Some(folder) = &self.folder else { return };
        if let Err(e) = write_aside(folder, &key.file_name(), &pack(key, image)) {
            WARNED.call_once(|| {
                log::warn!(
                    "{}: compiled kernels cannot be kept ({e}); set SEZM_CACHE_DIR to a folder that can be written",
                    folder.display()
                );
            });
        }
    }
}

fn pack(key: &Key, image: &[u8]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend((key.text.len() as u64).to_le_bytes());
    bytes.extend(key.text.as_bytes());
    bytes.extend(Sha256::digest(image));
    bytes.extend(image);
    bytes
}

fn unpack<'a>(bytes: &'a [u8], key: &Key) -> Option<&'a [u8]> {
    let rest = bytes.strip_prefix(MAGIC)?.strip_prefix(&(key.text.len() as u64).to_le_bytes())?;
    let (digest, image) = rest.strip_prefix(key.text.as_bytes())?.split_at_checked(32)?;
    (!image.is_empty() && Sha256::digest(image)[..] == *digest).then_some(image)
}

fn write_aside(folder: &Path, name: &str, bytes: &[u8]) -> std::io::Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    std::fs::create_dir_all(folder)?;
    let aside = folder.join(format!("{name}.{}.{}.tmp", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
    std::fs::write(&aside, bytes).and_then(|()| std::fs::rename(&aside, folder.join(name))).inspect_err(|_| {
        let _ = std::fs::remove_file(&aside); // it may not even exist; the first error is the one to report
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(text: &str) -> Key {
        Key::new("wigner-sm_90".into(), text.into())
    }

    #[test]
    fn what_is_stored_is_found_under_the_same_text_only() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().join("not/yet/there"));
        assert_eq!(cache.load(&key("text")), None);
        cache.store(&key("text"), b"image");
        assert_eq!(cache.load(&key("text")).as_deref(), Some(&b"image"[..]));
        assert_eq!(cache.load(&key("other text")), None);
        let files: Vec<_> = std::fs::read_dir(cache.folder().unwrap()).unwrap().collect();
        assert_eq!(files.len(), 1, "nothing is left aside: {files:?}");
    }

    #[test]
    fn damaged_and_foreign_files_are_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path());
        let path = folder.path().join(key("text").file_name());
        cache.store(&key("text"), b"image");
        let good = std::fs::read(&path).unwrap();
        for cut in 0..good.len() {
            std::fs::write(&path, &good[..cut]).unwrap();
            assert_eq!(cache.load(&key("text")), None, "cut at {cut}");
        }
        for flip in 0..good.len() {
            let mut bad = good.clone();
            bad[flip] ^= 1;
            std::fs::write(&path, bad).unwrap();
            assert_eq!(cache.load(&key("text")), None, "bit of byte {flip}");
        }
        // The file of another key under this name, as a collision would leave it.
        std::fs::write(&path, pack(&key("texu"), b"image")).unwrap();
        assert_eq!(cache.load(&key("text")), None);
        std::fs::write(&path, good).unwrap();
        assert!(cache.load(&key("text")).is_some());
    }

    #[test]
    fn a_cache_that_cannot_be_written_is_no_failure() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let cache = Cache::at(file.path().join("below a file"));
        cache.store(&key("text"), b"image");
        assert_eq!(cache.load(&key("text")), None);
        Cache::disabled().store(&key("text"), b"image");
        assert_eq!(Cache::disabled().load(&key("text")), None);
    }
}
