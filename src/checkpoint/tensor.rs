//! Strided views of storages -> dense f64 tensors.

use super::pickle::TensorRef;

/// A dense tensor, row-major, converted to f64 from whatever dtype the file holds.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    /// Sizes of the axes, slowest first; empty for a scalar.
    pub shape: Vec<usize>,
    /// `shape.iter().product()` values.
    pub data: Vec<f64>,
}

/// Element types of storages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    F64,
    F32,
    F16,
    Bf16,
    I64,
    I32,
    I16,
    I8,
    U8,
    Bool,
}

impl Dtype {
    /// From the storage class of the pickle.
    pub fn of_storage(kind: &str) -> Option<Dtype> {
        Some(match kind {
            "DoubleStorage" => Dtype::F64,
            "FloatStorage" => Dtype::F32,
            "HalfStorage" => Dtype::F16,
            "BFloat16Storage" => Dtype::Bf16,
            "LongStorage" => Dtype::I64,
            "IntStorage" => Dtype::I32,
            "ShortStorage" => Dtype::I16,
            "CharStorage" => Dtype::I8,
            "ByteStorage" => Dtype::U8,
            "BoolStorage" => Dtype::Bool,
            _ => return None,
        })
    }
    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            Dtype::F64 | Dtype::I64 => 8,
            Dtype::F32 | Dtype::I32 => 4,
            Dtype::F16 | Dtype::Bf16 | Dtype::I16 => 2,
            Dtype::I8 | Dtype::U8 | Dtype::Bool => 1,
        }
    }
    /// Converts elements that lie side by side.
    fn convert(self, bytes: &[u8], out: &mut Vec<f64>) {
        fn each<const N: usize>(bytes: &[u8], out: &mut Vec<f64>, f: impl Fn([u8; N]) -> f64) {
            let (whole, _) = bytes.as_chunks::<N>();
            out.extend(whole.iter().map(|&b| f(b)));
        }
        match self {
            Dtype::F64 => each(bytes, out, f64::from_le_bytes),
            Dtype::F32 => each(bytes, out, |b| f32::from_le_bytes(b).into()),
            Dtype::F16 => each(bytes, out, |b| half::f16::from_le_bytes(b).into()),
            Dtype::Bf16 => each(bytes, out, |b| half::bf16::from_le_bytes(b).into()),
            Dtype::I64 => each(bytes, out, |b| i64::from_le_bytes(b) as f64),
            Dtype::I32 => each(bytes, out, |b| i32::from_le_bytes(b).into()),
            Dtype::I16 => each(bytes, out, |b| i16::from_le_bytes(b).into()),
            Dtype::I8 => each(bytes, out, |b| i8::from_le_bytes(b).into()),
            Dtype::U8 | Dtype::Bool => each(bytes, out, |[b]| b.into()),
        }
    }
}

/// Checks that a view stays inside its storage and the storage inside the entry; returns the element count.
pub fn check_view(view: &TensorRef, entry_bytes: usize) -> Result<usize, String> {
    let dtype = Dtype::of_storage(&view.kind).ok_or_else(|| format!("has the unknown storage class {}", view.kind))?;
    if view.storage_len.checked_mul(dtype.size() as u64) != Some(entry_bytes as u64) {
        return Err(format!(
            "has a storage of {} elements ({dtype:?}) but entry data/{} holds {entry_bytes} bytes",
            view.storage_len, view.key
        ));
    }
    let count = view.shape.iter().try_fold(1u64, |n, &s| n.checked_mul(s)).ok_or("has an impossible shape")?;
    if count > 0 {
        let mut last = view.offset;
        for (&size, &stride) in view.shape.iter().zip(&view.stride) {
            let reach = (size - 1).checked_mul(stride).and_then(|x| last.checked_add(x));
            last = reach.ok_or("has impossible strides")?;
        }
        if last >= view.storage_len {
            return Err(format!("reaches element {last} of a storage of {}", view.storage_len));
        }
        // A view that repeats elements (stride 0) could be made arbitrarily large from a small file.
        if count > view.storage_len.max(1) {
            return Err(format!("has {count} elements in a storage of {}", view.storage_len));
        }
    }
    Ok(count as usize)
}

