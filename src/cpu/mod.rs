//! The engine on the CPU: one file a stage, forward and adjoint side by side, generic over f32 and f64.

use crate::engine::{Engine, Evaluation, Exchange, Precision, Request};
use crate::graph::Graph;
use crate::model::Model;
use crate::{Error, Result};

/// The CPU engine for a model.
pub fn create(model: &Model, precision: Precision) -> Result<Box<dyn Engine>> {
    let _ = model;
    Ok(Box::new(CpuEngine { precision }))
}

struct CpuEngine {
    precision: Precision,
}

impl Engine for CpuEngine {
    fn evaluate(&mut self, graph: &Graph, _: Request, _: &mut dyn Exchange) -> Result<Evaluation> {
        Err(Error::Internal(format!("{} edges, no engine yet", graph.n_edges())))
    }
    fn describe(&self) -> String {
        format!("CPU, {:?}", self.precision)
    }
    fn profile(&self) -> Vec<(&'static str, u64, f64)> {
        Vec::new()
    }
    fn memory_usage(&self) -> usize {
        0
    }
}
