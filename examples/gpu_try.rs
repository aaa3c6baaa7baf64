use sezm::cuda::engine::DeviceEngine;
use sezm::cuda::machine::{Gpu, Machine};
use sezm::engine::{Engine, OneRank, Request};
use sezm::model::Model;
use std::path::Path;
fn diamond(n: usize) -> (Vec<[f64; 3]>, [[f64; 3]; 3]) {
    let a = 3.567;
    let base = [[0.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.0, 0.5, 0.5]];
    let mut x = vec![];
    let mut s = 12345u64;
    let mut rnd = || {
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        (s >> 11) as f64 / (1u64 << 53) as f64 - 0.5
    };
    for i in 0..n {
        for j in 0..n {
            for k in 0..n {
                for b in base {
                    for o in [0.0, 0.25] {
                        x.push([
                            (b[0] + o + i as f64) * a + 0.04 * rnd(),
                            (b[1] + o + j as f64) * a + 0.04 * rnd(),
                            (b[2] + o + k as f64) * a + 0.04 * rnd(),
                        ]);
                    }
                }
            }
        }
    }
    let l = a * n as f64;
    (x, [[l, 0.0, 0.0], [0.0, l, 0.0], [0.0, 0.0, l]])
}
fn d(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max)
}
fn conformance<T: sezm::cuda::engine::Scalar>(dir: &Path, name: &str, tag: &str) {
    let model = match Model::open(&dir.join(format!("{name}.pt")), None) {
        Ok(m) => m,
        Err(_) => return,
    };
    let t = std::time::Instant::now();
    let mut e = match DeviceEngine::<Gpu, T>::new(Gpu::open(0).unwrap(), &model) {
        Ok(e) => e,
        Err(e) => {
            println!("{name} {tag}: {e}");
            return;
        }
    };
    let load = t.elapsed().as_secs_f64();
    let mut files: Vec<_> = std::fs::read_dir(dir.join(name)).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    for f in files {
        let s: serde_json::Value = serde_json::from_slice(&std::fs::read(&f).unwrap()).unwrap();
        let types: Vec<i32> = serde_json::from_value(s["types"].clone()).unwrap();
        let x: Vec<[f64; 3]> = serde_json::from_value(s["pos"].clone()).unwrap();
        let cell: Option<[[f64; 3]; 3]> = serde_json::from_value(s["cell"].clone()).unwrap();
        let g = sezm::graph::build(
            &sezm::graph::Structure { positions: &x, types: &types, cell, pbc: [cell.is_some(); 3] },
            model.cutoff(),
            model.excluded_pairs(),
        )
        .unwrap();
        let r = match e.evaluate(&g, Request { atom_virial: true, descriptor: true }, &mut OneRank) {
            Ok(r) => r,
            Err(e) => {
                println!("{name} ERR {e}");
                continue;
            }
        };
        let v = |q: &str, t: &str| -> Vec<f64> { serde_json::from_value(s[format!("{t}_{q}")].clone()).unwrap() };
        let mut line = String::new();
        for (q, a) in [
            ("energy", vec![r.energy]),
            ("force", r.forces.concat()),
            ("virial", r.virial.to_vec()),
            ("atom_virial", r.atom_virial.concat()),
            ("descriptor", r.descriptor.clone()),
        ] {
            line += &format!(" {}:{:.1e}({:.1e})", &q[..2], d(&a, &v(q, "f64")), d(&v(q, "f32"), &v(q, "f64")));
        }
        println!(
            "{name} {tag} load {load:.1} {} N={} E={}{}",
            f.file_stem().unwrap().to_string_lossy(),
            types.len(),
            g.n_edges(),
            line
        );
    }
}
fn timing<T: sezm::cuda::engine::Scalar>(dir: &Path, name: &str, n: usize, tag: &str, reps: usize) {
    let model = Model::open(&dir.join(format!("{name}.pt")), None).unwrap();
    let (x, cell) = diamond(n);
    let types = vec![5; x.len()];
    let g = sezm::graph::build(
        &sezm::graph::Structure { positions: &x, types: &types, cell: Some(cell), pbc: [true; 3] },
        model.cutoff(),
        model.excluded_pairs(),
    )
    .unwrap();
    let t = std::time::Instant::now();
    let mut e = DeviceEngine::<Gpu, T>::new(Gpu::open(0).unwrap(), &model).unwrap();
    let load = t.elapsed().as_secs_f64();
    let mut ts = vec![];
    let mut first = None;
    let mut same = true;
    for _ in 0..reps {
        let t = std::time::Instant::now();
        let r = match e.evaluate(&g, Request::default(), &mut OneRank) {
            Ok(r) => r,
            Err(e) => {
                println!("{name} {n} {e}");
                return;
            }
        };
        ts.push(t.elapsed().as_secs_f64() * 1e3);
        match &first {
            None => first = Some(r),
            Some(f) => same &= *f == r,
        }
    }
    let f0 = ts[0];
    ts.sort_by(f64::total_cmp);
    println!(
        "TIME {name} {tag} N={} E={} load {load:.2}s first {f0:.1} median {:.2} ms min {:.2} mem {:.3} GB same bits {same} E={:.9}",
        x.len(),
        g.n_edges(),
        ts[ts.len() / 2],
        ts[0],
        e.memory_usage() as f64 * 1e-9,
        first.unwrap().energy
    );
    let _ = e.machine().synchronize();
}
fn main() {
    let dir = Path::new(".gpu/models");
    let what = std::env::args().nth(1).unwrap_or_default();
    if what != "time" {
        let mut names: Vec<String> = std::fs::read_dir(dir)
            .unwrap()
            .filter_map(|e| e.unwrap().file_name().into_string().unwrap().strip_suffix(".pt").map(str::to_string))
            .collect();
        names.sort();
        for n in names {
            if n.contains(&what) {
                conformance::<f64>(dir, &n, "f64");
                conformance::<f32>(dir, &n, "f32");
            }
        }
    }
    for (name, n) in [("neo_s1", 2), ("neo_s1", 3), ("neo_s1", 5), ("neo_s1", 8), ("mini_s1", 10)] {
        timing::<f32>(dir, name, n, "f32", 7);
    }
    timing::<f64>(dir, "neo_s1", 5, "f64", 3);
}
