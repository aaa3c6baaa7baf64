// SPDX-License-Identifier: GPL-2.0-only

#include "pair_sezm.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "atom.h"
#include "comm.h"
#include "domain.h"
#include "error.h"
#include "force.h"
#include "input.h"
#include "memory.h"
#include "neigh_list.h"
#include "neighbor.h"
#include "update.h"
#include "variable.h"

using namespace LAMMPS_NS;

namespace sezm_lammps {
namespace {

constexpr int UNMAPPED = -1;  // of a LAMMPS type that belongs to another style of pair_style hybrid

// LAMMPS' places in a symmetric virial (xx yy zz xy xz yz) and in a full one (... yx zx zy), coordinate
// component first, in terms of the library's row-major (force component, coordinate component).
constexpr int SYMMETRIC_TO_ROW_MAJOR[6][2] = {{0, 0}, {4, 4}, {8, 8}, {1, 3}, {2, 6}, {5, 7}};
constexpr int CENTROID_TO_ROW_MAJOR[9] = {0, 4, 8, 3, 6, 7, 1, 2, 5};

void add_symmetric(double *to, const double *from) {
  for (int k = 0; k < 6; ++k) {
    const auto [a, b] = SYMMETRIC_TO_ROW_MAJOR[k];
    to[k] += 0.5 * (from[a] + from[b]);
  }
}

void add_centroid(double *to, const double *from) {
  for (int k = 0; k < 9; ++k) to[k] += from[CENTROID_TO_ROW_MAJOR[k]];
}

std::string base_name(const std::string &path) { return path.substr(path.find_last_of('/') + 1); }

std::string short_number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", value);
  return text;
}

// The pair style that prints the library's log lines: the youngest one.
PairSezm *log_target = nullptr;

}  // namespace

bool PairSezm::ListKey::operator==(const ListKey &other) const {
  return builds == other.builds && last_build == other.last_build && n_local == other.n_local &&
         n_all == other.n_all;
}

/* ------------------------------------------ life ------------------------------------------ */

PairSezm::PairSezm(LAMMPS *lmp) : Pair(lmp) {}

bool PairSezm::host_layout_matches() const {
  const double root_two = std::sqrt(2.0);
  return restartinfo == 1 && reinitflag == 1 && centroidstressflag == CENTROID_SAME && ncoultablebits == 12 &&
         ndisptablebits == 12 && tabinner == root_two && tabinner_disp == root_two &&
         instance_me == Pair::instance_total - 1 && maxeatom == 0 && maxvatom == 0 && maxcvatom == 0 &&
         copymode == 0 && nextra == 0 && allocated == 0;
}

void PairSezm::declare_abilities() {
  single_enable = 0;
  restartinfo = 0;
  writedata = 0;
  one_coeff = 1;
  manybody_flag = 1;
  no_virial_fdotr_compute = 1;  // the library gives the global virial: LAMMPS need not form it from f.x
  centroidstressflag = CENTROID_AVAIL;
  comm_forward = 1;

  if (comm->me == 0) {
    log_target = this;
    sezm_set_log_callback(&PairSezm::print_log_line, this, SEZM_LOG_WARN);
  }
}

PairSezm::~PairSezm() {
  if (copymode) return;
  if (log_target == this) {
    sezm_set_log_callback(nullptr, nullptr, SEZM_LOG_WARN);
    log_target = nullptr;
  }
  if (allocated) {
    memory->destroy(setflag);
    memory->destroy(cutsq);
  }
}

/* ------------------------------------ input commands ------------------------------------ */

PairSezm::Options PairSezm::parse_options(int narg, char **arg) const {
  static const char *const usage =
      "pair_style sezm MODEL [precision fp32|fp64] [device auto|cpu|gpu|gpu:N] [branch NAME]";
  if (narg < 1) error->all(FLERR, std::string("pair_style sezm: no model file: expected ") + usage);
  Options options;
  options.model_path = arg[0];
  for (int k = 1; k < narg; k += 2) {
    const std::string keyword = arg[k];
    if (keyword != "precision" && keyword != "device" && keyword != "branch")
      error->all(FLERR, "pair_style sezm: unknown keyword '" + keyword + "': expected " + usage);
    if (k + 1 == narg)
      error->all(FLERR, "pair_style sezm: keyword '" + keyword + "' has no value: expected " + usage);
    const std::string value = arg[k + 1];
    if (keyword == "device") {
      options.device = value;
    } else if (keyword == "branch") {
      options.branch = value;
    } else if (value == "fp32") {
      options.precision = SEZM_FP32;
    } else if (value == "fp64") {
      options.precision = SEZM_FP64;
    } else {
      error->all(FLERR, "pair_style sezm: unknown precision '" + value + "': expected fp32 or fp64");
    }
  }
  return options;
}

