/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Uses every function of sezm.h as a host would: loads a model, compares energies, forces and virials
 * with the reference, provokes each error that a caller can cause, frees everything.
 *
 *   test_sezm MODEL.pt REFERENCE UNSUPPORTED.pt
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sezm.h"

#define MAX_ATOMS 16
#define MAX_ALL 4096

static int failures = 0;

static void check(int ok, const char *what, int line) {
  if (ok) return;
  ++failures;
  fprintf(stderr, "line %d: FAILED: %s (last error: %s)\n", line, what, sezm_last_error());
}
#define CHECK(condition) check((condition), #condition, __LINE__)

/* A call that must fail with this status and a message that holds this text. */
static void refused(sezm_status found, sezm_status expected, const char *text, int line) {
  if (found == expected && strstr(sezm_last_error(), text)) return;
  ++failures;
  fprintf(stderr, "line %d: FAILED: status %d, expected %d with '%s', message: %s\n", line, (int)found,
          (int)expected, text, sezm_last_error());
}
#define REFUSED(call, status, text) refused((call), (status), (text), __LINE__)

/* ---------------------------------------------------------------- reference values */

typedef struct {
  char name[32];
  int n, periodic;
  double cell[9], energy, virial[9];
  int32_t types[MAX_ATOMS];
  double x[3 * MAX_ATOMS], atom_energy[MAX_ATOMS], forces[3 * MAX_ATOMS], atom_virial[9 * MAX_ATOMS];
} frame_t;

static int read_values(FILE *file, double *values, int n) {
  int i;
  for (i = 0; i < n; ++i)
    if (fscanf(file, "%lf", values + i) != 1) return 0;
  return 1;
}

static int read_labelled(FILE *file, const char *label, double *values, int n) {
  char word[32];
  return fscanf(file, "%31s", word) == 1 && strcmp(word, label) == 0 && read_values(file, values, n);
}

static int read_frame(FILE *file, frame_t *frame) {
  int i, ok;
  if (fscanf(file, " frame %31s %d %d", frame->name, &frame->n, &frame->periodic) != 3) return 0;
  ok = frame->n <= MAX_ATOMS && read_labelled(file, "cell", frame->cell, 9) &&
       read_labelled(file, "energy", &frame->energy, 1) && read_labelled(file, "virial", frame->virial, 9);
  for (i = 0; ok && i < frame->n; ++i)
    ok = fscanf(file, "%d", &frame->types[i]) == 1 && read_values(file, frame->x + 3 * i, 3) &&
         read_values(file, frame->atom_energy + i, 1) && read_values(file, frame->forces + 3 * i, 3) &&
         read_values(file, frame->atom_virial + 9 * i, 9);
  CHECK(ok);
  return ok;
}

/* |found - expected| <= absolute + relative |expected| for n values. */
static void compare(const frame_t *frame, const char *what, const double *found, const double *expected,
                    int n, double absolute, double relative) {
  int i;
  CHECK(found != NULL);
  for (i = 0; found && i < n; ++i)
    if (!(fabs(found[i] - expected[i]) <= absolute + relative * fabs(expected[i]))) {
      ++failures;
      fprintf(stderr, "FAILED: %s, %s[%d]: %.17g, expected %.17g\n", frame->name, what, i, found[i],
              expected[i]);
    }
}

static void compare_results(const frame_t *frame, const sezm_results *results, double absolute,
                            double relative) {
  const int n = frame->n;
  CHECK(results->n_local == (size_t)n && results->n_nodes == (size_t)n && results->n_edges > 0);
  compare(frame, "energy", &results->energy, &frame->energy, 1, absolute, relative);
  compare(frame, "virial", results->virial, frame->virial, 9, absolute, relative);
  compare(frame, "atom_energy", results->atom_energy, frame->atom_energy, n, absolute, relative);
  compare(frame, "forces", results->forces, frame->forces, 3 * n, absolute, relative);
  compare(frame, "atom_virial", results->atom_virial, frame->atom_virial, 9 * n, absolute, relative);
}

/* ---------------------------------------------------------------- a neighbour list, as LAMMPS makes one */

typedef struct {
  int n_local, n_all;
  double x[3 * MAX_ALL];
  int32_t types[MAX_ALL], ilist[MAX_ATOMS], numneigh[MAX_ATOMS];
  uint32_t nodes[MAX_ALL];
  int32_t *firstneigh[MAX_ATOMS];
} list_t;

static double distance(const double *a, const double *b) {
  return sqrt((a[0] - b[0]) * (a[0] - b[0]) + (a[1] - b[1]) * (a[1] - b[1]) + (a[2] - b[2]) * (a[2] - b[2]));
}

