/**
 * @file
 * The C interface of sezm, the SeZM / DPA4 interatomic potential. docs/c_abi.md tells how to use it.
 *
 * Every call that can fail returns a sezm_status; sezm_last_error() says what was wrong. Null pointers are
 * refused, not followed. Units: Å, eV, eV/Å.
 */

#ifndef SEZM_H
#define SEZM_H

/* Written by cbindgen from src/c_api: do not edit. */

#include <stddef.h>
#include <stdint.h>

/**
 * The version of this interface. A program refuses a library whose `sezm_abi_version()` is another one.
 */
#define SEZM_ABI_VERSION 1

/**
 * An error that also comes back as a status.
 */
#define SEZM_LOG_ERROR 1

/**
 * Something the user should know about.
 */
#define SEZM_LOG_WARN 2

/**
 * What the library is doing.
 */
#define SEZM_LOG_INFO 3

/**
 * Details for the developers.
 */
#define SEZM_LOG_DEBUG 4

/**
 * Asks for the virial of each node.
 */
#define SEZM_ATOM_VIRIAL 1

/**
 * Asks for the descriptor of each owned atom.
 */
#define SEZM_DESCRIPTOR 2

/**
 * To the exchange callback: overwrite the rows of remote nodes with their owners' rows.
 */
#define SEZM_FORWARD 0

/**
 * To the exchange callback: add the rows of remote nodes to their owners' rows.
 */
#define SEZM_REVERSE 1

/**
 * What a call says of itself. Anything but `SEZM_OK` has a message in `sezm_last_error()`.
 */
typedef enum {
  /**
   * The call did what it was asked.
   */
  SEZM_OK = 0,
  /**
   * An argument cannot be used: a null pointer, a wrong count, an unknown device, an engine in use.
   */
  SEZM_ARGUMENT = 1,
  /**
   * A file could not be read.
   */
  SEZM_IO = 2,
  /**
   * A checkpoint is damaged, is a file of another kind, or has no such branch.
   */
  SEZM_FORMAT = 3,
  /**
   * The model uses an option that this version does not evaluate.
   */
  SEZM_UNSUPPORTED = 4,
  /**
   * The atoms cannot be evaluated: a position, cell or result that is not finite, atoms on top of each other.
   */
  SEZM_STRUCTURE = 5,
  /**
   * A device is missing or failed.
   */
  SEZM_DEVICE = 6,
  /**
   * Not enough memory; the message holds the needed and free sizes.
   */
  SEZM_OUT_OF_MEMORY = 7,
  /**
   * The exchange callback returned a status other than 0.
   */
  SEZM_EXCHANGE_FAILED = 8,
  /**
   * A defect of this library; please report it with the message.
   */
  SEZM_INTERNAL = 255,
} sezm_status;

/**
 * Arithmetic of an engine. Geometry, energy sums, forces and virials are summed in double in all of them.
 */
typedef enum {
  /**
   * Single precision.
   */
  SEZM_FP32 = 0,
  /**
   * Double precision.
   */
  SEZM_FP64 = 1,
} sezm_precision;

/**
 * Evaluates a model. Used by one call at a time: a second call meanwhile, also one from inside the exchange callback,
 * is refused with `SEZM_ARGUMENT`. An engine that failed with `SEZM_INTERNAL` may refuse all later calls.
 */
typedef struct sezm_engine sezm_engine;

/**
 * A model read from a checkpoint. Never changes; any number of threads may use it.
 */
typedef struct sezm_model sezm_model;

/**
 * Takes a log line: `level` is a `SEZM_LOG_*`, `message` is valid during the call only, `context` is the pointer
 * given to `sezm_set_log_callback`. It may be called from any thread, and must not throw or jump out.
 */
typedef void (*sezm_log_callback)(int32_t level, const char *message, void *context);

/**
 * What is to be known about a model. All pointers live as long as the model.
 */