// May be called again for the same object, with another model: LAMMPS then asks for a new pair_coeff.
void PairSezm::settings(int narg, char **arg) {
  options_ = parse_options(narg, arg);
  engine_.reset();
  model_.reset();
  info_ = {};
  model_type_.clear();
  if (allocated)
    for (int i = 1; i <= atom->ntypes; ++i)
      for (int j = i; j <= atom->ntypes; ++j) setflag[i][j] = 0;

  sezm_model *model = nullptr;
  check(sezm_model_open(options_.model_path.c_str(),
                        options_.branch.empty() ? nullptr : options_.branch.c_str(), &model),
        "pair_style sezm");
  model_.reset(model);
  check(sezm_model_get_info(model_.get(), &info_), "pair_style sezm");
}

void PairSezm::coeff(int narg, char **arg) {
  if (narg < 2 || std::strcmp(arg[0], "*") != 0 || std::strcmp(arg[1], "*") != 0)
    error->all(FLERR, "pair_coeff for pair_style sezm must be: pair_coeff * * ELEMENT1 ELEMENT2 ...");
  model_type_ = narg == 2 ? types_from_labels() : types_from_names(narg - 2, arg + 2);

  if (!allocated) allocate_type_tables();
  for (int i = 1; i <= atom->ntypes; ++i)
    for (int j = i; j <= atom->ntypes; ++j)
      setflag[i][j] = model_type_[i] != UNMAPPED && model_type_[j] != UNMAPPED;
  engine_.reset();  // so that the banner tells the new mapping
}

void PairSezm::allocate_type_tables() {
  const int n = atom->ntypes + 1;
  memory->create(setflag, n, n, "pair:setflag");
  memory->create(cutsq, n, n, "pair:cutsq");
  allocated = 1;
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < n; ++j) setflag[i][j] = 0;
}

std::vector<int> PairSezm::types_from_names(int narg, char **arg) const {
  if (narg != atom->ntypes)
    error->all(FLERR, "pair_coeff for pair_style sezm: " + std::to_string(narg) + " element name(s) for " +
                          std::to_string(atom->ntypes) +
                          " atom type(s): name one for each type (NULL for a type of " +
                          "another pair style); the model's elements are: " + element_list());
  std::vector<int> types{UNMAPPED};
  for (int k = 0; k < narg; ++k) {
    const bool is_null = std::strcmp(arg[k], "NULL") == 0;
    types.push_back(is_null ? UNMAPPED : element_index(arg[k]));
    if (!is_null && types.back() == UNMAPPED)
      error->all(FLERR, "pair_coeff for pair_style sezm: atom type " + std::to_string(k + 1) +
                            ": the model " + base_name(options_.model_path) + " has no element '" + arg[k] +
                            "'; its elements are: " + element_list());
  }
  return types;
}

std::vector<int> PairSezm::types_from_labels() const {
  std::vector<int> types(atom->ntypes + 1, UNMAPPED);
  if (atom->labelmapflag)
    for (std::size_t e = 0; e < info_.element_count; ++e) {
      // The label map is asked in the language of input scripts: its header is not installed with LAMMPS.
      const std::string argument = std::string("(atom,") + info_.elements[e] + ")";
      if (input->variable->compute_equal("is_typelabel" + argument) != 1.0) continue;
      types[static_cast<int>(input->variable->compute_equal("label2type" + argument))] = static_cast<int>(e);
    }
  for (int type = 1; type <= atom->ntypes; ++type)
    if (types[type] == UNMAPPED)
      error->all(
          FLERR,
          "pair_coeff * * for pair_style sezm without element names needs a type label for each atom " +
              std::string("type that is an element of the model, and type ") + std::to_string(type) +
              " has none: write pair_coeff * * ELEMENT1 ELEMENT2 ...; the model's elements are: " +
              element_list());
  return types;
}

int PairSezm::element_index(const std::string &name) const {
  for (std::size_t e = 0; e < info_.element_count; ++e)
    if (name == info_.elements[e]) return static_cast<int>(e);
  return UNMAPPED;
}

std::string PairSezm::element_list() const {
  std::string list;
  for (std::size_t e = 0; e < info_.element_count; ++e)
    list += (e ? " " : "") + std::string(info_.elements[e]);
  return list;
}

/* -------------------------------- beginning of a run -------------------------------- */