/* The frame's atoms, ghosts around them, and all pairs within `reach`; some carry special-bond bits. */
static list_t *make_list(const frame_t *frame, double reach) {
  const int images = frame->periodic ? 3 : 0;
  int a, b, c, i, j, k;
  list_t *list = calloc(1, sizeof(list_t));
  if (!list) abort();
  list->n_local = list->n_all = frame->n;
  memcpy(list->x, frame->x, sizeof(frame->x));
  memcpy(list->types, frame->types, sizeof(frame->types));
  for (i = 0; i < frame->n; ++i) list->nodes[i] = (uint32_t)i;
  for (a = -images; a <= images; ++a)
    for (b = -images; b <= images; ++b)
      for (c = -images; c <= images; ++c)
        for (i = 0; i < frame->n && (a || b || c); ++i) {
          const int ghost = list->n_all++;
          if (ghost >= MAX_ALL) abort();
          for (k = 0; k < 3; ++k)
            list->x[3 * ghost + k] =
                frame->x[3 * i + k] + a * frame->cell[k] + b * frame->cell[3 + k] + c * frame->cell[6 + k];
          list->types[ghost] = frame->types[i];
          list->nodes[ghost] = (uint32_t)i;
        }
  for (i = 0; i < frame->n; ++i) {
    int32_t n = 0;
    list->ilist[i] = frame->n - 1 - i;
    list->firstneigh[i] = calloc((size_t)list->n_all, sizeof(int32_t));
    if (!list->firstneigh[i]) abort();
    for (j = 0; j < list->n_all; ++j)
      if (j != i && distance(list->x + 3 * i, list->x + 3 * j) < reach)
        list->firstneigh[i][n++] = j % 3 ? j : (int32_t)((uint32_t)j | ((uint32_t)(j % 4) << 30));
    list->numneigh[i] = n;
  }
  return list;
}

static void free_list(list_t *list) {
  int i;
  for (i = 0; i < list->n_local; ++i) free(list->firstneigh[i]);
  free(list);
}

static sezm_neighbours neighbours_of(const list_t *list) {
  sezm_neighbours n;
  n.n_local = n.n_nodes = n.inum = list->n_local;
  n.n_all = list->n_all;
  n.x = list->x;
  n.types = list->types;
  n.nodes = list->nodes;
  n.ilist = list->ilist;
  n.numneigh = list->numneigh;
  n.firstneigh = (const int32_t *const *)list->firstneigh;
  return n;
}

/* ---------------------------------------------------------------- callbacks */

typedef struct {
  int calls, status;
  size_t n_nodes;
} exchange_state_t;

static int exchange_rows(void *context, int32_t direction, void *rows, int32_t element_size, size_t n_nodes,
                         size_t width) {
  exchange_state_t *state = context;
  ++state->calls;
  state->n_nodes = n_nodes;
  CHECK(direction == SEZM_FORWARD || direction == SEZM_REVERSE);
  CHECK(element_size == 4 || element_size == 8);
  CHECK(width > 0 && (rows != NULL || n_nodes == 0));
  return state->status;
}

static void count_line(int32_t level, const char *message, void *context) {
  CHECK(level >= SEZM_LOG_ERROR && level <= SEZM_LOG_DEBUG && message != NULL);
  ++*(int *)context;
}

/* ---------------------------------------------------------------- what is tested */

static sezm_engine *make_engine(const sezm_model *model, sezm_precision precision) {
  sezm_options options;
  sezm_engine *engine = NULL;
  options.precision = precision;
  options.device = "cpu";
  CHECK(sezm_engine_create(model, &options, &engine) == SEZM_OK);
  return engine;
}

static void test_versions(void) {
  CHECK(sezm_abi_version() == SEZM_ABI_VERSION);
  CHECK(strlen(sezm_version()) >= 5);
  CHECK(strcmp(sezm_last_error(), "") == 0);
}

static void test_model(const sezm_model *model) {
  sezm_model_info info;
  const char *sha256 = NULL;
  CHECK(sezm_model_get_info(model, &info) == SEZM_OK);
  CHECK(info.cutoff == 5.5);
  CHECK(info.element_count == 2);
  CHECK(strcmp(info.elements[0], "Cu") == 0 && strcmp(info.elements[1], "Au") == 0);
  CHECK(info.parameter_count > 10000);
  CHECK(strlen(info.architecture) > 10);
  CHECK(strcmp(info.branch, "Default") == 0);
  CHECK(sezm_model_sha256(model, &sha256) == SEZM_OK && strlen(sha256) == 64);
}

