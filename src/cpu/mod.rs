//! The engine on the CPU: one file a stage, forward and adjoint side by side, generic over f32 and f64.
//!
//! Work is cut into chunks that depend on the graph alone (whole destination or source atoms, tiles of nodes); rayon
//! runs them in any order and every chunk writes its own part of the result. No sum crosses a chunk, so the bits do not
//! depend on the thread count.

mod attention;
mod block;
mod edge_geometry;
mod environment_seed;
mod equivariant_norm;
mod ffn;
mod fitting;
mod focus_competition;
mod force_virial;
pub mod grid_product;
mod message;
mod node_linear;
mod node_start;
mod profile;
mod radial;
mod readout;
pub mod real;
mod rotate_mix;
mod scratch;
mod so2_stack;
pub mod stages;
#[cfg(test)]
pub mod testing;
mod tiles;

use crate::engine::{Engine, Evaluation, Exchange, Precision, Request};
use crate::graph::Graph;
use crate::math::envelope::Envelope;
use crate::model::Model;
use crate::{Error, Result};
use attention::AttentionStage;
use block::BlockStage;
use edge_geometry::{EdgeGeometry, EdgeGradient};
use fitting::FittingStage;
use message::{ChunkGradient, Edges, MessageStage, NodeFeatures, OutputGradient};
use node_start::{NodeStart, StartInput};
use profile::{Profile, Stage};
use radial::{BasisTable, RadialStage};
use rayon::prelude::*;
use readout::ReadoutStage;
use real::{Real, axpy};
use tiles::{NODE_TILE, chunk_rows, gather, node_tiles, scatter, split, split_rows};

/// The CPU engine for a model.
pub fn create(model: &Model, precision: Precision) -> Result<Box<dyn Engine>> {
    Ok(match precision {
        Precision::Fp32 => Box::new(CpuEngine::<f32>::new(model)),
        Precision::Fp64 => Box::new(CpuEngine::<f64>::new(model)),
    })
}

/// A model's stages in one number type.
pub struct CpuEngine<T> {
    channels: usize,
    width: usize,
    eps: f64,
    floor: f64,
    envelope: Envelope,
    radial: RadialStage<T>,
    start: NodeStart<T>,
    messages: Vec<MessageStage<T>>,
    blocks: Vec<BlockStage<T>>,
    readout: ReadoutStage<T>,
    /// In f64 in every precision: it costs nothing beside the edges, and energies are read off its end.
    fitting: FittingStage<f64>,
    profile: Profile,
    held: usize,
}

/// What the forward pass of a block leaves for its adjoint.
struct BlockState<T> {
    /// Node state before the block `[node][(l, m)][C]`.
    x: Vec<T>,
    /// Aggregated message `[owned][(l, m)][W]`.
    message: Vec<T>,
    /// Attention weights `[edge][focus][head]`.
    alpha: Vec<T>,
}

/// Message features of all nodes.
struct Features<T> {
    rows: Vec<T>,
    query: Vec<T>,
    key: Vec<T>,
}

/// One evaluation: the graph, its geometry and how it is cut.
struct Step<'a, T> {
    graph: &'a Graph,
    geometry: EdgeGeometry,
    basis: BasisTable<T>,
    /// Ranges of destination atoms and of sources.
    destinations: Vec<std::ops::Range<usize>>,
    sources: Vec<std::ops::Range<usize>>,
    /// Position of each edge in the order of sources.
    source_position: Vec<u32>,
    engine: &'a CpuEngine<T>,
}

impl<T: Real> CpuEngine<T> {
    fn new(model: &Model) -> Self {
        let (config, weights) = (model.config(), model.weights());
        let blocks = 0..config.blocks.len();
        CpuEngine {
            channels: config.channels,
            width: config.hidden(),
            eps: config.eps,
            floor: if config.version >= 1.1 { 0.25 } else { config.eps },
            envelope: Envelope::new(config.env_exp[1], config.rcut),
            radial: RadialStage::new(config, weights),
            start: NodeStart::new(config, weights),
            messages: blocks.clone().map(|b| MessageStage::new(model, weights, b)).collect(),
            blocks: blocks.map(|b| BlockStage::new(config, weights, b)).collect(),
            readout: ReadoutStage::new(config, weights),
            fitting: FittingStage::new(&weights.fitting, config.fitting.activation),
            profile: Profile::default(),
            held: model.parameters() * size_of::<T>(),
        }
    }