void PairSezm::init_style() {
  refuse_unsupported_set_up();
  neighbor->add_request(this, NeighConst::REQ_FULL);
  list_is_stale_ = true;
  if (!engine_) {
    create_engine();
    print_banner();
  }
}

void PairSezm::refuse_unsupported_set_up() const {
  if (comm->nprocs > 1)
    error->all(FLERR, "pair_style sezm: this version runs on one MPI rank, not on " +
                          std::to_string(comm->nprocs) +
                          ": start lmp without mpirun or with mpirun -n 1 (all cores are used by threads)");
  if (std::strcmp(update->unit_style, "metal") != 0)
    error->all(FLERR, std::string("pair_style sezm: units ") + update->unit_style +
                          " is not supported: use units metal (Angstrom, eV, bar)");
  if (domain->dimension != 3)
    error->all(FLERR, "pair_style sezm: the model is three-dimensional: use dimension 3");
  if (force->newton_pair == 0) error->all(FLERR, "pair_style sezm requires newton pair on");
  if (atom->tag_enable == 0) error->all(FLERR, "pair_style sezm requires atom IDs: use atom_modify id yes");
  // A special bond whose factors are both 0 is left out of the neighbour list, and the model must see all
  // pairs.
  if (atom->molecular != Atom::ATOMIC && atom->nbonds > 0)
    for (int k = 1; k <= 3; ++k)
      if (force->special_lj[k] == 0.0 && force->special_coul[k] == 0.0)
        error->all(FLERR,
                   "pair_style sezm needs all pairs, and special_bonds takes bonded ones out of the "
                   "neighbour list: use special_bonds lj/coul 1 1 1");
  if (comm->me == 0 && (neighbor->nex_type > 0 || neighbor->nex_group > 0 || neighbor->nex_mol > 0))
    error->warning(FLERR,
                   "pair_style sezm: the model does not see the pairs that neigh_modify exclude takes out of "
                   "the neighbour list: energies and forces are not those of the whole system");
}

void PairSezm::create_engine() {
  const sezm_options options{options_.precision, options_.device.c_str()};
  sezm_engine *engine = nullptr;
  check(sezm_engine_create(model_.get(), &options, &engine), "pair_style sezm");
  engine_.reset(engine);
}

void PairSezm::print_banner() const {
  const char *sha256 = nullptr, *engine = nullptr;
  check(sezm_model_sha256(model_.get(), &sha256), "pair_style sezm");
  check(sezm_engine_describe(engine_.get(), &engine), "pair_style sezm");
  std::string types;
  for (int type = 1; type <= atom->ntypes; ++type)
    types += " " + std::to_string(type) + "=" +
             (model_type_[type] == UNMAPPED ? "NULL" : info_.elements[model_type_[type]]);

  say(std::string("pair_style sezm (version ") + sezm_version() + ")");
  say("  model:        " + options_.model_path + " (sha256 " + std::string(sha256).substr(0, 12) + ")");
  if (!options_.branch.empty()) say(std::string("  branch:       ") + info_.branch);
  say(std::string("  architecture: ") + info_.architecture);
  say("  atom types:  " + types);
  say("  cutoff:       " + short_number(info_.cutoff) + " Angstrom");
  say(std::string("  engine:       ") + engine);
}

void PairSezm::init_list(int id, NeighList *neighbour_list) {
  Pair::init_list(id, neighbour_list);
  list_is_stale_ = true;
}

double PairSezm::init_one(int i, int j) {
  if (setflag[i][j] == 0) error->all(FLERR, "All pair coeffs are not set");
  return info_.cutoff;
}

// LAMMPS sets its count of neighbour list builds back to 0 just before this call.
void PairSezm::setup() { list_is_stale_ = true; }

/* --------------------------------------- each step --------------------------------------- */

void PairSezm::compute(int eflag, int vflag) {
  ev_init(eflag, vflag);
  if (list_changed()) hand_over_list();

  const bool want_atom_virial = vflag_atom || cvflag_atom;
  sezm_results results;
  check(sezm_engine_compute(engine_.get(), positions(), want_atom_virial ? SEZM_ATOM_VIRIAL : 0, nullptr,
                            &results),
        "pair_style sezm, step " + std::to_string(update->ntimestep));
  add_results(results);
}

// Of owned atoms, then of ghosts, one after the other.
const double *PairSezm::positions() const {
  return atom->nlocal + atom->nghost > 0 ? &atom->x[0][0] : nullptr;
}

PairSezm::ListKey PairSezm::current_list_key() const {
  return {neighbor->ncalls, neighbor->lastcall, atom->nlocal, atom->nlocal + atom->nghost};
}