typedef struct {
  /**
   * Cutoff radius, Å.
   */
  double cutoff;
  /**
   * Number of elements: model types are 0 to `element_count - 1`.
   */
  size_t element_count;
  /**
   * Symbol of each element, in the order of the model's types.
   */
  const char *const *elements;
  /**
   * Number of trainable parameters.
   */
  uint64_t parameter_count;
  /**
   * One line for people: degrees, channels, blocks, layers, focuses.
   */
  const char *architecture;
  /**
   * The branch that was read; `Default` for a single-task file.
   */
  const char *branch;
} sezm_model_info;

/**
 * How an engine is made.
 */
typedef struct {
  /**
   * A `sezm_precision`.
   */
  int32_t precision;
  /**
   * `auto`, `cpu`, `gpu` or `gpu:N`; null means `auto`.
   */
  const char *device;
} sezm_options;

/**
 * Time of one stage since the engine was made.
 */
typedef struct {
  /**
   * Name of the stage.
   */
  const char *name;
  /**
   * How often it ran.
   */
  uint64_t calls;
  /**
   * How long in all, seconds.
   */
  double seconds;
} sezm_stage;

/**
 * A full neighbour list of one rank, as LAMMPS lays it out.
 *
 * Atoms are the `n_local` owned ones first, then the ghosts. Nodes carry features: the owned atoms first, then one
 * node for each atom of another rank that has a ghost here. A ghost of an atom of this rank has its owner's node.
 * Pointers are read during the call only; where a count is 0 they may be null.
 */
typedef struct {
  /**
   * Owned atoms.
   */
  int32_t n_local;
  /**
   * Owned atoms and ghosts.
   */
  int32_t n_all;
  /**
   * Owned atoms and remote owners; `n_local` on one rank.
   */
  int32_t n_nodes;
  /**
   * Position of each of the `n_all` atoms at this rebuild: `n_all` x 3, Å.
   */
  const double *x;
  /**
   * Model type of each of the `n_all` atoms; -1 for an atom that is not of this model.
   */
  const int32_t *types;
  /**
   * Node of each of the `n_all` atoms; that of owned atom `i` is `i`, those of remote owners follow without gaps.
   */
  const uint32_t *nodes;
  /**
   * Length of `ilist`.
   */
  int32_t inum;
  /**
   * The owned atoms whose neighbours are listed.
   */
  const int32_t *ilist;
  /**
   * Number of neighbours of atom `i`, at `numneigh[i]`.
   */
  const int32_t *numneigh;
  /**
   * Neighbours of atom `i`, at `firstneigh[i]`: atom indices, with the flag bits of LAMMPS in the top three bits
   * or without; they may lie beyond the cutoff (skin).
   */
  const int32_t *const *firstneigh;
} sezm_neighbours;

/**
 * Moves rows of node features between ranks in the midst of `sezm_engine_compute`.
 *
 * `rows` is `n_nodes` x `width`, row-major, of `float` (`element_size` 4) or `double` (8), in host memory;
 * `direction` is `SEZM_FORWARD` or `SEZM_REVERSE`. All ranks call it equally often in the same order.
 * Returns 0, or anything else to make the call fail with `SEZM_EXCHANGE_FAILED`. It must not throw or jump out.
 */
typedef int (*sezm_exchange_callback)(void *context,
                                      int32_t direction,
                                      void *rows,
                                      int32_t element_size,
                                      size_t n_nodes,
                                      size_t width);

/**
 * How rows travel between ranks.
 */
typedef struct {
  /**
   * Given to the callback.
   */
  void *context;
  /**
   * Called on the thread that called `sezm_engine_compute`.
   */
  sezm_exchange_callback callback;
} sezm_exchange;

/**
 * The answer. Pointers lead into memory of the engine, valid until its next computation or its end.
 */
