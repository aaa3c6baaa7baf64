//! LoRA factors of fine-tuned files, folded into the weights they adapt (SPEC section 15).

use super::tensor::Tensor;

/// Names of the factors A and B and of the scaling that would adapt the weight `name`.
pub fn factors(name: &str) -> Option<[String; 3]> {
    let (base, leaf) = match name.rsplit_once(".weight_m.") {
        Some((base, m)) => (base, format!("m.{m}")),
        None => match name.rsplit_once('.')? {
            (base, "weight") => (base, "by_l".to_string()),
            (base, "weight_m0") => (base, "m0".to_string()),
            _ => return None,
        },
    };
    let leaf = match leaf.as_str() {
        "by_l" => ["A_by_l".to_string(), "B_by_l".to_string()],
        "m0" => ["A_m0".to_string(), "B_m0".to_string()],
        other => [format!("A_{other}"), format!("B_{other}")],
    };
    Some([format!("{base}.{}", leaf[0]), format!("{base}.{}", leaf[1]), format!("{base}.lora_scaling")])
}

/// The weight that a factor or scaling belongs to; `None` for any other tensor.
pub fn target(name: &str) -> Option<String> {
    for (pattern, weight) in [(".A_m.", ".weight_m."), (".B_m.", ".weight_m.")] {
        if let Some((base, m)) = name.rsplit_once(pattern) {
            return Some(format!("{base}{weight}{m}"));
        }
    }
    let (base, leaf) = name.rsplit_once('.')?;
    match leaf {
        "A_by_l" | "B_by_l" => Some(format!("{base}.weight")),
        "A_m0" | "B_m0" => Some(format!("{base}.weight_m0")),
        _ => None,
    }
}

/// Whether a tensor is the scaling of LoRA factors.
pub fn is_scaling(name: &str) -> bool {
    name.ends_with(".lora_scaling")
}

/// `W[l][i][o] += s sum_r B[l][o][r] A[l][r][i]`, or without the degree axis `W[i][o] += s sum_r A[r][i] B[o][r]`.
pub fn fold(weight: &mut Tensor, a: &Tensor, b: &Tensor, scaling: f64) -> Result<(), String> {
    let mismatch = || {
        format!(
            "LoRA factors of shapes {:?} and {:?} do not fit a weight of shape {:?}",
            a.shape, b.shape, weight.shape
        )
    };
    let (degrees, rest) = match weight.shape[..] {
        [l, i, o] => (l, (i, o)),
        [i, o] => (1, (i, o)),
        _ => return Err(mismatch()),
    };
    let (inputs, outputs) = rest;
    let rank = a.shape.len().checked_sub(2).map(|at| a.shape[at]).ok_or_else(mismatch)?;
    let lead = &weight.shape[..weight.shape.len() - 2];
    let fits = a.shape == [lead, &[rank, inputs]].concat() && b.shape == [lead, &[outputs, rank]].concat();
    if !fits {
        return Err(mismatch());
    }
    for l in 0..degrees {
        for i in 0..inputs {
            for o in 0..outputs {
                let sum: f64 =
                    (0..rank).map(|r| b.data[(l * outputs + o) * rank + r] * a.data[(l * rank + r) * inputs + i]).sum();
                weight.data[(l * inputs + i) * outputs + o] += scaling * sum;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_factors_and_weights_belong_together() {
        for weight in ["d.so3_linear_1.weight", "d.so2_linears.0.weight_m0", "d.so2_linears.0.weight_m.1"] {
            let [a, b, _] = factors(weight).unwrap();
            assert_eq!(target(&a).as_deref(), Some(weight));
            assert_eq!(target(&b).as_deref(), Some(weight));
        }
        assert_eq!(factors("d.so2_linears.0.weight_m.1").unwrap()[0], "d.so2_linears.0.A_m.1");
        assert_eq!(target("d.out_bias"), None);
        assert_eq!(factors("d.type_embedding.adam_type_embedding"), None);
    }

    #[test]
    fn folding_adds_the_product() {
        let tensor = |shape: &[usize], data: &[f64]| Tensor { shape: shape.to_vec(), data: data.to_vec() };
        // l = 2, i = 2, o = 3, r = 1.
        let mut w = tensor(&[2, 2, 3], &[0.0; 12]);
        let a = tensor(&[2, 1, 2], &[1.0, 2.0, 3.0, 4.0]);
        let b = tensor(&[2, 3, 1], &[1.0, 10.0, 100.0, 5.0, 6.0, 7.0]);
        fold(&mut w, &a, &b, 0.5).unwrap();
        assert_eq!(w.data, [0.5, 5.0, 50.0, 1.0, 10.0, 100.0, 7.5, 9.0, 10.5, 10.0, 12.0, 14.0]);
        let mut w = tensor(&[2, 1], &[1.0, 1.0]);
        fold(&mut w, &tensor(&[1, 2], &[2.0, 3.0]), &tensor(&[1, 1], &[4.0]), 1.0).unwrap();
        assert_eq!(w.data, [9.0, 13.0]);
        assert!(fold(&mut w, &tensor(&[1, 3], &[0.0; 3]), &tensor(&[1, 1], &[4.0]), 1.0).is_err());
    }
}