    /// Values of a node's state before block `b`; after the last block what the read-out sees.
    fn state_len(&self, b: usize) -> usize {
        match self.blocks.get(b) {
            Some(block) => block.node_len(),
            None => self.blocks.last().map_or(self.start.node_len(), |block| block.node_len()),
        }
    }
}

impl<T: Real> Engine for CpuEngine<T> {
    fn evaluate(&mut self, graph: &Graph, want: Request, exchange: &mut dyn Exchange) -> Result<Evaluation> {
        let step = Step::new(self, graph);
        let (evaluation, held) = step.run(want, exchange)?;
        let values = [evaluation.energy].into_iter().chain(evaluation.forces.iter().flatten().copied());
        if let Some(bad) = values.into_iter().find(|x| !x.is_finite()) {
            return Err(Error::Structure(format!(
                "the energy or a force is {bad}: the configuration is far outside of what the model can describe"
            )));
        }
        self.held = self.held.max(held);
        Ok(evaluation)
    }
    fn describe(&self) -> String {
        format!("CPU, fp{}, {} threads", 8 * size_of::<T>(), rayon::current_num_threads())
    }
    fn profile(&self) -> Vec<(&'static str, u64, f64)> {
        self.profile.table()
    }
    fn memory_usage(&self) -> usize {
        self.held
    }
}

impl<'a, T: Real> Step<'a, T> {
    fn new(engine: &'a CpuEngine<T>, graph: &'a Graph) -> Self {
        let mut time = engine.profile.start();
        let geometry = EdgeGeometry::new(graph, &engine.envelope, engine.eps, engine.floor);
        let mut source_position = vec![0; graph.n_edges()];
        for (position, &edge) in graph.src_edges.iter().enumerate() {
            source_position[edge as usize] = position as u32;
        }
        time.stage(Stage::EdgeGeometry);
        let basis = engine.radial.basis(&geometry.distance);
        time.stage(Stage::Radial);
        Step {
            graph,
            geometry,
            basis,
            destinations: chunk_rows(&graph.dst_start),
            sources: chunk_rows(&graph.src_start),
            source_position,
            engine,
        }
    }