/// Reads a view that [`check_view`] has passed.
pub fn read(view: &TensorRef, entry: &[u8]) -> Result<Tensor, String> {
    let count = check_view(view, entry.len())?;
    let dtype = Dtype::of_storage(&view.kind).ok_or("has an unknown storage class")?;
    let size = dtype.size();
    let shape: Vec<usize> = view.shape.iter().map(|&s| s as usize).collect();
    let mut data = Vec::with_capacity(count);
    if count > 0 {
        // The longest run of axes that lies dense in the storage is converted in one go.
        let mut run = 1;
        let mut outer = shape.len();
        while outer > 0 && (view.stride[outer - 1] as usize == run || shape[outer - 1] == 1) {
            run *= shape[outer - 1];
            outer -= 1;
        }
        let mut index = vec![0usize; outer];
        loop {
            let start: usize = index.iter().zip(&view.stride).map(|(&i, &s)| i * s as usize).sum::<usize>();
            let first = (view.offset as usize + start) * size;
            dtype.convert(&entry[first..first + run * size], &mut data);
            if !advance(&mut index, &shape) {
                break;
            }
        }
    }
    Ok(Tensor { shape, data })
}

/// Next index in row-major order; false after the last.
fn advance(index: &mut [usize], shape: &[usize]) -> bool {
    for (i, &size) in index.iter_mut().zip(shape).rev() {
        *i += 1;
        if *i < size {
            return true;
        }
        *i = 0;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::rc::Rc;

    fn view(kind: &str, storage_len: u64, offset: u64, shape: &[u64], stride: &[u64]) -> TensorRef {
        let (kind, key) = (Rc::from(kind), Rc::from("0"));
        TensorRef { kind, key, storage_len, offset, shape: shape.to_vec(), stride: stride.to_vec() }
    }

    #[test]
    fn strided_views_are_made_dense() {
        let bytes: Vec<u8> = (0..12u16).flat_map(|i| f32::from(i).to_le_bytes()).collect();
        let transposed = read(&view("FloatStorage", 12, 0, &[4, 3], &[1, 4]), &bytes).unwrap();
        assert_eq!(transposed.data, [0., 4., 8., 1., 5., 9., 2., 6., 10., 3., 7., 11.]);
        let slice = read(&view("FloatStorage", 12, 5, &[2, 2], &[4, 1]), &bytes).unwrap();
        assert_eq!(slice.data, [5., 6., 9., 10.]);
        let scalar = read(&view("FloatStorage", 12, 7, &[], &[]), &bytes).unwrap();
        assert_eq!((scalar.shape, scalar.data), (vec![], vec![7.0]));
        assert!(read(&view("FloatStorage", 12, 0, &[0, 3], &[3, 1]), &bytes).unwrap().data.is_empty());
    }

    #[test]
    fn every_dtype_is_read() {
        let check = |kind: &str, bytes: &[u8], expected: f64| {
            assert_eq!(read(&view(kind, 1, 0, &[1], &[1]), bytes).unwrap().data, [expected], "{kind}");
        };
        check("DoubleStorage", &(-2.5f64).to_le_bytes(), -2.5);
        check("FloatStorage", &(-2.5f32).to_le_bytes(), -2.5);
        check("HalfStorage", &half::f16::from_f32(-2.5).to_le_bytes(), -2.5);
        check("BFloat16Storage", &half::bf16::from_f32(-2.5).to_le_bytes(), -2.5);
        check("LongStorage", &(-7i64).to_le_bytes(), -7.0);
        check("IntStorage", &(-7i32).to_le_bytes(), -7.0);
        check("ShortStorage", &(-7i16).to_le_bytes(), -7.0);
        check("CharStorage", &(-7i8).to_le_bytes(), -7.0);
        check("ByteStorage", &[200], 200.0);
        check("BoolStorage", &[1], 1.0);
    }

    #[test]
    fn views_outside_their_storage_are_refused() {
        let bytes = [0u8; 48];
        for (shape, stride, offset) in [
            (&[4u64, 4][..], &[4u64, 1][..], 0u64),
            (&[2], &[1], 11),
            (&[u64::MAX, 2], &[1, 1], 0),
            (&[2, 2], &[u64::MAX, 1], 0),
            (&[1000], &[0], 0),
        ] {
            assert!(read(&view("FloatStorage", 12, offset, shape, stride), &bytes).is_err(), "{shape:?} {stride:?}");
        }
        assert!(read(&view("FloatStorage", 13, 0, &[2], &[1]), &bytes).is_err());
    }
}