/* Both ways in give the reference's numbers, and the same bits. */
static void test_frame(sezm_engine *engine, const frame_t *frame, double absolute, double relative) {
  const int32_t pbc[3] = {frame->periodic, frame->periodic, frame->periodic};
  const uint32_t flags = SEZM_ATOM_VIRIAL | SEZM_DESCRIPTOR;
  const double *cell = frame->periodic ? frame->cell : NULL;
  exchange_state_t state = {0, 0, 0};
  sezm_exchange exchange;
  sezm_neighbours neighbours;
  sezm_results results;
  double energy, forces[3 * MAX_ATOMS];
  const size_t force_bytes = 3 * sizeof(double) * (size_t)frame->n;
  list_t *list;

  CHECK(sezm_engine_compute_cell(engine, (size_t)frame->n, frame->x, frame->types, cell, pbc, flags,
                                 &results) == SEZM_OK);
  compare_results(frame, &results, absolute, relative);
  if (!results.forces) return;
  CHECK(results.descriptor != NULL && results.descriptor_width > 0);
  energy = results.energy;
  memcpy(forces, results.forces, force_bytes);

  list = make_list(frame, 6.5);
  neighbours = neighbours_of(list);
  CHECK(sezm_engine_set_neighbours(engine, &neighbours) == SEZM_OK);
  CHECK(sezm_engine_compute(engine, list->x, flags, NULL, &results) == SEZM_OK);
  compare_results(frame, &results, absolute, relative);

  exchange.context = &state;
  exchange.callback = exchange_rows;
  CHECK(sezm_engine_compute(engine, list->x, 0, &exchange, &results) == SEZM_OK);
  CHECK(state.calls > 0 && state.n_nodes == (size_t)frame->n);
  CHECK(results.atom_virial == NULL && results.descriptor == NULL && results.descriptor_width == 0);

  /* Without a neighbour list, pbc null means all; the same call gives the same bits. */
  CHECK(sezm_engine_compute_cell(engine, (size_t)frame->n, frame->x, frame->types, cell, NULL, 0, &results) ==
        SEZM_OK);
  CHECK(results.energy == energy && memcmp(results.forces, forces, force_bytes) == 0);
  free_list(list);
}

static void test_engine(sezm_engine *engine) {
  const char *description = NULL;
  const sezm_stage *stages = NULL;
  size_t count = 0, bytes = 0, i;
  CHECK(sezm_engine_describe(engine, &description) == SEZM_OK && strstr(description, "CPU"));
  CHECK(sezm_engine_memory_usage(engine, &bytes) == SEZM_OK && bytes > 0);
  CHECK(sezm_engine_profile(engine, &stages, &count) == SEZM_OK && count > 0);
  for (i = 0; i < count; ++i) CHECK(strlen(stages[i].name) > 0 && stages[i].seconds >= 0.0);
}

static void test_empty(sezm_engine *engine) {
  sezm_neighbours none;
  sezm_results results;
  memset(&none, 0, sizeof(none));
  CHECK(sezm_engine_set_neighbours(engine, &none) == SEZM_OK);
  CHECK(sezm_engine_compute(engine, NULL, 0, NULL, &results) == SEZM_OK);
  CHECK(results.energy == 0.0 && results.n_nodes == 0 && results.n_edges == 0);
  CHECK(sezm_engine_compute_cell(engine, 0, NULL, NULL, NULL, NULL, 0, &results) == SEZM_OK);
}

static void test_model_errors(const char *path, const char *text_file, const char *unsupported) {
  sezm_model *model = (sezm_model *)&failures;
  sezm_model_info info;
  REFUSED(sezm_model_open(NULL, NULL, &model), SEZM_ARGUMENT, "path is a null pointer");
  CHECK(model == NULL);
  REFUSED(sezm_model_open(path, NULL, NULL), SEZM_ARGUMENT, "model is a null pointer");
  REFUSED(sezm_model_open("no/such/file.pt", NULL, &model), SEZM_IO, "no/such/file.pt");
  REFUSED(sezm_model_open(text_file, NULL, &model), SEZM_FORMAT, text_file);
  REFUSED(sezm_model_open(path, "no such branch", &model), SEZM_FORMAT, "no such branch");
  REFUSED(sezm_model_open(unsupported, NULL, &model), SEZM_UNSUPPORTED, "node_wise_s2");
  CHECK(model == NULL);
  REFUSED(sezm_model_get_info(NULL, &info), SEZM_ARGUMENT, "model is a null pointer");
  CHECK(sezm_model_free(NULL) == SEZM_OK);
}