    fn edges(&self) -> Edges<'_, T> {
        let engine = self.engine;
        Edges {
            graph: self.graph,
            geometry: &self.geometry,
            radial: &engine.radial,
            basis: &self.basis,
            profile: &engine.profile,
        }
    }
    fn start_input(&self) -> StartInput<'_, T> {
        let engine = self.engine;
        StartInput {
            graph: self.graph,
            geometry: &self.geometry,
            radial: &engine.radial,
            basis: &self.basis,
            profile: &engine.profile,
        }
    }

    /// The stages in order. Returns the answer and the bytes that were held for it.
    fn run(&self, want: Request, exchange: &mut dyn Exchange) -> Result<(Evaluation, usize)> {
        let engine = self.engine;
        let (start, saved) = self.start();
        let mut x = start;
        let mut states = Vec::with_capacity(engine.blocks.len());
        for b in 0..engine.blocks.len() {
            exchange.forward(T::rows(&mut x), engine.state_len(b))?;
            let (message, alpha, next) = self.block(b, &x);
            states.push(BlockState { x, message, alpha });
            x = next;
        }
        let mut out = Evaluation::default();
        let mut grad = self.energy(&x, want, &mut out);
        let held = size_of::<T>()
            * (states.iter().map(|s| s.x.len() + s.message.len() + s.alpha.len()).sum::<usize>() + 2 * x.len())
            + self.graph.n_edges() * (size_of::<EdgeGradient>() + 48);
        drop(x);
        let mut by_source = vec![EdgeGradient::default(); self.graph.n_edges()];
        let mut grad_normaliser = vec![0.0; self.graph.n_owned];
        let mut start = None;
        while let Some(state) = states.pop() {
            let b = states.len();
            grad = self.block_adjoint(b, &state, grad, &mut by_source, &mut grad_normaliser);
            exchange.reverse(T::rows(&mut grad), engine.state_len(b))?;
            start = Some(state.x);
        }
        // Without blocks the start values are the final state.
        let start = start.unwrap_or_else(|| self.start().0);
        let by_destination = self.start_adjoint(&start, &saved, &grad, &grad_normaliser);
        let mut time = engine.profile.start();
        let gradients: Vec<[f64; 3]> = by_destination
            .par_iter()
            .enumerate()
            .map(|(e, d)| {
                let s = &by_source[self.source_position[e] as usize];
                let whole = EdgeGradient {
                    radial: d.radial + s.radial,
                    torque: std::array::from_fn(|a| d.torque[a] + s.torque[a]),
                };
                whole.vector(self.geometry.direction[e], self.geometry.distance[e])
            })
            .collect();
        force_virial::force_virial(self.graph, &gradients, want.atom_virial, &mut out);
        time.stage(Stage::ForceVirial);
        Ok((out, held))
    }

    /// Start values of the owned nodes (remote ones are left zero) and each atom's environment sums.
    fn start(&self) -> (Vec<T>, Vec<T>) {
        let stage = &self.engine.start;
        let mut x = vec![T::zero(); self.graph.n_nodes() * stage.node_len()];
        let mut saved = vec![T::zero(); self.graph.n_owned * stage.saved_len()];
        let input = self.start_input();
        let parts = split_rows(&mut x, &self.destinations, stage.node_len()).into_par_iter().zip(split_rows(
            &mut saved,
            &self.destinations,
            stage.saved_len(),
        ));
        parts.zip(&self.destinations).for_each(|((x, saved), range)| stage.forward(&input, range.clone(), x, saved));
        (x, saved)
    }

    fn start_adjoint(&self, start: &[T], saved: &[T], grad: &[T], grad_normaliser: &[f64]) -> Vec<EdgeGradient> {
        let stage = &self.engine.start;
        let mut gradients = vec![EdgeGradient::default(); self.graph.n_edges()];
        let input = self.start_input();
        let parts = split(&mut gradients, self.destinations.iter().map(|r| self.edge_count(&self.graph.dst_start, r)));
        parts.into_par_iter().zip(&self.destinations).for_each(|(gradients, range)| {
            let nodes = range.start * stage.node_len()..range.end * stage.node_len();
            let matrices = range.start * stage.saved_len()..range.end * stage.saved_len();
            stage.adjoint(
                &input,
                range.clone(),
                &start[nodes.clone()],
                &saved[matrices],
                &grad[nodes],
                &grad_normaliser[range.clone()],
                gradients,
            );
        });
        gradients
    }

    fn edge_count(&self, starts: &[usize], range: &std::ops::Range<usize>) -> usize {
        starts[range.end] - starts[range.start]
    }

    /// Message features of all nodes before block `b`.
    fn features(&self, b: usize, x: &[T]) -> Features<T> {
        let (engine, block, message) = (self.engine, &self.engine.blocks[b], &self.engine.messages[b]);
        let nodes = self.graph.n_nodes();
        let heads = if block.attention.is_some() { nodes * engine.width } else { 0 };
        let mut out = Features {
            rows: vec![T::zero(); nodes * message.node_len()],
            query: vec![T::zero(); heads],
            key: vec![T::zero(); heads],
        };
        let tiles = node_tiles(nodes);
        let scalar_len = if heads > 0 { engine.width } else { 0 };
        split_rows(&mut out.rows, &tiles, message.node_len())
            .into_par_iter()
            .zip(split_rows(&mut out.query, &tiles, scalar_len))
            .zip(split_rows(&mut out.key, &tiles, scalar_len))
            .zip(&tiles)
            .for_each(|(((rows, query), key), range)| {
                let x = gather(x, range, engine.state_len(b), engine.channels);
                let (f, q, k) = block.features(&engine.profile, range.len(), &x);
                scatter(&f, range.len(), engine.width, rows);
                query.copy_from_slice(&q);
                key.copy_from_slice(&k);
            });
        out
    }

    /// Block `b`: aggregated messages, attention weights and the next node state.
    fn block(&self, b: usize, x: &[T]) -> (Vec<T>, Vec<T>, Vec<T>) {
        let (engine, block, stage) = (self.engine, &self.engine.blocks[b], &self.engine.messages[b]);
        let features = self.features(b, x);
        let mut message = vec![T::zero(); self.graph.n_owned * stage.node_len()];
        let mut alpha = vec![T::zero(); self.graph.n_edges() * stage.columns()];
        let (edges, nodes) = (self.edges(), features.view());
        let counts = self.destinations.iter().map(|r| self.edge_count(&self.graph.dst_start, r) * stage.columns());
        split_rows(&mut message, &self.destinations, stage.node_len())
            .into_par_iter()
            .zip(split(&mut alpha, counts))
            .zip(&self.destinations)
            .for_each(|((out, alpha), range)| {
                stage.forward(&edges, block.attention.as_ref(), &nodes, range.clone(), out, alpha);
            });
        let next_len = engine.state_len(b + 1);
        let mut next = vec![T::zero(); self.graph.n_nodes() * next_len];
        let tiles = node_tiles(self.graph.n_owned);
        split_rows(&mut next, &tiles, next_len).into_par_iter().zip(&tiles).for_each(|(next, range)| {
            let mut x = gather(x, range, engine.state_len(b), engine.channels);
            let mut message = gather(&message, range, stage.node_len(), engine.width);
            let features = gather(&features.rows, range, stage.node_len(), engine.width);
            block.update(&engine.profile, range.len(), &mut x, &mut message, &features);
            scatter(&x, range.len(), engine.channels, next);
        });
        (message, alpha, next)
    }

    /// Read-out and fitting, forward and adjoint: fills the energies, returns dE/d(final state).
    fn energy(&self, x: &[T], want: Request, out: &mut Evaluation) -> Vec<T> {
        let engine = self.engine;
        let (owned, c) = (self.graph.n_owned, engine.channels);
        let len = engine.state_len(engine.blocks.len());
        let mut grad = vec![T::zero(); self.graph.n_nodes() * len];
        let mut energies = vec![0.0; owned];
        let mut descriptor = vec![0.0; if want.descriptor { owned * c } else { 0 }];
        let tiles = node_tiles(owned);
        split_rows(&mut grad, &tiles, len)
            .into_par_iter()
            .zip(energies.par_chunks_mut(NODE_TILE))
            .zip(split_rows(&mut descriptor, &tiles, if want.descriptor { c } else { 0 }))
            .zip(&tiles)
            .for_each(|(((grad, energy), descriptor), range)| {
                let mut time = engine.profile.start();
                let n = range.len();
                let x = gather(x, range, len, c);
                let (d, saved) = engine.readout.forward(n, &x);
                let d: Vec<f64> = d.iter().map(|x| x.wide()).collect();
                descriptor.iter_mut().zip(&d).for_each(|(o, &x)| *o = x);
                let types = &self.graph.types[range.clone()];
                let hidden = engine.fitting.forward(&d, types, energy);
                let grad_d: Vec<T> = engine.fitting.adjoint(types, &hidden).iter().map(|&x| T::of(x)).collect();
                let mut tile = engine.readout.adjoint(n, &saved, &grad_d);
                tile.resize(len * n, T::zero());
                scatter(&tile, n, c, grad);
                time.stage(Stage::Readout);
            });
        out.energy = energies.iter().sum();
        out.atom_energy = energies;
        out.descriptor = descriptor;
        grad
    }

    /// Adjoint of block `b`: dE/d(state before it) from dE/d(state after it).
    fn block_adjoint(
        &self,
        b: usize,
        state: &BlockState<T>,
        grad: Vec<T>,
        by_source: &mut [EdgeGradient],
        grad_normaliser: &mut [f64],
    ) -> Vec<T> {
        let (engine, block, stage) = (self.engine, &self.engine.blocks[b], &self.engine.messages[b]);
        let (nodes, owned) = (self.graph.n_nodes(), self.graph.n_owned);
        let (len, next_len, columns) = (engine.state_len(b), engine.state_len(b + 1), stage.columns());
        let features = self.features(b, &state.x);
        // Node part: around the message, into the aggregated message, and into the node's own features.
        let mut grad_x = vec![T::zero(); nodes * len];
        let mut grad_message = vec![T::zero(); owned * stage.node_len()];
        let mut grad_features = vec![T::zero(); nodes * stage.node_len()];
        let mut along = vec![T::zero(); owned * columns];
        let tiles = node_tiles(owned);
        split_rows(&mut grad_x, &tiles, len)
            .into_par_iter()
            .zip(split_rows(&mut grad_message, &tiles, stage.node_len()))
            .zip(split_rows(&mut grad_features, &tiles, stage.node_len()))
            .zip(split_rows(&mut along, &tiles, columns))
            .zip(&tiles)
            .for_each(|((((grad_x, grad_message), grad_features), along), range)| {
                let n = range.len();
                let mut x = gather(&state.x, range, len, engine.channels);
                let message = gather(&state.message, range, stage.node_len(), engine.width);
                let features = gather(&features.rows, range, stage.node_len(), engine.width);
                let mut gated = message.clone();
                let saved = block.update(&engine.profile, n, &mut x, &mut gated, &features);
                let mut grad = gather(&grad, range, next_len, engine.channels);
                grad.resize(len * n, T::zero());
                let (m, f) = block.update_adjoint(&engine.profile, n, &saved, &message, &features, &mut grad);
                along.copy_from_slice(&block.head_sums(n, n * columns, &message, &m));
                scatter(&grad, n, engine.channels, grad_x);
                scatter(&m, n, engine.width, grad_message);
                scatter(&f, n, engine.width, grad_features);
            });
        drop(grad);
        if block.attention.is_none() {
            for (i, (out, along)) in grad_normaliser.iter_mut().zip(along.chunks_exact(columns)).enumerate() {
                *out += along.iter().map(|x| x.wide()).sum::<f64>() / self.geometry.normaliser[i];
            }
        }
        // Edge part, by sources.
        let scalar_len = if block.attention.is_some() { engine.width } else { 0 };
        let column_len = if block.attention.is_some() { columns } else { 0 };
        let mut grad_key = vec![T::zero(); nodes * scalar_len];
        let mut grad_logits = vec![T::zero(); self.graph.n_edges() * column_len];
        let (edges, view) = (self.edges(), features.view());
        let output = OutputGradient { rows: &grad_message, along: &along, alpha: &state.alpha };
        let counts = || self.sources.iter().map(|r| self.edge_count(&self.graph.src_start, r));
        split_rows(&mut grad_features, &self.sources, stage.node_len())
            .into_par_iter()
            .zip(split_rows(&mut grad_key, &self.sources, scalar_len))
            .zip(split(&mut grad_logits, counts().map(|n| n * column_len)))
            .zip(split(by_source, counts()))
            .zip(&self.sources)
            .for_each(|((((rows, key), logits), gradients), range)| {
                let out = ChunkGradient { rows, key, logits, edges: gradients };
                stage.adjoint(&edges, block.attention.as_ref(), &view, &output, range.clone(), out);
            });
        drop(grad_message);
        let grad_query = self.query_gradient(stage, block.attention.as_ref(), &features.key, &grad_logits);
        // Features back to the state.
        let tiles = node_tiles(nodes);
        split_rows(&mut grad_x, &tiles, len).into_par_iter().zip(&tiles).for_each(|(grad_x, range)| {
            let n = range.len();
            let x = gather(&state.x, range, len, engine.channels);
            let rows = gather(&features.rows, range, stage.node_len(), engine.width);
            let grad = gather(&grad_features, range, stage.node_len(), engine.width);
            let scalars = range.start * scalar_len..range.end * scalar_len;
            let sides = (grad, &grad_query[scalars.clone()], &grad_key[scalars]);
            let mut add = block.features_adjoint(&engine.profile, n, &x, &rows, sides);
            add.resize(len * n, T::zero());
            let mut whole = gather(grad_x, &(0..n), len, engine.channels);
            axpy(T::one(), &add, &mut whole);
            scatter(&whole, n, engine.channels, grad_x);
        });
        grad_x
    }

    /// dE/d(query) of every node: `sum_e dE/d(logit_e) key_src`; zero for remote nodes.
    fn query_gradient(
        &self,
        stage: &MessageStage<T>,
        attention: Option<&AttentionStage<T>>,
        key: &[T],
        grad_logits: &[T],
    ) -> Vec<T> {
        let (Some(attention), width, columns) = (attention, self.engine.width, stage.columns()) else {
            return Vec::new();
        };
        let mut grad_query = vec![T::zero(); self.graph.n_nodes() * width];
        grad_query[..self.graph.n_owned * width].par_chunks_mut(width).enumerate().for_each(|(i, out)| {
            for e in self.graph.dst_start[i]..self.graph.dst_start[i + 1] {
                let source = self.graph.src[e] as usize;
                let at = self.source_position[e] as usize * columns;
                let key = &key[source * width..(source + 1) * width];
                stage.add_head_products(attention.logit_scale(), &grad_logits[at..at + columns], key, out);
            }
        });
        grad_query
    }
}

impl<T> Features<T> {
    fn view(&self) -> NodeFeatures<'_, T> {
        NodeFeatures { rows: &self.rows, query: &self.query, key: &self.key }
    }
}
