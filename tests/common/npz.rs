//! NumPy's `.npz`: a zip of `.npy` arrays of little-endian f64, f32, i64, i32, bool or UTF-32 text in C order.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

/// One array, flattened.
#[derive(Debug, Clone, PartialEq)]
pub struct Array {
    pub shape: Vec<usize>,
    data: Data,
}

#[derive(Debug, Clone, PartialEq)]
enum Data {
    Float(Vec<f64>),
    Integer(Vec<i64>),
    Text(Vec<String>),
}

impl Array {
    pub fn floats(&self) -> &[f64] {
        match &self.data {
            Data::Float(x) => x,
            other => panic!("expected numbers, found {other:?}"),
        }
    }
    pub fn integers(&self) -> &[i64] {
        match &self.data {
            Data::Integer(x) => x,
            other => panic!("expected integers, found {other:?}"),
        }
    }
    pub fn texts(&self) -> &[String] {
        match &self.data {
            Data::Text(x) => x,
            other => panic!("expected text, found {other:?}"),
        }
    }
}

/// All arrays of a file by name.
pub fn read(path: &Path) -> BTreeMap<String, Array> {
    let file = std::fs::File::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut archive = zip::ZipArchive::new(file).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    (0..archive.len())
        .map(|i| {
            let mut entry = archive.by_index(i).unwrap();
            let name = entry.name().unwrap().trim_end_matches(".npy").to_string();
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).unwrap();
            let array = parse(&bytes).unwrap_or_else(|| panic!("{}: {name} is no array that is read", path.display()));
            (name, array)
        })
        .collect()
}

/// `None` for a format that is not listed above.
fn parse(bytes: &[u8]) -> Option<Array> {
    let rest = bytes.strip_prefix(b"\x93NUMPY")?;
    let (header_len, start) = match rest[0] {
        1 => (u16::from_le_bytes([rest[2], rest[3]]) as usize, 4),
        _ => (u32::from_le_bytes(rest[2..6].try_into().ok()?) as usize, 6),
    };
    let header = std::str::from_utf8(&rest[start..start + header_len]).ok()?;
    let body = &rest[start + header_len..];
    if !header.contains("'fortran_order': False") {
        return None;
    }
    let kind = header.split("'descr': '").nth(1)?.split('\'').next()?;
    let shape = header.split("'shape': (").nth(1)?.split(')').next()?;
    let shape: Vec<usize> = shape.split(',').filter_map(|n| n.trim().parse().ok()).collect();
    let width: usize = kind[2..].parse().ok()?;
    let data = match &kind[..2] {
        "<f" if width == 8 => Data::Float(numbers(body, f64::from_le_bytes)),
        "<f" if width == 4 => Data::Float(numbers(body, |b| f64::from(f32::from_le_bytes(b)))),
        "<i" if width == 8 => Data::Integer(numbers(body, i64::from_le_bytes)),
        "<i" if width == 4 => Data::Integer(numbers(body, |b| i64::from(i32::from_le_bytes(b)))),
        "|b" => Data::Integer(numbers(body, |[b]: [u8; 1]| i64::from(b))),
        "<U" => {
            let text = |item: &[u8]| -> String {
                let letters = numbers(item, u32::from_le_bytes).into_iter();
                letters.filter(|&c| c != 0).filter_map(char::from_u32).collect()
            };
            Data::Text(body.chunks_exact(4 * width).map(text).collect())
        }
        _ => return None,
    };
    let len = match &data {
        Data::Float(x) => x.len(),
        Data::Integer(x) => x.len(),
        Data::Text(x) => x.len(),
    };
    (len == shape.iter().product::<usize>()).then_some(Array { shape, data })
}

fn numbers<const N: usize, T>(bytes: &[u8], read: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks::<N>().0.iter().map(|&b| read(b)).collect()
}