static void test_engine_errors(const sezm_model *model) {
  sezm_engine *engine = NULL;
  sezm_options options = {7, "cpu"};
  REFUSED(sezm_engine_create(NULL, NULL, &engine), SEZM_ARGUMENT, "model is a null pointer");
  REFUSED(sezm_engine_create(model, &options, &engine), SEZM_ARGUMENT, "unknown precision 7");
  options.precision = SEZM_FP32;
  options.device = "abacus";
  REFUSED(sezm_engine_create(model, &options, &engine), SEZM_ARGUMENT, "abacus");
  options.device = "gpu:99";
  REFUSED(sezm_engine_create(model, &options, &engine), SEZM_DEVICE, "gpu:99");
  CHECK(engine == NULL);
  REFUSED(sezm_engine_describe(NULL, NULL), SEZM_ARGUMENT, "engine is a null pointer");
  CHECK(sezm_engine_free(NULL) == SEZM_OK);
}

static void test_compute_errors(sezm_engine *engine, const frame_t *frame) {
  const size_t n = (size_t)frame->n;
  const int32_t wrong_types[2] = {0, 2}, all[3] = {1, 1, 1};
  const double together[6] = {1, 2, 3, 1, 2, 3};
  const double *x = frame->x;
  double bad[3 * MAX_ATOMS], flat[9] = {1, 0, 0, 0, 1, 0, 1, 1, 0};
  sezm_results results;
  REFUSED(sezm_engine_compute_cell(NULL, n, x, frame->types, NULL, NULL, 0, &results), SEZM_ARGUMENT,
          "engine is a null pointer");
  REFUSED(sezm_engine_compute_cell(engine, n, NULL, frame->types, NULL, NULL, 0, &results), SEZM_ARGUMENT,
          "x is a null pointer");
  REFUSED(sezm_engine_compute_cell(engine, n, x, NULL, NULL, NULL, 0, &results), SEZM_ARGUMENT,
          "types is a null pointer");
  REFUSED(sezm_engine_compute_cell(engine, n, x, frame->types, NULL, NULL, 0, NULL), SEZM_ARGUMENT,
          "results is a null pointer");
  REFUSED(sezm_engine_compute_cell(engine, n, x, frame->types, NULL, NULL, 64, &results), SEZM_ARGUMENT,
          "unknown flags 0x40");
  REFUSED(sezm_engine_compute_cell(engine, 2, x, wrong_types, NULL, NULL, 0, &results), SEZM_ARGUMENT,
          "type 2");
  REFUSED(sezm_engine_compute_cell(engine, n, x, frame->types, NULL, all, 0, &results), SEZM_ARGUMENT,
          "no cell");
  REFUSED(sezm_engine_compute_cell(engine, n, x, frame->types, flat, NULL, 0, &results), SEZM_STRUCTURE,
          "cell");
  REFUSED(sezm_engine_compute_cell(engine, 2, together, frame->types, NULL, NULL, 0, &results),
          SEZM_STRUCTURE, "");
  memcpy(bad, x, sizeof(bad));
  bad[4] = NAN;
  REFUSED(sezm_engine_compute_cell(engine, n, bad, frame->types, NULL, NULL, 0, &results), SEZM_STRUCTURE,
          "");
  CHECK(results.forces == NULL && results.n_nodes == 0);
}

