//! The zip container of a `.pt` file: entries by name, read in place from the mapped file.

use crate::{Error, Result};
use memmap2::Mmap;
use std::collections::HashMap;
use std::fs::File;
use std::io::Cursor;
use std::ops::Range;
use std::path::Path;

/// Byte range of each entry, named without the archive's top folder.
type Entries = HashMap<String, Stored>;

/// Where an entry lies in the file, and its CRC-32; 0 where the writer left checksums out, as torch can.
#[derive(Debug)]
struct Stored {
    range: Range<usize>,
    crc32: u32,
}

/// A mapped zip file whose entries are stored uncompressed.
#[derive(Debug)]
pub struct Archive {
    map: Mmap,
    entries: Entries,
}

impl Archive {
    /// Maps `path` and reads its directory. Errors: `Io`; `Format` for everything that is no torch archive, by kind.
    pub fn open(path: &Path) -> Result<Self> {
        if path.is_dir() {
            return Err(Error::format(path, "is a directory; give the .pt checkpoint itself"));
        }
        let file = File::open(path).map_err(|e| Error::io(path, format!("cannot be opened: {e}")))?;
        let length = file.metadata().map_err(|e| Error::io(path, e))?.len();
        if length == 0 {
            return Err(Error::format(path, "is empty; was the copy interrupted?"));
        }
        // SAFETY: the map is read-only and private to this value. As for every mapped file, another process that
        // truncates it while it is read would fault; checkpoints are written once and replaced by renaming.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| Error::io(path, format!("cannot be mapped: {e}")))?;
        if !map.starts_with(b"PK\x03\x04") {
            return Err(Error::format(path, foreign(&map)));
        }
        let (entries, compressed) = directory(path, &map)?;
        let archive = Archive { map, entries };
        archive.check_kind(path)?;
        if let Some(name) = compressed {
            return Err(Error::format(
                path,
                format!("entry {name} is compressed; torch stores its entries, so unpack and repack with `zip -0`"),
            ));
        }
        archive.check_byte_order(path)?;
        Ok(archive)
    }

    /// Bytes of an entry.
    pub fn entry(&self, name: &str) -> Option<&[u8]> {
        self.entries.get(name).map(|stored| &self.map[stored.range.clone()])
    }
    /// Bytes of an entry, after comparing them with their checksum. Errors: what does not agree; a missing entry.
    pub fn verified(&self, name: &str) -> std::result::Result<&[u8], String> {
        let stored = self.entries.get(name).ok_or_else(|| format!("entry {name} is missing"))?;
        let bytes = &self.map[stored.range.clone()];
        if stored.crc32 != 0 && crc32fast::hash(bytes) != stored.crc32 {
            return Err(format!("entry {name} does not agree with its checksum: the file is damaged, copy it again"));
        }
        Ok(bytes)
    }
    /// The whole file.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    fn check_kind(&self, path: &Path) -> Result<()> {
        let has = |name: &str| self.entries.contains_key(name);
        let under = |folder: &str| self.entries.keys().any(|k| k.starts_with(folder));
        if has("constants.pkl") || under("code/") {
            return Err(Error::format(
                path,
                "is a frozen TorchScript model (.pth): sezm reads the checkpoint (.pt) that `dp --pt train` writes",
            ));
        }
        if has("archive_format") || under("data/aotinductor/") || under("models/") {
            return Err(Error::format(
                path,
                "is an exported or compiled model (.pt2): sezm reads the checkpoint (.pt) that `dp --pt train` writes",
            ));
        }
        if !has("data.pkl") {
            return Err(Error::format(
                path,
                "is a zip archive without data.pkl, not a torch checkpoint; give the .pt file that `dp --pt train` writes",
            ));
        }
        Ok(())
    }

    fn check_byte_order(&self, path: &Path) -> Result<()> {
        match self.entry("byteorder") {
            None | Some(b"little") => Ok(()),
            Some(other) => Err(Error::format(
                path,
                format!(
                    "was written with byte order '{}'; only little-endian checkpoints can be read: save it again on a \
                     little-endian machine",
                    String::from_utf8_lossy(&other[..other.len().min(16)])
                ),
            )),
        }
    }
}

/// What a file is that is no zip archive.
fn foreign(bytes: &[u8]) -> String {
    let hint = "sezm reads the checkpoint (.pt) that `dp --pt train` writes";
    if bytes.starts_with(b"\x89HDF") {
        return format!("is an HDF5 file; {hint}");
    }
    if bytes.starts_with(b"\x80\x02\x8a\x0a") || bytes.starts_with(b"\x80\x02") {
        return format!(
            "is a pickle of the format before torch 1.6; load and save it again with a current torch; {hint}"
        );
    }
    let header = bytes.get(..8).and_then(|b| b.try_into().ok()).map(u64::from_le_bytes);
    if header.is_some_and(|n| n > 0 && n < 100 << 20) && bytes.get(8) == Some(&b'{') {
        return format!("is a safetensors file; {hint}");
    }
    let start = &bytes[..bytes.len().min(512)];
    if std::str::from_utf8(start).map_or_else(|e| e.valid_up_to() + 4 > start.len(), |_| true) && !start.contains(&0) {
        return format!("is a text file; {hint}");
    }
    if bytes[0] == 0x0a {
        return format!("looks like a TensorFlow graph (.pb); {hint}");
    }
    format!(
        "is not a torch checkpoint (it begins with {:02x?}, not with a zip header); {hint}",
        &start[..start.len().min(4)]
    )
}

/// The entries, and the name of one that is compressed if there is any.
fn directory(path: &Path, map: &Mmap) -> Result<(Entries, Option<String>)> {
    let damaged = |what: String| Error::format(path, format!("{what}; was the copy interrupted?"));
    // The archive begins where the file begins. To look for its beginning would take the second header of the directory
    // for the first where the zip64 records behind the directory happen to be as long as that header, which they are
    // for a model with a name of 21 characters.
    let config = zip::read::Config { archive_offset: zip::read::ArchiveOffset::Known(0) };
    let mut zip = zip::ZipArchive::with_config(config, Cursor::new(&map[..]))
        .map_err(|e| damaged(format!("is a zip archive that is cut short or damaged ({e})")))?;
    let (mut entries, mut compressed) = (HashMap::with_capacity(zip.len()), None);
    for i in 0..zip.len() {
        let file = zip.by_index_raw(i).map_err(|e| damaged(format!("has a damaged zip directory ({e})")))?;
        let name = file.name().map_err(|e| damaged(format!("has a damaged zip directory ({e})")))?;
        let full = name.to_string();
        // torch puts everything under one folder named after the file.
        let name = full.split_once('/').map_or(full.as_str(), |(_, rest)| rest).to_string();
        let start = file.data_start().unwrap_or(u64::MAX);
        let end = start.checked_add(file.compressed_size()).filter(|&end| end <= map.len() as u64);
        let Some(end) = end else {
            return Err(damaged(format!("entry {full} reaches beyond the end of the file")));
        };
        if file.compression() != zip::CompressionMethod::Stored {
            compressed.get_or_insert(full);
        }
        entries.insert(name, Stored { range: start as usize..end as usize, crc32: file.crc32() });
    }
    Ok((entries, compressed))
}