typedef struct {
  /**
   * Total energy of the owned atoms, eV.
   */
  double energy;
  /**
   * Global virial, the sum of force times coordinate, eV, row-major: force component, coordinate component.
   * Pressure times volume is a third of its trace, and the kinetic part. Ranks add up to the whole system.
   */
  double virial[9];
  /**
   * Energy of each owned atom, eV: `n_local` values.
   */
  const double *atom_energy;
  /**
   * Force on each node, eV/Å: `n_nodes` x 3. Those of remote nodes are to be added at their owners.
   */
  const double *forces;
  /**
   * Virial of each node, eV: `n_nodes` x 9, laid out as `virial`; null unless asked for.
   */
  const double *atom_virial;
  /**
   * Descriptor of each owned atom: `n_local` x `descriptor_width`; null unless asked for.
   */
  const double *descriptor;
  /**
   * Length of a descriptor; 0 unless asked for.
   */
  size_t descriptor_width;
  /**
   * Owned atoms.
   */
  size_t n_local;
  /**
   * Nodes.
   */
  size_t n_nodes;
  /**
   * Directed edges: pairs of a centre and a neighbour within the cutoff.
   */
  size_t n_edges;
} sezm_results;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * The version of the interface that the library was built with: to be compared with `SEZM_ABI_VERSION`.
 */
uint32_t sezm_abi_version(void);

/**
 * The version of the library, for people, e.g. `0.1.0`. Lives for ever.
 */
const char *sezm_version(void);

/**
 * The message of the last call that failed on this thread: what was wrong, where, and what to do.
 *
 * Never null; empty before the first failure. Valid until the next failing call on this thread.
 */
const char *sezm_last_error(void);

/**
 * Sends log lines up to `max_level` (`SEZM_LOG_*`) to `callback`; a null callback silences the library (the default).
 *
 * Serves the whole process; the last call counts. `context` must stay valid until the callback is replaced and calls
 * that are under way on other threads have returned. In a distributed run give it to the rank that prints.
 *
 * Status: `SEZM_ARGUMENT` for an unknown level, or where a Rust host has a logger of its own already.
 *
 * Requires:
 * `callback` must be callable from any thread for as long as it is set.
 */
sezm_status sezm_set_log_callback(sezm_log_callback callback,
                                  void *context,
                                  int32_t max_level);

/**
 * Reads the checkpoint `path` (`.pt`, as `dp --pt train` writes it).
 *
 * `branch` chooses the model of a multi-task file by name or alias; null for a single-task file.
 * `*model` is to be freed with `sezm_model_free`; it is null if the call fails.
 *
 * Status: `SEZM_IO`, `SEZM_FORMAT`, `SEZM_UNSUPPORTED` (an option of the model, by name), `SEZM_ARGUMENT`.
 *
 * Requires:
 * `path` and `branch` are null or end in NUL; `model` is null or a place for a pointer.
 */
sezm_status sezm_model_open(const char *path, const char *branch, sezm_model **model);

/**
 * Frees a model; null is no error. Engines made from it live on.
 *
 * Requires:
 * `model` is null or comes from `sezm_model_open` and was not freed.
 */
sezm_status sezm_model_free(sezm_model *model);

/**
 * Fills `info`.
 *
 * Requires:
 * `model` is null or live; `info` is null or a place for the answer.
 */
sezm_status sezm_model_get_info(const sezm_model *model, sezm_model_info *info);

/**
 * The SHA-256 of the checkpoint file, 64 hexadecimal digits; reads the whole file at the first call.
 * `*sha256` lives as long as the model.
 *
 * Status: `SEZM_IO` if the file can no longer be read.
 *
 * Requires:
 * `model` is null or live; `sha256` is null or a place for a pointer.
 */
sezm_status sezm_model_sha256(const sezm_model *model, const char **sha256);

/**
 * Makes an engine for `model`, which may be freed afterwards.
 *
 * Null `options` mean single precision and the device `auto`.
 * `*engine` is to be freed with `sezm_engine_free`; it is null if the call fails.
 *
 * Status: `SEZM_ARGUMENT` for an unknown precision or device, `SEZM_DEVICE`, `SEZM_OUT_OF_MEMORY`.
 *
 * Requires:
 * `model` and `options` are null or live; `engine` is null or a place for a pointer.
 */
sezm_status sezm_engine_create(const sezm_model *model, const sezm_options *options, sezm_engine **engine);