bool PairSezm::list_changed() const {
  return list_is_stale_ || !(list_key_ == current_list_key()) ||
         // Fixes like atom/swap change types between two builds.
         !std::equal(lammps_types_.begin(), lammps_types_.end(), atom->type);
}

void PairSezm::hand_over_list() {
  list_is_stale_ = true;  // should anything below fail
  const ListKey key = current_list_key();
  lammps_types_.assign(atom->type, atom->type + key.n_all);
  types_.resize(key.n_all);
  for (int i = 0; i < key.n_all; ++i) types_[i] = model_type_[lammps_types_[i]];

  // Each ghost learns its owner's local index the way positions travel, so no atom map is needed.
  nodes_.assign(key.n_all, 0);
  for (int i = 0; i < key.n_local; ++i) nodes_[i] = static_cast<std::uint32_t>(i);
  comm->forward_comm(this);

  sezm_neighbours neighbours{};
  neighbours.n_local = key.n_local;
  neighbours.n_all = key.n_all;
  neighbours.n_nodes = key.n_local;
  neighbours.x = positions();
  neighbours.types = types_.data();
  neighbours.nodes = nodes_.data();
  neighbours.inum = list->inum;
  neighbours.ilist = list->ilist;
  neighbours.numneigh = list->numneigh;
  neighbours.firstneigh = list->firstneigh;
  check(sezm_engine_set_neighbours(engine_.get(), &neighbours),
        "pair_style sezm, step " + std::to_string(update->ntimestep));

  list_key_ = key;
  list_is_stale_ = false;
}

void PairSezm::add_results(const sezm_results &results) {
  const int n_local = atom->nlocal;
  for (int i = 0; i < n_local; ++i)
    for (int k = 0; k < 3; ++k) atom->f[i][k] += results.forces[3 * i + k];
  if (eflag_global) eng_vdwl += results.energy;
  if (eflag_atom)
    for (int i = 0; i < n_local; ++i) eatom[i] += results.atom_energy[i];
  if (vflag_global) add_symmetric(virial, results.virial);
  if (vflag_atom)
    for (int i = 0; i < n_local; ++i) add_symmetric(vatom[i], results.atom_virial + 9 * i);
  if (cvflag_atom)
    for (int i = 0; i < n_local; ++i) add_centroid(cvatom[i], results.atom_virial + 9 * i);
}

int PairSezm::pack_forward_comm(int n, int *atoms, double *buffer, int, int *) {
  for (int k = 0; k < n; ++k) buffer[k] = nodes_[atoms[k]];  // exact: an index has 32 bits, a double 53
  return n;
}

void PairSezm::unpack_forward_comm(int n, int first, double *buffer) {
  for (int k = 0; k < n; ++k) nodes_[first + k] = static_cast<std::uint32_t>(buffer[k]);
}

double PairSezm::memory_usage() {
  std::size_t engine_bytes = 0;
  if (engine_) check(sezm_engine_memory_usage(engine_.get(), &engine_bytes), "pair_style sezm");
  const std::size_t shim_bytes = lammps_types_.capacity() * sizeof(int) +
                                 types_.capacity() * sizeof(std::int32_t) +
                                 nodes_.capacity() * sizeof(std::uint32_t);
  return Pair::memory_usage() + static_cast<double>(engine_bytes + shim_bytes);
}

/* --------------------------------- messages --------------------------------- */

// To be called by all ranks together: a failure on any of them ends the run on all, with the message of the
// first.
void PairSezm::check(sezm_status status, const std::string &context) const {
  const int mine = status == SEZM_OK ? comm->nprocs : comm->me;
  int first = mine;
  MPI_Allreduce(&mine, &first, 1, MPI_INT, MPI_MIN, world);
  if (first == comm->nprocs) return;

  std::string message = sezm_last_error();
  int length = static_cast<int>(message.size());
  MPI_Bcast(&length, 1, MPI_INT, first, world);
  message.resize(length);
  MPI_Bcast(&message[0], length, MPI_CHAR, first, world);
  error->all(FLERR, context + ": " + message);
}

void PairSezm::say(const std::string &line) const {
  if (comm->me != 0) return;
  for (FILE *file : {screen, logfile})
    if (file) std::fprintf(file, "%s\n", line.c_str());
}

void PairSezm::print_log_line(std::int32_t level, const char *message, void *context) {
  // Errors also come back as a status.
  if (level == SEZM_LOG_WARN) static_cast<PairSezm *>(context)->say(std::string("WARNING: sezm: ") + message);
}

}  // namespace sezm_lammps