static void test_neighbour_errors(sezm_engine *engine, const frame_t *frame) {
  exchange_state_t state = {0, 7, 0};
  sezm_exchange exchange;
  sezm_results results;
  list_t *list = make_list(frame, 6.5);
  const sezm_neighbours good = neighbours_of(list);
  sezm_neighbours bad;
  int32_t kept;

  REFUSED(sezm_engine_compute(engine, list->x, 0, NULL, &results), SEZM_ARGUMENT, "no neighbour list");
  REFUSED(sezm_engine_set_neighbours(engine, NULL), SEZM_ARGUMENT, "neighbours is a null pointer");
  bad = good, bad.n_local = -1;
  REFUSED(sezm_engine_set_neighbours(engine, &bad), SEZM_ARGUMENT, "n_local");
  bad = good, bad.n_all = good.n_local - 1;
  REFUSED(sezm_engine_set_neighbours(engine, &bad), SEZM_ARGUMENT, "n_all");
  bad = good, bad.n_nodes = good.n_local - 1;
  REFUSED(sezm_engine_set_neighbours(engine, &bad), SEZM_ARGUMENT, "node");
  bad = good, bad.x = NULL;
  REFUSED(sezm_engine_set_neighbours(engine, &bad), SEZM_ARGUMENT, "x is a null pointer");
  bad = good, bad.types = NULL;
  REFUSED(sezm_engine_set_neighbours(engine, &bad), SEZM_ARGUMENT, "types is a null pointer");
  bad = good, bad.firstneigh = NULL;
  REFUSED(sezm_engine_set_neighbours(engine, &bad), SEZM_ARGUMENT, "firstneigh is a null pointer");

  kept = list->firstneigh[1][0];
  list->firstneigh[1][0] = good.n_all;
  REFUSED(sezm_engine_set_neighbours(engine, &good), SEZM_ARGUMENT, "neighbour");
  list->firstneigh[1][0] = kept;
  list->numneigh[0] = -list->numneigh[0];
  REFUSED(sezm_engine_set_neighbours(engine, &good), SEZM_ARGUMENT, "numneigh");
  list->numneigh[0] = -list->numneigh[0];
  list->ilist[0] += good.n_all;
  REFUSED(sezm_engine_set_neighbours(engine, &good), SEZM_ARGUMENT, "ilist");
  list->ilist[0] -= good.n_all;
  list->types[0] += 100;
  REFUSED(sezm_engine_set_neighbours(engine, &good), SEZM_ARGUMENT, "type");
  list->types[0] -= 100;
  list->nodes[good.n_all - 1] += 100;
  REFUSED(sezm_engine_set_neighbours(engine, &good), SEZM_ARGUMENT, "node");
  list->nodes[good.n_all - 1] -= 100;
  REFUSED(sezm_engine_compute(engine, list->x, 0, NULL, &results), SEZM_ARGUMENT, "no neighbour list");

  CHECK(sezm_engine_set_neighbours(engine, &good) == SEZM_OK);
  REFUSED(sezm_engine_compute(engine, NULL, 0, NULL, &results), SEZM_ARGUMENT, "x is a null pointer");
  exchange.context = &state;
  exchange.callback = NULL;
  REFUSED(sezm_engine_compute(engine, list->x, 0, &exchange, &results), SEZM_ARGUMENT,
          "callback is a null pointer");
  exchange.callback = exchange_rows;
  REFUSED(sezm_engine_compute(engine, list->x, 0, &exchange, &results), SEZM_EXCHANGE_FAILED, "status 7");

  /* The last ghost becomes a remote node of its own: not without an exchange. */
  list->nodes[good.n_all - 1] = (uint32_t)good.n_local;
  bad = good, bad.n_nodes = good.n_local + 1;
  CHECK(sezm_engine_set_neighbours(engine, &bad) == SEZM_OK);
  REFUSED(sezm_engine_compute(engine, list->x, 0, NULL, &results), SEZM_ARGUMENT, "1 remote node");
  free_list(list);
}

int main(int argc, char **argv) {
  int lines = 0, frames = 0;
  frame_t frame;
  FILE *reference;
  sezm_model *model = NULL;
  sezm_engine *fp64, *fp32;
  if (argc != 4) {
    fprintf(stderr, "usage: test_sezm MODEL.pt REFERENCE UNSUPPORTED.pt\n");
    return 2;
  }
  test_versions();
  REFUSED(sezm_set_log_callback(count_line, &lines, 99), SEZM_ARGUMENT, "unknown log level 99");
  CHECK(sezm_set_log_callback(count_line, &lines, SEZM_LOG_DEBUG) == SEZM_OK);
  test_model_errors(argv[1], argv[2], argv[3]);
  CHECK(sezm_model_open(argv[1], NULL, &model) == SEZM_OK);
  if (!model) return 1;
  test_model(model);
  test_engine_errors(model);
  fp64 = make_engine(model, SEZM_FP64);
  fp32 = make_engine(model, SEZM_FP32);
  CHECK(sezm_model_free(model) == SEZM_OK);

  reference = fopen(argv[2], "r");
  CHECK(reference && fscanf(reference, "%*[^\n]") == 0);
  for (; reference && read_frame(reference, &frame); ++frames) {
    if (frames == 0) test_neighbour_errors(fp64, &frame);
    test_compute_errors(fp64, &frame);
    test_frame(fp64, &frame, 1e-10, 1e-9);
    test_frame(fp32, &frame, 1e-5, 1e-4);
  }
  CHECK(frames == 2);
  if (reference) fclose(reference);
  test_engine(fp64);
  test_engine(fp32);
  test_empty(fp64);
  CHECK(sezm_engine_free(fp64) == SEZM_OK);
  CHECK(sezm_engine_free(fp32) == SEZM_OK);
  CHECK(sezm_set_log_callback(NULL, NULL, SEZM_LOG_INFO) == SEZM_OK);

  if (failures) fprintf(stderr, "%d failures\n", failures);
  return failures != 0;
}