/**
 * Frees an engine and the results it gave; null is no error.
 *
 * Requires:
 * `engine` is null or comes from `sezm_engine_create`, was not freed and is not in use.
 */
sezm_status sezm_engine_free(sezm_engine *engine);

/**
 * One line for the banner: engine, precision, device, e.g. `CPU, fp32, 2 threads`. Lives as long as the engine.
 *
 * Requires:
 * `engine` is null or live; `description` is null or a place for a pointer.
 */
sezm_status sezm_engine_describe(const sezm_engine *engine,
                                 const char **description);

/**
 * The memory that an engine holds, bytes.
 *
 * Requires:
 * `engine` is null or live; `bytes` is null or a place for the answer.
 */
sezm_status sezm_engine_memory_usage(const sezm_engine *engine, size_t *bytes);

/**
 * The time of each stage: `*stages` points to `*count` of them, valid until the next call of this function.
 *
 * Requires:
 * `engine` is null or live; `stages` and `count` are null or places for the answer.
 */
sezm_status sezm_engine_profile(sezm_engine *engine, const sezm_stage **stages, size_t *count);

/**
 * Takes over a new neighbour list; to be called at each rebuild, before `sezm_engine_compute`.
 *
 * The list may contain pairs beyond the cutoff and must contain all within it, of each owned atom in both directions.
 *
 * Status: `SEZM_ARGUMENT` for counts, types, nodes or neighbours that do not fit each other, `SEZM_STRUCTURE` for
 * positions that are not finite; the engine then has no list.
 *
 * Requires:
 * `engine` and `neighbours` are null or live, and the arrays are as long as `sezm_neighbours` says.
 */
sezm_status sezm_engine_set_neighbours(sezm_engine *engine,
                                       const sezm_neighbours *neighbours);

/**
 * Energy, forces and virial at positions `x` (`n_all` x 3, Å, ghosts in place) with the last neighbour list.
 *
 * `flags` is a sum of `SEZM_ATOM_VIRIAL` and `SEZM_DESCRIPTOR`, or 0. `exchange` is null on one rank. In a distributed
 * run every rank makes the same calls, also a rank without atoms. `results` is emptied first, filled on success.
 *
 * Status: `SEZM_ARGUMENT` (no neighbour list, remote nodes without an exchange, unknown flags), `SEZM_STRUCTURE`,
 * `SEZM_EXCHANGE_FAILED`, `SEZM_OUT_OF_MEMORY`, `SEZM_DEVICE`.
 *
 * Requires:
 * Pointers are null or live; `x` has `3 n_all` values, where `n_all` is that of the last neighbour list.
 */
sezm_status sezm_engine_compute(sezm_engine *engine,
                                const double *x,
                                uint32_t flags,
                                const sezm_exchange *exchange,
                                sezm_results *results);

/**
 * Energy, forces and virial of `n_atoms` atoms in a cell or in free space: for programs without neighbour lists.
 *
 * `x` is `n_atoms` x 3 (Å); `types` are model types, -1 for an atom that is not of this model; `cell` holds the three
 * lattice vectors one after the other (Å), or is null for free space; `pbc` says along which of them the cell repeats
 * (not 0); null means all of them, or none where there is no cell. Nodes are the atoms. The neighbour list of
 * `sezm_engine_set_neighbours` stays.
 * `flags` and `results` are those of `sezm_engine_compute`.
 *
 * Status: `SEZM_ARGUMENT` (types, flags, periodic without a cell), `SEZM_STRUCTURE`, `SEZM_OUT_OF_MEMORY`, `SEZM_DEVICE`.
 *
 * Requires:
 * Pointers are null or live; `x` has `3 n_atoms` values, `types` has `n_atoms`, `cell` has 9 and `pbc` has 3.
 */
sezm_status sezm_engine_compute_cell(sezm_engine *engine,
                                     size_t n_atoms,
                                     const double *x,
                                     const int32_t *types,
                                     const double *cell,
                                     const int32_t *pbc,
                                     uint32_t flags,
                                     sezm_results *results);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* SEZM_H */
